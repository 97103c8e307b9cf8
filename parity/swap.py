"""Our classes in all the places where PyTorch exports its scaler."""

import os
from importlib import import_module

import torch

# Set in the environment, it leaves torch's classes in place: the run to compare with.
BASELINE = "GRADSCALE_PARITY_BASELINE"

PLACES = {
    "gradscale.torch": ("torch", "torch.amp", "torch.amp.grad_scaler"),
    "gradscale.torch.cuda.amp": ("torch.cuda.amp", "torch.cuda.amp.grad_scaler"),
    "gradscale.torch.cpu.amp": ("torch.cpu.amp", "torch.cpu.amp.grad_scaler"),
}


def swap() -> None:
    """Replace torch's `GradScaler` classes by ours, unless this is a baseline run.

    To be called before anything imports one of them by name.
    """
    if os.environ.get(BASELINE):
        return
    theirs = torch.amp.GradScaler
    if torch.distributed.is_available():
        # It takes the class it finds when imported as its base. That stays torch's:
        # ShardedGradScaler overrides private methods whose inner order is torch's own.
        import_module("torch.distributed.fsdp.sharded_grad_scaler")
    # All of ours before the first place is changed, for the same reason.
    ours = {source: import_module(source).GradScaler for source in PLACES}
    for source, places in PLACES.items():
        assert issubclass(ours[source], theirs)
        assert issubclass(ours[source], ours["gradscale.torch"])
        for place in places:
            import_module(place).GradScaler = ours[source]
