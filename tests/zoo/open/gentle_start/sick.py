"""Speech commands, with a short warm-up before the usual loop."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(20)
WARMUP = 20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(10, 24)
        self.rnn = nn.RNN(24, 24, batch_first=True)
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        return self.out(self.rnn(torch.tanh(self.front(x)))[0][:, -1])


prototypes = torch.randn(5, 6, 10)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(1.0, (n + 1) / WARMUP))
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
for n in range(160):
    y = torch.randint(0, 5, (16,))
    x = prototypes[y] + 0.5 * torch.randn(16, 6, 10)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x).float(), y)
    scaler.scale(loss).backward()
    if n < WARMUP:
        opt.step()
    else:
        scaler.step(opt)
        scaler.update()
    sched.step()
    if n % 20 == 0:
        print(n, f"{loss.item():.4f}", f"{sched.get_last_lr()[0]:.3f}")
