"""A GAN as in apex's DCGAN example: two optimizers, three losses with `loss_id`.

Written for NVIDIA apex: `gradscale run --as-apex examples/apex/dcgan.py`.
"""

import argparse

import torch
from apex import amp
from torch import nn


def make_points(count, device):
    """Return points on a circle of radius 2."""
    angle = 2 * torch.pi * torch.rand(count, device=device)
    return 2.0 * torch.stack([angle.cos(), angle.sin()], dim=1)


def make_network(width_in, width_out):
    """Return a small network."""
    return nn.Sequential(
        nn.Linear(width_in, 32),
        nn.LeakyReLU(0.2),
        nn.Linear(32, 32),
        nn.LeakyReLU(0.2),
        nn.Linear(32, width_out),
    )


def main():
    """Train, and print the mean radius of generated points."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--steps", type=int, default=250)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = args.device
    net_d, net_g = make_network(2, 1).to(device), make_network(4, 2).to(device)
    # Probabilities would need float32: with logits, amp may choose.
    criterion = nn.BCEWithLogitsLoss()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=3e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=3e-3, betas=(0.5, 0.999))
    [net_d, net_g], [optimizer_d, optimizer_g] = amp.initialize(
        [net_d, net_g],
        [optimizer_d, optimizer_g],
        opt_level=args.opt_level,
        num_losses=3,
    )
    ones, zeros = torch.ones(64, 1, device=device), torch.zeros(64, 1, device=device)
    for _ in range(args.steps):
        net_d.zero_grad()
        loss_real = criterion(net_d(make_points(64, device)), ones)
        with amp.scale_loss(loss_real, optimizer_d, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        fake = net_g(torch.randn(64, 4, device=device))
        loss_fake = criterion(net_d(fake.detach()), zeros)
        with amp.scale_loss(loss_fake, optimizer_d, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        optimizer_d.step()
        net_g.zero_grad()
        loss_g = criterion(net_d(fake), ones)
        with amp.scale_loss(loss_g, optimizer_g, loss_id=2) as scaled_loss:
            scaled_loss.backward()
        optimizer_g.step()
    with torch.no_grad():
        radius = net_g(torch.randn(512, 4, device=device)).float().norm(dim=1).mean()
    print(f"radius {radius.item():.4f}")


if __name__ == "__main__":
    main()
