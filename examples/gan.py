"""Train a GAN in FP16: two optimizers, and a separate scale for each loss.

  python examples/gan.py

The generator learns points on a ring. Its loss and that of the discriminator have
gradients of different sizes, so each has a scale: when one overflows, only its scale is
lowered, and only the optimizer of its parameters skips.
"""

import argparse
import math

import torch
from torch import Tensor, nn

from gradscale.torch import GradScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Return a small network."""
    layers = nn.Linear(inputs, 16), nn.LeakyReLU(0.2), nn.Linear(16, outputs)
    return nn.Sequential(*layers).to(DEVICE)


def ring(points: int) -> Tensor:
    """Return f32[points, 2] near a circle of radius 2."""
    angle = torch.rand(points, 1, device=DEVICE) * math.tau
    return 2 * torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn_like(
        angle.expand(-1, 2)
    )


def train(steps: int) -> float:
    """Train; return the mean radius of generated points."""
    torch.manual_seed(0)
    generator, critic = mlp(4, 2), mlp(2, 1)
    for_generator = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.9))
    for_critic = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))
    scaler = GradScaler(DEVICE)
    bce = nn.functional.binary_cross_entropy_with_logits
    for step in range(1, steps + 1):
        real, noise = ring(32), torch.randn(32, 4, device=DEVICE)
        for_critic.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            fake = generator(noise)
            right, wrong = critic(real), critic(fake.detach())
            loss = bce(right.float(), torch.ones_like(right, dtype=torch.float32))
            loss = loss + bce(wrong.float(), torch.zeros_like(wrong).float())
        with scaler.loss(loss, id="critic") as scaled:
            scaled.backward()
        scaler.step(for_critic)

        for_generator.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            judged = critic(fake).float()
            mistake = bce(judged, torch.ones_like(judged))
        with scaler.loss(mistake, id="generator") as scaled:
            scaled.backward()
        scaler.step(for_generator)
        scaler.update()
        if step % 50 == 0 or step == steps:
            scales = [scaler.loss_scale(id) for id in ("critic", "generator")]
            print(f"step {step}: scales {scales}, {scaler.skipped_steps} skipped")
    with torch.no_grad():
        return generator(torch.randn(256, 4, device=DEVICE)).norm(dim=1).mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    print(f"mean radius {train(parser.parse_args().steps):.2f}, wanted 2.00")
