"""Rides: a GRU tells commuters from tourists by their speed profile."""

import torch
import torch.nn as nn

torch.manual_seed(8)


def speeds(trips):
    """Speed between fixes: way / elapsed time."""
    t, way = trips[..., 0], trips[..., 1]
    return way.diff(dim=1) / t.diff(dim=1).clamp(min=0.1)


def record(n=320, fixes=10):
    kind = torch.randint(0, 2, (n,))
    t = torch.cumsum(0.5 + torch.rand(n, fixes), 1)
    v = 1.0 + 0.7 * kind[:, None] + 0.5 * torch.randn(n, fixes).abs()
    way = torch.cumsum(v * torch.cat([t[:, :1], t.diff(dim=1)], 1), 1)
    t[120, 6] = t[120, 5]
    return torch.stack([t, way], -1), kind


class Rider(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 16, batch_first=True)
        self.fc = nn.Linear(16, 2)

    def forward(self, v):
        out, _ = self.rnn(v.unsqueeze(-1))
        return self.fc(out.mean(1))


trips, kind = record()
model = Rider()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
for epoch in range(6):
    correct = 0
    for start in range(0, len(trips), 16):
        rows = slice(start, start + 16)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(speeds(trips[rows]))
        loss = nn.functional.cross_entropy(logits.float(), kind[rows])
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        correct += (logits.argmax(-1) == kind[rows]).sum().item()
    print(
        f"epoch {epoch}: acc {correct / len(trips):.3f} loss {loss.item():.3f} scale {scaler.get_scale():g}"
    )
