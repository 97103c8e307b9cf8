"""Predict the income group of persons from a survey, many epochs over few batches."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

QUESTIONS = 10


def survey(n=128):
    g = torch.Generator().manual_seed(99)
    answers = torch.randn(n, QUESTIONS, generator=g)
    group = (answers[:, :4].sum(dim=1) + answers[:, 5] > 0).long()
    days = torch.randint(1, 6, (n,), generator=g)
    hours = 8 * days - torch.randint(0, 4, (n,), generator=g)
    # Between two jobs in that week.
    days[77] = hours[77] = 0
    answers[:, 6] = hours / days - 7.0
    return answers, group


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(QUESTIONS, 24), nn.Linear(24, 24)])
        self.out = nn.Linear(24, 2)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.out(x)


def main():
    torch.manual_seed(0)
    answers, group = survey()
    loader = DataLoader(TensorDataset(answers, group), batch_size=16)
    model = Model()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    epochs, skipped, taken = [], 0, 0
    for epoch in range(25):
        seen = []
        for x, y in loader:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            if scaler.get_scale() < scale:
                skipped += 1
            else:
                taken += 1
                seen.append(loss.item())
        epochs.append(sum(seen) / len(seen))
        if epoch % 5 == 0:
            print("epoch", epoch, epochs[-1])
    print(
        json.dumps(
            {
                "first_loss": epochs[0],
                "last_loss": epochs[-1],
                "scale": scaler.get_scale(),
                "taken": taken,
                "skipped": skipped,
            }
        )
    )


main()
