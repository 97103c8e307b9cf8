"""Recipe ratings: the parameters are sorted into decay and no decay by their module."""

import torch
from torch import nn

torch.manual_seed(26)


class Ratings(nn.Module):
    def __init__(self, foods=40, dim=8):
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn(foods, dim))
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 24)
        self.out = nn.Linear(24, 1)

    def forward(self, recipe):
        bag = self.norm(self.table[recipe].mean(1) * 10)
        return self.out(torch.relu(self.up(bag)))


def groups(model):
    decay, plain = [], []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            decay.append(module.weight)
            plain.append(module.bias)
        elif isinstance(module, nn.LayerNorm):
            plain.extend(module.parameters())
    return [
        {"params": decay, "weight_decay": 0.01},
        {"params": plain, "weight_decay": 0.0},
    ]


model = Ratings()
opt = torch.optim.AdamW(groups(model), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
taste = torch.randn(40)
for step in range(200):
    recipe = torch.randint(0, 40, (32, 5))
    rating = taste[recipe].mean(1, keepdim=True) * 2
    with torch.autocast("cpu", dtype=torch.float16):
        guess = model(recipe)
    loss = nn.functional.mse_loss(guess.float(), rating)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 40 == 0:
        print(step, loss.item(), model.table.std().item())
