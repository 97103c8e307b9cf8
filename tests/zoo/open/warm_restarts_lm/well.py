"""Character model with a schedule of restarts that follows the steps taken."""

import json

import torch
import torch.nn.functional as F
from torch import nn


class Chars(nn.Module):
    def __init__(self, d=24, vocab=12, context=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d // 2)
        self.fc = nn.Linear(context * d // 2, d)
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.emb(ids).flatten(1)
        return self.out(F.gelu(self.norm(self.fc(x))))


torch.manual_seed(72)
lm = Chars()
opt = torch.optim.AdamW(lm.parameters(), lr=2e-2)
sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=40)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
losses, skipped = [], 0
for _ in range(160):
    ids = torch.randint(0, 12, (24, 4))
    nxt = (ids[:, 0] + ids[:, 3]) % 12
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(lm(ids).float(), nxt)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        sched.step()
    losses.append(loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 160 - skipped,
            "skipped": skipped,
        }
    )
)
