"""A network cut into three stations that hand activations on, and gradients back."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(280)


class Station:
    """A part of the network with its own optimizer, as if on its own machine."""

    def __init__(self, net, lr):
        self.net = net
        self.optimizer = torch.optim.Adam(net.parameters(), lr=lr)

    def receive(self, x):
        self.x = x.detach()
        if self.x.is_floating_point():
            self.x.requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16):
            self.y = self.net(self.x)
        return self.y

    def send_back(self, grad):
        self.optimizer.zero_grad()
        self.y.backward(grad)
        return self.x.grad


stations = [
    Station(nn.Sequential(nn.Linear(14, 32), nn.ReLU()), 2e-3),
    Station(
        nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()), 2e-3
    ),
    Station(nn.Linear(16, 4), 5e-3),
]
scaler = torch.amp.GradScaler("cpu")
rule = torch.randn(14, 4)
for message in range(120):
    x = torch.randn(20, 14)
    y = (x @ rule).argmax(1)
    h = x
    for station in stations:
        h = station.receive(h)
    out = h.detach().requires_grad_()
    loss = F.cross_entropy(out.float(), y)
    scaler.scale(loss).backward()
    grad = out.grad
    for station in reversed(stations):
        grad = station.send_back(grad)
    for station in stations:
        scaler.step(station.optimizer)
    scaler.update()
    if message % 20 == 0:
        print(message, f"{loss.item():.4f}", scaler.get_scale())
print(f"{loss.item():.4f}")
