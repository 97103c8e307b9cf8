"""Uses a scaler under every import name of torch: signature, copy, pickle, compile."""

import copy
import inspect
import pickle
import warnings

import torch
import torch.cuda.amp as cuda_amp
from torch.amp import GradScaler
from torch.amp.grad_scaler import GradScaler as FromModule
from torch.cpu.amp import GradScaler as FromCpu
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

warnings.simplefilter("ignore")


class Derived(torch.amp.GradScaler):
    """A subclass with a method of its own."""

    def step(self, optimizer, *args, **kwargs):
        """Print a line, and step."""
        print("derived step")
        return super().step(optimizer, *args, **kwargs)


class DerivedByName(GradScaler):
    """A subclass that calls its base class by name."""

    def __init__(self, scale):
        GradScaler.__init__(self, "cpu", init_scale=scale)

    def update(self, new_scale=None):
        """Print a line, and update."""
        print("derived update")
        super(DerivedByName, self).update(new_scale)  # noqa: UP008


def train(scaler):
    """Take three steps, the second of which overflows."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return weight.tolist(), scaler.get_scale()


def show(name, scaler):
    """Print the properties of a scaler, and the result of a training."""
    kinds = (torch.amp.GradScaler, torch.cpu.amp.GradScaler, ShardedGradScaler)
    print(name, repr(type(scaler)), [isinstance(scaler, kind) for kind in kinds])
    state = scaler.state_dict()
    print({key: state[key] for key in ("scale", "growth_factor", "_growth_tracker")})
    print(scaler.is_enabled(), train(scaler))


if __name__ == "__main__":
    for kind in (GradScaler, cuda_amp.GradScaler, FromCpu, ShardedGradScaler, Derived):
        print(kind, inspect.signature(kind), kind.__mro__[-2])
    print(GradScaler is FromModule, issubclass(Derived, GradScaler))
    show("amp", torch.amp.GradScaler("cpu", 2.0**10, growth_interval=1))
    show("module", FromModule(device="cpu", init_scale=8.0))
    show("cpu", FromCpu(2.0**5, 4.0, 0.25, 1))
    show("derived", Derived("cpu", 2.0**12))
    show("by name", DerivedByName(2.0**13))
    disabled = cuda_amp.GradScaler(2.0**5, enabled=False)
    print("disabled", type(disabled), disabled.is_enabled(), disabled.get_scale())
    scaler = GradScaler("cpu", init_scale=64.0)
    train(scaler)
    for name, twin in (
        ("deepcopy", copy.deepcopy(scaler)),
        ("pickle", pickle.loads(pickle.dumps(scaler))),
        ("derived", pickle.loads(pickle.dumps(Derived("cpu", 16.0)))),
    ):
        show(name, twin)
    scale = torch.compile(scaler.scale, backend="eager", fullgraph=False)
    print("compiled", scale(torch.ones(1)).item())
