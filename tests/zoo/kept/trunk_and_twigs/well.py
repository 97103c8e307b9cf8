"""Encoder and decoder with an optimizer each, one scaler; a clipping norm per group."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(46)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(16, 24)
        self.code = nn.Linear(24, 6)

    def forward(self, x):
        return torch.tanh(self.code(F.relu(self.stem(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow = nn.Linear(6, 24)
        self.leaf = nn.Linear(24, 16)

    def forward(self, z):
        return self.leaf(F.relu(self.grow(z)))


encoder, decoder = Encoder(), Decoder()
enc_opt = torch.optim.Adam(
    [
        {"params": encoder.stem.parameters(), "lr": 3e-3, "max_norm": 0.5},
        {"params": encoder.code.parameters(), "lr": 6e-3, "max_norm": 1.0},
    ]
)
dec_opt = torch.optim.Adam(
    [
        {"params": decoder.grow.parameters(), "lr": 6e-3, "max_norm": 1.0},
        {"params": decoder.leaf.parameters(), "lr": 6e-3, "max_norm": 2.0},
    ]
)
scaler = torch.amp.GradScaler("cpu")
basis = torch.randn(4, 16)
for step in range(140):
    x = torch.randn(20, 4) @ basis
    noisy = x + 0.1 * torch.randn_like(x)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(decoder(encoder(noisy)).float(), x)
    enc_opt.zero_grad()
    dec_opt.zero_grad()
    scaler.scale(loss).backward()
    for opt in (enc_opt, dec_opt):
        scaler.unscale_(opt)
        for group in opt.param_groups:
            nn.utils.clip_grad_norm_(group["params"], group["max_norm"])
    scaler.step(enc_opt)
    scaler.step(dec_opt)
    scaler.update()
    if step % 20 == 0:
        print(step, f"{loss.item():.4f}")
