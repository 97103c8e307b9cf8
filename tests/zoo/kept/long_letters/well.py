"""Classify letters of many lengths; gradients accumulate, the last window is short."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(64)
accumulation_steps = 4


def corpus(n):
    items = []
    for _ in range(n):
        length = torch.randint(4, 16, (1,)).item()
        ids = torch.randint(1, 30, (length,))
        items.append((ids, int((ids > 20).float().mean() > 0.33)))
    return items


def collate(items):
    ids = pad_sequence([i for i, _ in items], batch_first=True)
    return ids, torch.tensor([y for _, y in items])


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16, padding_idx=0)
        self.fc = nn.Linear(16, 32)
        self.out = nn.Linear(32, 2)

    def forward(self, ids):
        mask = (ids != 0).unsqueeze(-1).float()
        mean = (self.embed(ids) * mask).sum(1) / mask.sum(1)
        return self.out(F.gelu(self.fc(mean)))


loader = torch.utils.data.DataLoader(
    corpus(8 * 23), batch_size=8, shuffle=True, collate_fn=collate
)
model = BagOfWords()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(6):
    total = 0.0
    optimizer.zero_grad()
    for i, (ids, labels) in enumerate(loader):
        # 23 batches: five windows of four and one of three.
        window = min(
            accumulation_steps,
            len(loader) - i // accumulation_steps * accumulation_steps,
        )
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(ids), labels) / window
        scaler.scale(loss).backward()
        total += loss.item() * window
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    print(f"epoch {epoch} loss {total / len(loader):.4f}")
