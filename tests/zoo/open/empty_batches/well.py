"""Token labels with many ignored positions; a batch without labels has loss 0."""

import json

import torch
from torch import nn

torch.manual_seed(95)
tagger = nn.Sequential(
    nn.Embedding(20, 16), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5)
)
opt = torch.optim.Adam(tagger.parameters(), lr=6e-3)
scaler = torch.amp.GradScaler("cpu")
criterion = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")
losses, skipped = [], 0
for _ in range(140):
    ids = torch.randint(0, 20, (6, 5))
    tags = ids % 5
    tags[torch.rand(6, 5) < 0.6] = -100
    if torch.rand(()) < 0.1:
        tags[:] = -100
    labels = (tags != -100).sum()
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = tagger(ids)
        loss = criterion(logits.flatten(0, 1).float(), tags.flatten())
        loss = loss / labels.clamp(min=1)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    if labels:
        losses.append(loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 140 - skipped,
            "skipped": skipped,
        }
    )
)
