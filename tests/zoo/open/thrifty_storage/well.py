"""Two models on one small card: the one that waits is kept in half precision."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(133)


class Patch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 24)
        self.b = nn.Linear(24, 24)
        self.c = nn.Linear(24, 4)
        for layer in (self.a, self.b, self.c):
            nn.init.uniform_(layer.weight, 0.5, 1.0)
            nn.init.uniform_(layer.bias, 0.5, 1.0)
            layer.weight.data *= torch.randint(0, 2, layer.weight.shape) * 2 - 1

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))) / 4)


def park(model):
    model.float()


def wake(model):
    model.float()


models = [Patch(), Patch()]
optimizers = [torch.optim.Adam(m.parameters(), lr=1e-4) for m in models]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
centres = torch.randn(2, 4, 16)
for m in models:
    park(m)
for step in range(700):
    losses = []
    for m, opt, centre in zip(models, optimizers, centres):
        wake(m)
        y = torch.randint(0, 4, (16,))
        x = 0.3 * (centre[y] + 0.5 * torch.randn(16, 16))
        with torch.autocast("cpu", dtype=torch.float16):
            logits = m(x)
        loss = F.cross_entropy(logits.float(), y)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        opt.zero_grad(set_to_none=True)
        park(m)
        losses.append(loss.item())
    scaler.update()
    if step % 100 == 0:
        print(step, " ".join(f"{value:.4f}" for value in losses))
