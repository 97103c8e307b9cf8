"""Glove data: every layer has a bound of its own for its gradient."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(50)


class Glove(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(5, 20, batch_first=True)
        self.fc = nn.Linear(20, 3)

    def forward(self, x):
        return self.fc(self.rnn(x)[0][:, -1])


BOUND = {"rnn": 0.2, "fc": 1.0}
net = Glove()
opt = torch.optim.RMSprop(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
sign = torch.randn(3, 9, 5)
for step in range(120):
    y = torch.randint(0, 3, (16,))
    x = sign[y] + torch.randn(16, 9, 5)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    for name, bound in BOUND.items():
        grads = [p.grad for p in getattr(net, name).parameters()]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for g in grads:
            g.mul_((bound / (norm + 1e-6)).clamp(max=1.0))
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item())
