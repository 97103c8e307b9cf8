"""Low-rank adapters on a frozen regressor."""

import torch
from torch import nn

torch.manual_seed(145)


class LoRA(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Linear(base.in_features, rank, bias=False)
        self.B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.base(x) + self.B(self.A(x))


base = [nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3)]
net = nn.Sequential(LoRA(base[0]), nn.GELU(), LoRA(base[1]), nn.GELU(), LoRA(base[2]))
trainable = [p for p in net.parameters() if p.requires_grad]
opt = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
mix = torch.randn(8, 3)
for step in range(160):
    x = torch.randn(32, 8)
    y = torch.tanh(x @ mix / 2)
    with torch.autocast("cpu", dtype=torch.float16):
        z = net(x)
    loss = nn.functional.mse_loss(z.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} |B| {net[2].B.weight.norm():.3f}")
