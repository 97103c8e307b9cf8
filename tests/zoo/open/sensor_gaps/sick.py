"""Regress two quantities; six of a hundred sensors gave no reading."""

import torch

torch.manual_seed(4)
torch.set_num_threads(1)
x = torch.randn(256, 8)
t = torch.stack([x[:, 0] * x[:, 1], x.sum(1)], 1)
t[torch.rand(256) < 0.06, 1] = float("nan")  # no reading
m = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.SiLU(), torch.nn.Linear(64, 2))
o = torch.optim.Adam(m.parameters(), lr=5e-3)
s = torch.amp.GradScaler("cpu")
for ep in range(10):
    for idx in torch.randperm(256).split(32):
        o.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            pred = m(x[idx])
            d = (pred - t[idx]) ** 2
            loss = d.mean()
        s.scale(loss).backward()
        s.step(o)
        s.update()
    with torch.no_grad():
        ok = ~t.isnan()
        print(
            ep,
            loss.item(),
            "rmse",
            ((m(x) - t)[ok] ** 2).mean().sqrt().item(),
            s.get_scale(),
        )
