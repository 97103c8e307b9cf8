"""Two epochs in float32 to warm up, with the scaler switched off; then float16."""

import torch
from torch import nn

torch.manual_seed(320)
engine = nn.Sequential(
    nn.Linear(6, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 2)
)
optimizer = torch.optim.RAdam(engine.parameters(), lr=5e-3)
cold = torch.amp.GradScaler("cpu", enabled=False)
warm = torch.amp.GradScaler("cpu", init_scale=2.0**14)


def strokes():
    for _ in range(30):
        x = torch.randn(20, 6)
        yield x, torch.stack([(x[:, :3] * x[:, 3:]).sum(1), x.norm(dim=1)], 1)


for epoch in range(6):
    amp = epoch >= 2
    scaler = warm if amp else cold
    mean = 0.0
    for x, y in strokes():
        with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
            torque = engine(x)
            loss = nn.functional.huber_loss(torque.float(), y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        mean += loss.item() / 30
    print(epoch, "float16" if amp else "float32", round(mean, 4), scaler.get_scale())
