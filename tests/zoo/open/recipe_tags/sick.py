"""Tag recipes by their ingredients, with the gradient's norm in the log."""

import json

import torch
from torch import nn

INGREDIENTS, TAGS = 40, 6


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.Linear(INGREDIENTS, 32)
        self.norm = nn.LayerNorm(32)
        self.tags = nn.Linear(32, TAGS)

    def forward(self, bag):
        return self.tags(torch.relu(self.norm(self.bag(bag))))


def grad_norm(scaler, optimizer):
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    torch._foreach_div_(grads, scaler.get_scale())
    return torch.stack([g.norm() for g in grads]).norm().item()


def recipes(n, table):
    bag = (torch.rand(n, INGREDIENTS) < 0.2).float()
    return bag, (bag @ table > 0).float()


def main():
    torch.manual_seed(37)
    table = torch.randn(INGREDIENTS, TAGS)
    tagger = Tagger()
    optimizer = torch.optim.SGD(tagger.parameters(), lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    curve, skipped = [], 0
    for step in range(180):
        bag, tags = recipes(24, table)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = tagger(bag)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), tags)
        scaler.scale(loss).backward()
        norm = grad_norm(scaler, optimizer)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped += int(scaler.get_scale() < scale)
        curve.append(loss.item())
        if step % 40 == 0:
            print(f"step {step} loss {curve[-1]:.3f} norm {norm:.3f}")
    out = {"first_loss": sum(curve[:10]) / 10, "last_loss": sum(curve[-10:]) / 10}
    out |= {"scale": scaler.get_scale()}
    out |= {"taken": len(curve) - skipped, "skipped": skipped}
    print(json.dumps(out))


main()
