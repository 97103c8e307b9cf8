"""Adapt a frozen base model with low-rank matrices; B starts at zero."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base
        for p in base.parameters():
            p.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r

    def forward(self, x):
        delta = F.linear(F.linear(x, self.lora_A), self.lora_B)
        return self.base(x) + self.scaling * delta


class Voice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 32)
        self.out = nn.Linear(32, 8)

    def forward(self, x):
        return self.out(F.relu(self.fc2(F.relu(self.fc1(x)))))


torch.manual_seed(43)
w_old = torch.randn(16, 8)
w_new = w_old + 0.5 * torch.randn(16, 2) @ torch.randn(2, 8)

model = Voice()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(60):
    x = torch.randn(32, 16)
    opt.zero_grad()
    F.cross_entropy(model(x), (x @ w_old).argmax(1)).backward()
    opt.step()

model.requires_grad_(False)
model.fc1 = LoRALinear(model.fc1)
model.fc2 = LoRALinear(model.fc2)
model.out = LoRALinear(model.out)
trainable = [p for p in model.parameters() if p.requires_grad]
print("trainable", sum(p.numel() for p in trainable))
optimizer = torch.optim.AdamW(trainable, lr=8e-3, weight_decay=0.0)
scaler = torch.amp.GradScaler("cpu")
for step in range(120):
    x = torch.randn(32, 16)
    y = (x @ w_new).argmax(1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(trainable, 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(step, round(loss.item(), 4))
