"""Non-negative factors of a price table, updated in turn and projected."""

import torch

torch.manual_seed(61)
RANK, SHOPS, SPICES = 4, 30, 24
table = torch.rand(SHOPS, RANK) @ torch.rand(RANK, SPICES)


class Factors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shops = torch.nn.Parameter(torch.rand(SHOPS, RANK))
        self.spices = torch.nn.Parameter(torch.rand(RANK, SPICES))

    def forward(self, rows):
        return self.shops[rows] @ self.spices


f = Factors()
turns = [
    torch.optim.Adam([f.shops], lr=0.02),
    torch.optim.Adam([f.spices], lr=0.02),
]
scaler = torch.amp.GradScaler("cpu")
for turn in range(200):
    rows = torch.randperm(SHOPS)[:20]
    optimizer = turns[turn // 5 % 2]
    f.zero_grad()
    with torch.autocast("cpu", torch.float16):
        guess = f(rows)
    loss = (guess.float() - table[rows]).square().mean()
    scaler.scale(loss).backward()
    # The other factor has a gradient as well; it is dropped.
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for factor in f.parameters():
            factor.clamp_(min=0.0)
    if turn % 40 == 0:
        print(turn, loss.item())
print(loss.item())
