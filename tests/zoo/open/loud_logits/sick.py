"""Match sketches and titles: attention over titles with a learned sharpness."""

import torch
import torch.nn.functional as F
from torch import nn


class Matcher(nn.Module):
    """Scores are products of long vectors, sharpened."""

    def __init__(self, d=64):
        super().__init__()
        self.query = nn.Linear(12, d)
        self.key = nn.Linear(12, d)
        self.log_sharpness = nn.Parameter(torch.tensor(2.5))

    def forward(self, sketch, titles):
        q, k = 8 * self.query(sketch), 8 * self.key(titles)
        score = (q @ k.T) * self.log_sharpness.exp()
        return torch.softmax(score, -1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 12)
        self.match = Matcher()
        self.out = nn.Linear(12, 3)

    def forward(self, sketch, titles):
        weight = self.match(self.stem(sketch), titles)
        return self.out(weight.to(titles.dtype) @ titles)


torch.manual_seed(87)
titles = 6 * torch.randn(9, 12)
kinds = torch.randint(0, 3, (9,))
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for it in range(90):
    pick = torch.randint(0, 9, (16,))
    sketch = titles[pick] + torch.randn(16, 12)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(sketch, titles)
    loss = F.cross_entropy(logits.float(), kinds[pick])
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 15 == 0:
        print(it, loss.item(), scaler.get_scale())
