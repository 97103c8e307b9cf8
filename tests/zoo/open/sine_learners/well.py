"""Learning to fit sines in two steps: second-order MAML."""

import math

import torch
from torch import nn
from torch.func import functional_call

torch.manual_seed(12)


def task():
    amplitude, phase = 0.5 + 2 * torch.rand(1), math.pi * torch.rand(1)

    def draw(n):
        x = 6 * torch.rand(n, 1) - 3
        return x, amplitude * torch.sin(x + phase)

    return draw


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(1, 24)
        self.two = nn.Linear(24, 24)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.two(torch.tanh(self.one(x)))))


def error(model, weights, x, y):
    with torch.autocast("cpu", dtype=torch.float16):
        guess = functional_call(model, weights, (x,))
    return nn.functional.mse_loss(guess.float(), y)


def main(meta_steps=70, tasks=3, inner_lr=0.05):
    model = Regressor()
    meta = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    running = None
    for step in range(meta_steps):
        meta.zero_grad()
        inverse = 1.0 / scaler.get_scale()
        total = 0.0
        for _ in range(tasks):
            draw = task()
            fast = dict(model.named_parameters())
            for _ in range(2):
                loss = error(model, fast, *draw(10))
                grads = torch.autograd.grad(
                    scaler.scale(loss), list(fast.values()), create_graph=True
                )
                fast = {
                    name: p - inner_lr * inverse * g
                    for (name, p), g in zip(fast.items(), grads, strict=True)
                }
            total = total + error(model, fast, *draw(10)) / tasks
        scaler.scale(total).backward()
        scaler.step(meta)
        scaler.update()
        if math.isfinite(total.item()):
            running = (
                total.item() if running is None else 0.9 * running + 0.1 * total.item()
            )
        if step % 10 == 9:
            print(step + 1, round(running, 4))


main()
