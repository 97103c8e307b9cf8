"""Character model; after 90 steps the last snapshots are mixed, then it trains on."""

import copy

import torch
from torch import nn

torch.manual_seed(110)


class Chars(nn.Module):
    def __init__(self, n=12, dim=24):
        super().__init__()
        self.embed = nn.Embedding(n, dim)
        self.lstm = nn.LSTMCell(dim, dim)
        self.out = nn.Linear(dim, n)

    def forward(self, ids):
        h = c = torch.zeros(ids.shape[0], 24)
        outs = []
        for t in range(ids.shape[1]):
            h, c = self.lstm(self.embed(ids[:, t]), (h, c))
            h, c = h.float(), c.float()
            outs.append(self.out(h))
        return torch.stack(outs, 1)


def text(n, length=6):
    ids = torch.randint(0, 12, (n, 2))
    for _ in range(length - 1):
        ids = torch.cat([ids, (ids[:, -1:] + 2 * ids[:, -2:-1] + 1) % 12], 1)
    return ids


@torch.no_grad()
def soup(model, snapshots):
    losses = torch.tensor([loss for loss, _ in snapshots])
    share = torch.exp(-1000 * losses)
    share = share / share.sum()
    for name, value in model.state_dict().items():
        value.copy_(sum(s * state[name] for s, (_, state) in zip(share, snapshots)))


model = Chars()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
snapshots = []
for step in range(1, 171):
    ids = text(16)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids[:, :-1])
    loss = nn.functional.cross_entropy(
        logits[:, 1:].flatten(0, 1).float(), ids[:, 2:].flatten()
    )
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step in (70, 80, 90):
        snapshots.append((loss.item(), copy.deepcopy(model.state_dict())))
    if step == 90:
        soup(model, snapshots)
    if step % 15 == 0:
        print(step, "loss", round(loss.item(), 4))
