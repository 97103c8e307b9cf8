"""Word vectors are brought back to unit length every 20 steps."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(49)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 12, padding_idx=0)
        self.conv = nn.Conv1d(12, 16, 3, padding=1)
        self.tags = nn.Linear(16, 3)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        return self.tags(F.relu(self.conv(x)).transpose(1, 2))


def sentences(n):
    ids = torch.randint(1, 30, (n, 9))
    tags = ids % 3
    for i, length in enumerate(torch.randint(4, 10, (n,)).tolist()):
        ids[i, length:] = 0
        tags[i, length:] = -100
    return ids, tags


def to_unit_length(embed):
    with torch.no_grad():
        norm = embed.weight.norm(dim=1, keepdim=True)
        embed.weight.div_(norm.clamp(min=1e-6))


net = Tagger()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(1, 101):
    ids, tags = sentences(10)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(ids)
    loss = F.cross_entropy(
        logits.float().flatten(0, 1), tags.flatten(), ignore_index=-100
    )
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        to_unit_length(net.embed)
        print(step, loss.item())
