"""Training that is interrupted and resumed from a checkpoint with everything in it."""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F

CHECKPOINT = "checkpoint.pt"


def build():
    model = nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=60)
    return model, optimizer, scheduler, scaler


def save(step, *objects):
    state = {"step": step, "rng": torch.get_rng_state()}
    state["objects"] = [o.state_dict() for o in objects]
    torch.save(state, CHECKPOINT)


def train(until):
    objects = build()
    model, optimizer, scheduler, scaler = objects
    start = 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT)
        for o, s in zip(objects, state["objects"]):
            o.load_state_dict(s)
        torch.set_rng_state(state["rng"])
        start = state["step"]
        print(f"resumed at {start}, scale {scaler.get_scale()}")
    for step in range(start, until):
        x = torch.randn(20, 8)
        y = (x[:, 0] > 0.4).long() + (x[:, 1] > 0.4).long()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if (step + 1) % 20 == 0:
            save(step + 1, *objects)
            print(step + 1, f"{loss.item():.4f}")


if os.path.exists(CHECKPOINT):
    os.remove(CHECKPOINT)
torch.manual_seed(10)
train(until=75)
# The job was killed at step 75; the next one starts at 60.
train(until=150)
