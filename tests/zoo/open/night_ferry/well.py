"""Ferry arrivals; a checkpoint in mid-run, and a second leg with everything loaded."""

import io

import torch
from torch import nn

ROUTES = torch.linspace(-1, 1, 7)


def build():
    model = nn.Sequential(
        nn.Linear(7, 24),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(24, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=500)
    return model, optimizer, schedule, scaler


def leg(parts, start, stop):
    model, optimizer, schedule, scaler = parts
    model.train()
    for step in range(start, stop):
        x = torch.randn(24, 7)
        y = torch.relu(x @ ROUTES)[:, None] + 0.1 * torch.randn(24, 1)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if step % 20 == 0:
            print(step, round(loss.item(), 4), scaler.get_scale())
    return loss.item()


def save(parts, file):
    torch.save([part.state_dict() for part in parts] + [torch.get_rng_state()], file)


def load(file):
    *states, rng = torch.load(file)
    parts = build()
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(rng)
    return parts


torch.manual_seed(161)
first = build()
leg(first, 0, 70)
harbour = io.BytesIO()
save(first, harbour)
del first
harbour.seek(0)
print(leg(load(harbour), 70, 150))
