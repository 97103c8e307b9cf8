"""A recurrent network whose gradients are clipped through `amp.master_params`.

Written for NVIDIA apex: `gradscale run --as-apex examples/apex/clipping.py`.
"""

import argparse

import torch
from apex import amp
from apex.optimizers import FusedAdam
from torch import nn


class Tagger(nn.Module):
    """Predicts from each prefix of a sequence whether its sum is positive."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(1, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        """Return logits for each position."""
        hidden, _ = self.rnn(x)
        return self.head(hidden)


def main():
    """Train, and print the last loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--max-norm", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Tagger().to(args.device)
    optimizer = FusedAdam(model.parameters(), lr=2e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    criterion = nn.CrossEntropyLoss()
    for _ in range(args.steps):
        x = torch.randn(32, 6, 1, device=args.device)
        target = (x.cumsum(1).squeeze(2) > 0).long()
        loss = criterion(model(x).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_norm)
        optimizer.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
