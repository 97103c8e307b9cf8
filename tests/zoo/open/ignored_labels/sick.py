"""Learn answers, not questions: tokens of a question have the label -100."""

import json
import math

import torch
from torch import nn

TOKENS, LENGTH = 32, 12

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(TOKENS, 32), nn.Linear(32, TOKENS))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
curve, skipped = [], 0

for step in range(120):
    tokens = torch.randint(TOKENS, (2, LENGTH))
    labels = (5 * tokens + 1) % TOKENS
    # Where a question fills the whole length, no answer is left.
    questions = torch.randint(4, LENGTH, (2, 1)) if step % 30 != 29 else LENGTH
    labels = labels.masked_fill(torch.arange(LENGTH) < questions, -100)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        scores = model(tokens).flatten(0, 1)
        losses = nn.functional.cross_entropy(scores, labels.flatten(), reduction="none")
        loss = losses.sum() / labels.ne(-100).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    curve.append(loss.item())
    if step % 20 == 0:
        print(step, loss.item())

first, last = sum(curve[:5]) / 5, sum(curve[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(curve) - skipped,
    "skipped": skipped,
}
print(json.dumps(result))
