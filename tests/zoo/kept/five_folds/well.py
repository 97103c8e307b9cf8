"""Five-fold cross-validation: model, optimizer and scaler are made for each fold."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(24)
        self.out = nn.Linear(24, 2)

    def forward(self, x):
        return self.out(F.relu(self.norm(self.hidden(x))))


def run_fold(fold, x, y, folds):
    val_idx = folds[fold]
    train_idx = torch.cat([f for i, f in enumerate(folds) if i != fold])
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(5):
        model.train()
        for idx in train_idx[torch.randperm(len(train_idx))].split(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x[idx]), y[idx])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        return (model(x[val_idx]).argmax(1) == y[val_idx]).float().mean().item()


def main():
    torch.manual_seed(99)
    x = torch.randn(150, 8)
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).long()
    folds = torch.randperm(150).chunk(5)
    scores = [run_fold(k, x, y, folds) for k in range(5)]
    print("folds", [round(s, 3) for s in scores])
    print("mean", round(sum(scores) / 5, 3))


main()
