"""Which way an optimizer is stepped, and that the way never changes the result."""

import pytest
import torch

from gradscale.torch import GradScaler, optim
from gradscale.torch.step.dispatch import mode_of, unscales_itself
from tests.torch.training import (
    FUSED,
    INF,
    PLAIN,
    Custom,
    CustomFused,
    OlderProtocol,
    backward,
    parameter,
)

OWN = {"AdamW": optim.AdamW, "Adam": optim.Adam, "SGD": optim.SGD, "Lion": optim.Lion}


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_fused_optimizer_is_known(make):
    assert unscales_itself(make([parameter(2)]))


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_a_plain_optimizer_is_known(make):
    assert not unscales_itself(make([parameter(2)]))


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (OlderProtocol, "older"),
        (CustomFused, "fused"),
        (Custom, "flag"),
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), "fused"),
        (lambda p: torch.optim.SGD(p, lr=0.1, foreach=True), "flag"),
        (lambda p: optim.SGD(p, lr=0.1), "own"),
        # It writes the gradients, as PyTorch's do.
        (lambda p: optim.SGD(p, lr=0.1, write_back=True), "fused"),
    ],
)
def test_each_way_has_a_name(make, way):
    optimizer = make([parameter(2)])
    assert mode_of(optimizer).value == way
    assert GradScaler("cpu").path(optimizer).way == way


def test_a_scheduler_does_not_change_the_way():
    optimizer = torch.optim.SGD([parameter(2)], lr=0.1, fused=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert mode_of(optimizer).value == "fused"


def test_the_path_says_which_kernels_run():
    optimizer = torch.optim.SGD([parameter(2)], lr=0.1)
    path = GradScaler("cpu").path(optimizer)
    assert path.kernels == "plain"
    assert str(path).startswith("flag, plain kernels: ")


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_an_optimizer_of_ours_that_writes_back_is_not_called_pytorchs(make):
    path = GradScaler("cpu").path(make([parameter(2)], lr=0.1, write_back=True))
    assert "writes them unscaled" in path.meaning
    assert "PyTorch" not in path.meaning


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_no_way_changes_the_result_beyond_rounding(kind, max_norm):
    own = OWN[kind.__name__]
    makes = [
        lambda p: kind(p, lr=0.125, foreach=False),
        lambda p: kind(p, lr=0.125, foreach=True),
        lambda p: kind(p, lr=0.125, fused=True),
        lambda p: own(p, lr=0.125),
    ]

    def run(make):
        scaler, param = GradScaler("cpu", init_scale=8.0), parameter(3, value=1.0)
        optimizer = make([param])
        for grad in ([1.0, -2.0, 0.5], INF, [0.25, 3.0, -1.0]):
            optimizer.zero_grad()
            backward(scaler, param, grad)
            if max_norm is not None:
                scaler.clip_grad_norm_(optimizer, max_norm)
            scaler.step(optimizer)
            scaler.update()
        return param.detach(), scaler.get_scale(), int(scaler.skipped_steps)

    first, *others = [run(make) for make in makes]
    for weights, scale, skipped in others:
        torch.testing.assert_close(weights, first[0], rtol=1e-6, atol=1e-7)
        assert (scale, skipped) == first[1:] == (4.0, 1)
