"""Small networks whose backward flushes, and networks with true zeros."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradscale.torch.grads.collect import collect
from gradscale.torch.underflow.meter import Meter
from gradscale.torch.underflow.sample import UnderflowSample

# A network and its input; labels are drawn for as many rows.
Net = tuple[nn.Module, Tensor]


def sigmoids(depth: int) -> Net:
    """Return a stack whose gradients shrink by octaves from layer to layer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(16, 32)]
    for _ in range(depth):
        layers += [nn.Sigmoid(), nn.Linear(32, 32)]
    return nn.Sequential(*layers, nn.Sigmoid(), nn.Linear(32, 4)), torch.randn(32, 16)


def rectified() -> Net:
    """Return a network of which a quarter of all gradients is truly 0."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(32, 64)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(64, 10)), torch.randn(64, 32)


def embedding() -> Net:
    """Return a network with an embedding of which a batch uses few rows."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.EmbeddingBag(5000, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    )
    return model, torch.randint(0, 5000, (16, 8))


class Adapted(nn.Module):
    """A frozen layer plus a low-rank product whose second factor starts at 0."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, 4, bias=False)
        self.up = nn.Linear(4, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        return self.base(x) + self.up(self.down(x))


def adapted() -> Net:
    """Return a network in which whole gradients are truly 0."""
    torch.manual_seed(0)
    layers = Adapted(32, 64), nn.ReLU(), Adapted(64, 64), nn.ReLU(), Adapted(64, 10)
    return nn.Sequential(*layers), torch.randn(64, 32)


def backward(net: Net, scale: float, *, half: bool) -> None:
    """Fill `.grad` from a scaled loss, in float16 if `half`."""
    model, x = net
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 2, (len(x),), generator=generator)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=half):
        outputs = model(x)
    (cross_entropy(outputs.float(), labels) * scale).backward()


def sampled(make: Callable[[], Net], scale: float) -> UnderflowSample:
    """Return the sample of one step in float16."""
    net, meter = make(), Meter()
    backward(net, scale, half=True)
    gradients = collect(list(net[0].parameters()), allow_fp16=True)
    meter.sample(gradients, torch.tensor(scale), (net[0],))
    meter.end_step()
    (sample,) = meter.finish()
    return sample


def really_lost(make: Callable[[], Net], scale: float) -> float:
    """Return the share of non-zero f32 gradients that are 0 in float16."""
    exact, coarse = make(), make()
    backward(exact, scale, half=False)
    backward(coarse, scale, half=True)
    lost = every = 0
    for ours, theirs in zip(exact[0].parameters(), coarse[0].parameters(), strict=True):
        if ours.grad is not None and theirs.grad is not None:
            there = ours.grad != 0.0
            every += int(there.sum())
            lost += int((there & (theirs.grad == 0.0)).sum())
    return lost / every
