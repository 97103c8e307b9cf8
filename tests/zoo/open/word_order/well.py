"""Is a sentence in its natural order? A GRU, SGD and clipping."""

import json

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_


class OrderModel(nn.Module):
    def __init__(self, words=30, dim=12, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.gru = nn.GRUCell(dim, hidden)
        self.out = nn.Linear(hidden, 2)
        self.hidden = hidden

    def forward(self, tokens):
        h = torch.zeros(tokens.shape[0], self.hidden)
        for word in self.embed(tokens).unbind(1):
            h = self.gru(word, h)
        return self.out(h)


def sentences(n, length=5):
    ordered = torch.randint(30, (n, length)).sort(dim=1).values
    label = torch.randint(2, (n,))
    flipped = ordered.flip(1)
    return torch.where(label[:, None] == 1, ordered, flipped), label


def train(model, steps, lr, max_norm):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses, skipped = [], 0
    for _ in range(steps):
        tokens, label = sentences(16)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.float(), label)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < scale
        losses.append(loss.item())
    return losses, int(skipped), scaler.get_scale()


torch.manual_seed(91)
losses, skipped, scale = train(OrderModel(), steps=150, lr=0.1, max_norm=1.0)
print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scale,
            "taken": len(losses) - skipped,
            "skipped": skipped,
        }
    )
)
