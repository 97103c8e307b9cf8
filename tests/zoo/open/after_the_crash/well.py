"""Goes on from the last good weights of a run that died over night."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(15)


def model():
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 6)
    )


def crashed_run():
    """What torch.load() would give: weights, and the state of the scaler."""
    net = model()
    state = torch.amp.GradScaler("cpu").state_dict()
    state["scale"] = 2.0**-22
    return {"model": net.state_dict(), "scaler": state}


checkpoint = crashed_run()
net = model()
net.load_state_dict(checkpoint["model"])
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
print("scaler starts afresh")
centres = torch.randn(6, 12)
for step in range(200):
    y = torch.randint(0, 6, (32,))
    x = centres[y] + 0.7 * torch.randn(32, 12)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 40 == 0:
        acc = (net(x).argmax(-1) == y).float().mean().item()
        print(f"{step}: loss {loss.item():.4f} acc {acc:.2f}")
