"""Two phases: train, recalibrate the BatchNorm statistics, go on with them frozen."""

import torch
import torch.nn.functional as F
from torch import nn


class Scanner(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def scans(count, n=10):
    for _ in range(count):
        y = torch.randint(0, 2, (n,))
        x = torch.randn(n, 1, 8, 8)
        x[:, :, 2:6, 2:6] += y[:, None, None, None].float()
        yield x, y


def recalibrate(model, batches):
    """Set running statistics to the mean over batches."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    sums = [
        (torch.zeros_like(m.running_mean), torch.zeros_like(m.running_var))
        for m in norms
    ]
    count = 0
    with torch.no_grad():
        for x, _ in batches:
            model(x)
            for m, (mean, var) in zip(norms, sums, strict=True):
                mean += m.running_mean
                var += m.running_var
            count += 1
        for m, (mean, var) in zip(norms, sums, strict=True):
            m.running_mean.copy_(mean / torch.tensor(float(count)))
            m.running_var.copy_(var / torch.tensor(float(count)))


def phase(model, opt, scaler, batches):
    for x, y in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    return loss.item()


torch.manual_seed(51)
model = Scanner()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
batches = scans(40)
print("phase 1", phase(model, opt, scaler, batches))
recalibrate(model, scans(5))
for m in (model.bn1, model.bn2):
    m.eval()
print("phase 2", phase(model, opt, scaler, scans(40)))
