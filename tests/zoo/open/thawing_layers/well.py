"""ULMFiT in miniature: unfreezes a language model from its top."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(45)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, ids):
        x = self.embed(ids).mean(1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


model = Tower()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
order = [model.head, model.layers[2], model.layers[1], model.layers[0], model.embed]
model.requires_grad_(False)
topic = torch.randint(0, 3, (30,))
for epoch in range(5):
    order[epoch].requires_grad_(True)
    total = 0.0
    for _ in range(40):
        ids = torch.randint(0, 30, (24, 7))
        y = F.one_hot(topic[ids], 3).sum(1).argmax(-1)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(ids).float(), y)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        total += loss.item()
    print(f"epoch {epoch} loss {total / 40:.4f}")
