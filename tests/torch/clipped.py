"""One clipped step, of every kind of target, at every moment, for every optimizer."""

import pytest

from gradscale.torch import GradScaler
from tests.torch.training import OPTIMIZERS, backward, parameter

# What clip_grad_norm_() may be given for one optimizer.
TARGETS = {
    "optimizer": lambda optimizer, param: optimizer,
    "list": lambda optimizer, param: [optimizer],
    "parameter": lambda optimizer, param: param,
    "parameters": lambda optimizer, param: [param],
    "generator": lambda optimizer, param: (p for p in [param]),
}
targets = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
moments = pytest.mark.parametrize("unscale", [False, True], ids=["before", "after"])


def clipped_step(make, grad, max_norm, *, unscale, target=TARGETS["optimizer"], **how):
    """Clip and step once; return what a test may look at."""
    scaler, param = GradScaler("cpu", **how), parameter(len(grad))
    optimizer = make([param], lr=1.0)
    backward(scaler, param, grad)
    if unscale:
        scaler.unscale_(optimizer)
    norm = scaler.clip_grad_norm_(target(optimizer, param), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return scaler, param, norm
