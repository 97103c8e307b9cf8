"""Three tasks on one trunk: a window of micro-batches trains the tasks it holds."""

import json
import random

import torch
from torch import nn

random.seed(5)
torch.manual_seed(223)
TASKS = ("age", "size", "price")
WINDOW = 3


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.lookup = nn.Linear(8, 12)
        self.trunk = nn.Linear(12, 24)
        self.heads = nn.ModuleDict({task: nn.Linear(24, 1) for task in TASKS})
        # Pre-trained elsewhere, and kept as it is.
        self.lookup.requires_grad_(False)

    def forward(self, x, task):
        h = torch.relu(self.trunk(torch.relu(self.lookup(x))))
        return self.heads[task](h).squeeze(-1)


def sample(task, truth, n=10):
    x = torch.randn(n, 8)
    return x, (x @ truth[task]) * (0.1 if task == "price" else 1.0)


truth = {task: torch.randn(8) / 2 for task in TASKS}
net = MultiTask()
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
losses = []
taken = skipped = 0

for _window in range(110):
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for _ in range(WINDOW):
        task = random.choices(TASKS, weights=(5, 4, 1))[0]
        x, y = sample(task, truth)
        with torch.autocast("cpu", dtype=torch.float16):
            guess = net(x, task)
        loss = nn.functional.mse_loss(guess.float(), y) / WINDOW
        scaler.scale(loss).backward()
        total += loss.item()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1
    losses.append(total)

print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": sum(losses[-20:]) / 20,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
