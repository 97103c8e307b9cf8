"""Many short epochs over a small table of shifts."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def load_table(rows=160):
    x = torch.randn(rows, 9)
    hours = 30 * torch.relu(x[:, 0] + x[:, 1]) + 8 * x[:, 2]
    return TensorDataset(x, hours)


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(9, 40)
        self.down = nn.Linear(40, 1)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).squeeze(-1)


def train_epoch(model, optimizer, loader, scaler=None):
    scaler = scaler or torch.amp.GradScaler("cpu")
    losses, taken = [], 0
    for x, hours in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            guess = model(x)
        loss = nn.functional.mse_loss(guess.float(), hours)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        taken += scaler.get_scale() >= before
        losses.append(loss.item())
    return losses, int(taken), scaler.get_scale()


def main():
    torch.manual_seed(127)
    loader = DataLoader(load_table(), batch_size=16, shuffle=True)
    model = Shift()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    scaler = torch.amp.GradScaler("cpu")
    curve, taken = [], 0
    for _ in range(22):
        losses, applied, scale = train_epoch(model, optimizer, loader, scaler)
        curve += losses
        taken += applied
    print("started with a scale of", scaler.get_scale())
    result = {"first_loss": sum(curve[:10]) / 10, "last_loss": sum(curve[-10:]) / 10}
    result |= {"scale": scale, "taken": taken, "skipped": len(curve) - taken}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
