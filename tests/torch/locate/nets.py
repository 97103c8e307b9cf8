"""A deep net, one layer of which can be poisoned in either direction."""

import torch
from torch import nn

DEPTH = 24
WIDTH = 4


class Enlarge(torch.autograd.Function):
    """The identity, whose gradient is far too large for float16."""

    @staticmethod
    def forward(ctx, x):
        """Return a copy."""
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """Multiply by 2**30."""
        return grad * 2.0**30


class Block(nn.Module):
    """A residual block with two linear layers inside."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.poison = None

    def forward(self, x):
        """Add the two layers applied to the normalised input."""
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        if self.poison == "backward":
            hidden = Enlarge.apply(hidden)
        out = self.down(hidden)
        if self.poison == "forward":
            # 65000 * 300 overflows float16.
            out = out.abs() * 300.0 + 65000.0
            out = out * 300.0
        return x + out


class Net(nn.Module):
    """Blocks in a row, in float16."""

    def __init__(self, depth=DEPTH):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)
        self.half()

    def forward(self, x):
        """Run all blocks, then the head."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def poisoned(layer, direction, depth=DEPTH):
    """Return a net, one block of which overflows in one direction."""
    torch.manual_seed(0)
    net = Net(depth)
    if layer is not None:
        net.layers[layer].poison = direction
    return net


def loss_of(net):
    """Return the loss on a fixed batch."""
    x = torch.linspace(-1.0, 1.0, 2 * WIDTH).view(2, WIDTH).half()
    return net(x).float().pow(2).mean()
