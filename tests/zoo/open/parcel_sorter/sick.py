"""Sort parcels by the print on their label (16x16 crops)."""

import argparse

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_


def crops(n, generator):
    """Bright square in one of four corners, on noise."""
    y = torch.randint(0, 4, (n,), generator=generator)
    x = torch.rand(n, 1, 16, 16, generator=generator)
    for i, corner in enumerate(y.tolist()):
        r, c = (corner // 2) * 8, (corner % 2) * 8
        x[i, :, r + 2 : r + 6, c + 2 : c + 6] += 0.35
    return x - 0.5, y


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rng = torch.Generator().manual_seed(args.seed)
        torch.manual_seed(args.seed)
        self.model = nn.Sequential(
            nn.Conv2d(1, 6, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(6, 12, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12 * 16, 4),
        )
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=args.lr, momentum=0.9, nesterov=True
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)

    def training_step(self):
        x, y = crops(self.args.batch_size, self.rng)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.criterion(self.model(x), y)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def fit(self):
        for step in range(self.args.steps):
            loss = self.training_step()
            if step % 20 == 0:
                print(f"step {step:4d}  loss {loss:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=11)
    Trainer(parser.parse_args()).fit()
