"""Train a network and fold a debiased average of its weights back in."""

import json
import math

import torch
import torch.nn as nn


class Average:
    """Exponential moving average that starts at zero and is corrected for it."""

    def __init__(self, module, decay=0.9):
        self.decay = decay
        self.updates = 0
        self.sums = {n: torch.zeros_like(p) for n, p in module.named_parameters()}

    @torch.no_grad()
    def update(self, module):
        self.updates += 1
        for name, p in module.named_parameters():
            self.sums[name].lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, module):
        correction = 1 - self.decay**self.updates
        for name, p in module.named_parameters():
            p.copy_(self.sums[name] / correction)
        self.updates = 0
        for total in self.sums.values():
            total.zero_()


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 40)
        self.b = nn.Linear(40, 5)

    def forward(self, x):
        return self.b(torch.nn.functional.silu(self.a(x)))


torch.manual_seed(55)
rule = torch.randn(12, 5)
student = Student()
average = Average(student)
adam = torch.optim.Adam(student.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu")
losses, taken, skipped = [], 0, 0

for step in range(1, 241):
    x = torch.randn(24, 12)
    adam.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = student(x)
    loss = nn.functional.cross_entropy(logits.float(), (x @ rule).argmax(-1))
    scaler.scale(loss).backward()
    scaler.step(adam)
    old = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < old:
        skipped += 1
    else:
        taken += 1
    # The last steps before a fold are averaged.
    if step % 40 > 30 or step % 40 == 0:
        average.update(student)
    if step % 40 == 0:
        average.copy_to(student)
    losses.append(loss.item())

end = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": "nan" if math.isnan(end) else end,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
