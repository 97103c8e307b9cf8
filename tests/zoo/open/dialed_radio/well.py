"""Radio stations; a running norm of the gradients decides how much they are clipped."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(502)


class NormTracker:
    def __init__(self, params, scaler):
        self.params = list(params)
        self.scaler = scaler
        self.usual = None

    def clip(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        if self.usual is not None and norm > 2 * self.usual:
            for p in self.params:
                p.grad.mul_(2 * self.usual / norm)
        if torch.isfinite(norm):
            self.usual = norm if self.usual is None else 0.9 * self.usual + 0.1 * norm
        return norm


radio = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
opt = torch.optim.SGD(radio.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
tracker = NormTracker(radio.parameters(), scaler)
stations = torch.randn(5, 16)
for step in range(120):
    y = torch.randint(0, 5, (20,))
    x = stations[y] + torch.randn(20, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = radio(x)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    norm = tracker.clip()
    scaler.step(opt)
    scaler.update()
    if step % 24 == 0 or step == 119:
        print(step, f"{loss.item():.4f}", f"{norm.item():.3g}")
