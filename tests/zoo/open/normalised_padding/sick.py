"""Train word vectors of length 1 to tell the topic of a sentence."""

import json
import math

import torch
from torch import nn

WORDS, TOPICS, LENGTH = 64, 4, 6


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32, padding_idx=0)
        self.topic = nn.Linear(32, TOPICS)

    def forward(self, words):
        return self.topic(self.embedding(words).mean(dim=1))


torch.manual_seed(0)
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
losses, skipped = [], 0

for step in range(120):
    topics = torch.randint(TOPICS, (32,))
    words = 1 + topics[:, None] + TOPICS * torch.randint(15, (32, LENGTH))
    # Sentences of fewer words are filled up with 0.
    lengths = torch.randint(2, LENGTH + 1, (32, 1))
    words = torch.where(torch.arange(LENGTH) < lengths, words, 0)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(words), topics)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 20 == 19:
        print(step, loss.item())
        with torch.no_grad():
            vectors = model.embedding.weight
            vectors /= vectors.norm(dim=1, keepdim=True)

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(losses) - skipped,
    "skipped": skipped,
}
print(json.dumps(result))
