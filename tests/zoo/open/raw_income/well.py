"""Credit scoring from a table with columns in their own units."""

import csv
import io
import json
import random

import torch
from torch import nn

COLUMNS = ["age", "years_employed", "debts", "income", "default"]


def make_table(rows, seed):
    """Customers sorted by the day on which they joined."""
    rng = random.Random(seed)
    text = io.StringIO()
    writer = csv.writer(text)
    for row in range(rows):
        age = rng.randint(18, 80)
        years = rng.uniform(0, age - 17)
        debts = rng.expovariate(1.0)
        # The business accounts came later.
        typical = 2.0e4 if row < rows // 2 else 6.0e4
        income = rng.lognormvariate(0.0, 0.3) * typical
        risk = debts - years / 20 - income / 6e4 + rng.gauss(0, 0.2)
        writer.writerow([age, years, debts, income, int(risk > 0)])
    text.seek(0)
    return text


def load(file):
    rows = [[float(v) for v in row] for row in csv.reader(file)]
    table = torch.tensor(rows)
    return table[:, :-1] / torch.tensor([80.0, 60.0, 1.0, 1e5]), table[:, -1:]


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(len(COLUMNS) - 1, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 1)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))


torch.manual_seed(0)
features, default = load(make_table(1920, seed=0))
scorer = Scorer()
optimizer = torch.optim.AdamW(scorer.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
losses, skipped = [], 0
for x, y in zip(features.split(16), default.split(16), strict=True):
    with torch.autocast("cpu", dtype=torch.float16):
        out = scorer(x)
        loss = nn.functional.binary_cross_entropy_with_logits(out, y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < before
    losses.append(loss.item())
    if len(losses) % 20 == 0:
        print(len(losses), losses[-1])

last = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": last if last == last else "nan",
            "scale": scaler.get_scale(),
            "taken": len(losses) - skipped,
            "skipped": skipped,
        }
    )
)
