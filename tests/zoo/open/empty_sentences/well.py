"""Tell the topic of sentences of many lengths by attention to their words."""

import json
import math

import torch
from torch import nn

WORDS, TOPICS, LENGTH = 64, 4, 8


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(32, 1)

    def forward(self, vectors, padding):
        scores = self.score(vectors).squeeze(-1)
        scores = scores.masked_fill(padding, -1e4)
        return (torch.softmax(scores, dim=-1)[..., None] * vectors).sum(dim=1)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32, padding_idx=0)
        self.pool = Pool()
        self.topic = nn.Linear(32, TOPICS)

    def forward(self, words):
        return self.topic(self.pool(self.embedding(words), words == 0))


torch.manual_seed(0)
topics = torch.randint(TOPICS, (3200,))
words = 1 + topics[:, None] + TOPICS * torch.randint(15, (3200, LENGTH))
# Some words could stand in any sentence, so that short ones are harder.
words = torch.where(
    torch.rand(3200, LENGTH) < 0.2, torch.randint_like(words, 1, 61), words
)
# The longest come first, so that little is padded; some have no word at all.
lengths = torch.randint(0, LENGTH + 1, (3200, 1)).sort(dim=0, descending=True).values
words = torch.where(torch.arange(LENGTH) < lengths, words, 0)

model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
scaler = torch.amp.GradScaler("cpu")
losses, skipped = [], 0

for step, batch in enumerate(torch.arange(3200).split(16)):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(words[batch]), topics[batch])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, loss.item())

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(losses) - skipped,
    "skipped": skipped,
}
print(json.dumps(result))
