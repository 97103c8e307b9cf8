"""The scaler keeps no optimizer and no parameter alive."""

import gc
import weakref

import pytest
import torch

from gradscale.torch import GradScaler, optim
from tests.torch.training import INF, iterate, parameter

KINDS = {
    "foreach": torch.optim.AdamW,
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "own": optim.AdamW,
}


def test_an_optimizer_that_waits_over_an_update_is_freed():
    scaler, param, waiting = GradScaler("cpu"), parameter(2), parameter(2)
    optimizer, other = (torch.optim.SGD([p], lr=1.0) for p in (param, waiting))
    iterate(scaler, other, waiting, 1.0)
    waiting.grad = torch.ones(2)
    iterate(scaler, optimizer, param, 1.0)
    kept = weakref.ref(other), weakref.ref(waiting)
    del other, waiting
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("last", [1.0, INF])
def test_an_optimizer_and_its_parameters_are_freed(make, last):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = make([param])
    for grad in (1.0, 1.0, last):
        iterate(scaler, optimizer, param, grad)
    kept = weakref.ref(optimizer), weakref.ref(param)
    del optimizer, param
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    bad = last == INF
    assert scaler.last.culprits == (("param_groups[0]['params'][0]",) if bad else ())
