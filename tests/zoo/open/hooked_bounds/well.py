"""Elman network for parity of bits. Hooks on the parameters bound the gradients."""

import torch
import torch.nn as nn

torch.manual_seed(123)


class Parity(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.step = nn.Linear(1 + hidden, hidden)
        self.read = nn.Linear(hidden, 2)
        self.hidden = hidden

    def forward(self, bits):
        h = torch.zeros(bits.shape[0], self.hidden)
        for t in range(bits.shape[1]):
            h = torch.tanh(self.step(torch.cat([bits[:, t : t + 1], h], 1)).float())
        return self.read(h)


net = Parity()
opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)


def bounded(grad):
    bound = 0.05 * scaler.get_scale()
    return grad.clamp(-bound, bound)


for p in net.parameters():
    p.register_hook(bounded)

for step in range(200):
    bits = torch.randint(0, 2, (32, 4)).float()
    label = (bits.sum(1) >= 2).long()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(2 * bits - 1)
    loss = nn.functional.cross_entropy(logits.float(), label)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 25 == 0:
        acc = (logits.argmax(-1) == label).float().mean()
        print(f"{step:3d} loss {loss.item():.4f} acc {acc.item():.2f}")
