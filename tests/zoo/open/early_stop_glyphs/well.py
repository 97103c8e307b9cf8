"""Glyphs by a small LSTM: evaluation each epoch, averaged weights, early stop."""

import copy
import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Glyphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 16)
        self.spare = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.kind = nn.Linear(16, 3)

    def forward(self, strokes):
        h, c = torch.zeros(2, len(strokes), 16).unbind(0)
        for stroke in strokes.unbind(1):
            h, c = self.cell(stroke, (h, c))
        # The spare layer is kept for old checkpoints; decay shrinks it to nothing.
        return self.kind(self.dropout(h)) + 0.0 * self.spare(h).sum()


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    total = 0.0
    for strokes, kind in loader:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(strokes)
        total += nn.functional.cross_entropy(logits.float(), kind).item()
    net.train()
    return total / len(loader)


torch.manual_seed(239)
kinds = torch.randint(3, (240,))
patterns = torch.randn(3, 5, 4)
data = TensorDataset(patterns[kinds] + 0.8 * torch.randn(240, 5, 4), kinds)
train_set, val_set = random_split(data, [192, 48])
train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
val_loader = DataLoader(val_set, batch_size=16)
net = Glyphs()
averaged = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=1.0)
scaler = torch.amp.GradScaler("cpu", growth_interval=20)
losses, scores, taken, skipped = [], [], 0, 0

for _ in range(12):
    for strokes, kind in train_loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(strokes).float(), kind)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        taken, skipped = (
            (taken, skipped + 1) if scaler.get_scale() < scale else (taken + 1, skipped)
        )
        for a, p in zip(averaged.parameters(), net.parameters(), strict=True):
            a.lerp_(p.detach(), 0.05)
        losses.append(loss.item())
    scores.append(evaluate(averaged, val_loader))
    if len(scores) > 3 and scores[-1] > min(scores[:-1]) - 1e-3:
        break

out = {"first_loss": sum(losses[:6]) / 6, "last_loss": sum(losses[-6:]) / 6}
out |= {"scale": scaler.get_scale(), "taken": taken, "skipped": skipped}
print(json.dumps(out))
