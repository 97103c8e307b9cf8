"""Fused optimizers of torch's that are stepped as a scaler steps them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale.torch.kernels.torch_fused_adam import StandIn

ADAM, ADAMW = torch.optim.Adam, torch.optim.AdamW
SIZES = (3, 1024, 1, 2049)
SKIPPED = (0, 3, 4)
STEPS = 7


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen[name] = self.seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def optimizer_of(kind, device, sizes=(SIZES,), dtype=torch.float32, **settings):
    """Return a fused optimizer with a group of parameters for each tuple of sizes."""
    torch.manual_seed(0)
    groups = [[torch.randn(n, device=device, dtype=dtype) for n in g] for g in sizes]
    made = [{"params": [torch.nn.Parameter(p) for p in group]} for group in groups]
    return kind(made, fused=True, **{"lr": 0.1} | settings)


def params_of(optimizer):
    """Return the parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def trained(optimizer, stand_in, scale=4.0, left_out=(), steps=STEPS):
    """Step with and without a skip; return which operators ran.

    Args:
        optimizer: Stepped as a scaler steps it.
        stand_in: Who makes the flag; None for a plain one.
        scale: Of the gradients, or None.
        left_out: (step, place) of gradients that are None.
        steps: How many.
    """
    params = params_of(optimizer)
    device = params[0].device
    torch.manual_seed(1)
    with Operators() as operators:
        for step in range(steps):
            for place, param in enumerate(params):
                grad = torch.randn_like(param)
                param.grad = None if (step, place) in left_out else grad
            flag = torch.tensor(float(step in SKIPPED), device=device)
            given = None if scale is None else torch.tensor(scale, device=device)
            optimizer.grad_scale = given
            optimizer.found_inf = stand_in.flag(optimizer, flag) if stand_in else flag
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
    return operators.seen


def stepped(optimizer, stand_in, **how):
    """Train as `trained` does, and see that torch's kernels were not needed."""
    seen = trained(optimizer, stand_in, **how)
    assert not seen.keys() & {"_fused_adam_", "_fused_adamw_", "_foreach_sub_"}


def all_of(optimizer):
    """Return weights, gradients and state by name."""
    named = {}
    for place, param in enumerate(params_of(optimizer)):
        parts = {"param": param, "grad": param.grad, **optimizer.state[param]}
        named |= {f"{name} {place}": value for name, value in parts.items()}
    return named


def assert_same(ours, torchs, *, exact=None):
    """Compare two optimizers; by default bit for bit on a GPU."""
    mine, others = all_of(ours), all_of(torchs)
    assert mine.keys() == others.keys()
    on_gpu = params_of(ours)[0].device.type == "cuda"
    for name, value in mine.items():
        if name.startswith(("step", "grad")) or (on_gpu if exact is None else exact):
            assert torch.equal(value, others[name]), name
        else:
            other = others[name]
            near = 4e-6 * max(1.0, other.abs().max().item())
            torch.testing.assert_close(value, other, rtol=1e-4, atol=near, msg=name)


def compared(kind, device, scale=4.0, left_out=(), exact=None, **settings):
    """Train two of a kind, one by torch's kernel; return both if they are the same."""
    ours = optimizer_of(kind, device, **settings)
    torchs = optimizer_of(kind, device, **settings)
    trained(torchs, None, scale, left_out)
    stepped(ours, StandIn("triton"), scale=scale, left_out=left_out)
    assert_same(ours, torchs, exact=exact)
    return ours, torchs
