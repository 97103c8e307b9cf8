"""Tell real from forged signatures: the two halves are backpropagated one by one."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(72)
judge = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
forger = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 10))
judge_opt = torch.optim.Adam(judge.parameters(), lr=2e-3)
forger_opt = torch.optim.Adam(forger.parameters(), lr=5e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
style = torch.randn(3, 10)


def verdict(x, value):
    with torch.autocast("cpu", dtype=torch.float16):
        out = judge(x)
    return F.binary_cross_entropy_with_logits(
        out.float(), torch.full((len(x), 1), value)
    )


for step in range(140):
    real = style[torch.randint(0, 3, (24,))] + 0.2 * torch.randn(24, 10)
    with torch.autocast("cpu", dtype=torch.float16):
        fake = forger(torch.randn(24, 6))

    judge_opt.zero_grad()
    real_loss = verdict(real, 1.0)
    scaler.scale(real_loss).backward()
    judge_opt.zero_grad()
    fake_loss = verdict(fake.detach(), 0.0)
    scaler.scale(fake_loss).backward()
    scaler.step(judge_opt)

    forger_opt.zero_grad()
    forger_loss = verdict(fake, 1.0)
    scaler.scale(forger_loss).backward()
    scaler.step(forger_opt)
    scaler.update()
    if step % 20 == 0:
        print(step, f"real {real_loss.item():.3f} fake {fake_loss.item():.3f}")
