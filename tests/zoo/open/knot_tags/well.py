"""Spans of knots in a rope: a linear-chain CRF, illegal transitions are -inf."""

import torch
from torch import nn

torch.manual_seed(182)
OUT, BEGIN, INSIDE = range(3)
ILLEGAL = torch.tensor(
    [[False, False, True], [False, False, False], [False, False, False]]
)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 16, 3, padding=1)
        self.emit = nn.Linear(16, 3)
        self.transition = nn.Parameter(torch.zeros(3, 3))
        self.register_buffer("illegal", ILLEGAL)
        self.register_buffer("start", torch.tensor([0.0, 0.0, float("-inf")]))

    def nll(self, x, tags):
        scores = self.emit(torch.relu(self.conv(x)).transpose(1, 2)).float()
        moves = self.transition.masked_fill(self.illegal, float("-inf"))
        alpha = self.start + scores[:, 0]
        gold = scores[:, 0].gather(1, tags[:, :1])
        for t in range(1, scores.shape[1]):
            alpha = (alpha[:, :, None] + moves).logsumexp(1) + scores[:, t]
            step = moves[tags[:, t - 1], tags[:, t]][:, None]
            gold = gold + step + scores[:, t].gather(1, tags[:, t : t + 1])
        return (alpha.logsumexp(1) - gold[:, 0]).mean()


def ropes(n, length=8):
    tags = torch.zeros(n, length, dtype=torch.long)
    for t in range(length):
        before = tags[:, t - 1] if t else torch.zeros(n, dtype=torch.long)
        draw = torch.rand(n)
        tags[:, t] = torch.where(before == OUT, (draw < 0.4).long(), (draw * 3).long())
    x = nn.functional.one_hot(tags, 4).float().transpose(1, 2)
    return x + 0.5 * torch.randn_like(x), tags


chain = Chain()
optimizer = torch.optim.Adam(chain.parameters(), lr=8e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
for it in range(90):
    x, tags = ropes(12)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = chain.nll(x, tags)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if it % 15 == 0 or it == 89:
        print(it, round(loss.item(), 4), scaler.get_scale())
