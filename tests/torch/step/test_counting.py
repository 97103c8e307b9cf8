"""Counts of applied and skipped steps, and how a progress bar shows them."""

import pytest
import torch

from gradscale import StaticScale
from gradscale.torch import GradScaler
from tests.torch.training import (
    INF,
    NAN,
    OPTIMIZERS,
    backward,
    iterate,
    parameter,
    two_optimizers,
)

SGD = torch.optim.SGD
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


@pytest.mark.parametrize(
    ("grads", "counts"),
    [
        ([(1.0, 1.0)], ((1, 1, 1), (0, 0, 0))),
        ([(INF, 1.0)], ((0, 0, 1), (1, 1, 0))),
        ([(1.0, 1.0), (1.0, NAN), (INF, INF)], ((1, 2, 1), (2, 1, 2))),
        ([(1.0, 1.0), (1.0, None)], ((2, 2, 1), (0, 0, 0))),
    ],
)
def test_steps_are_counted_in_all_and_for_each_optimizer(grads, counts):
    scaler, first, second = two_optimizers(grads)
    seen = [
        (int(count), count[first], count[second])
        for count in (scaler.applied_steps, scaler.skipped_steps)
    ]
    assert tuple(seen) == counts


@optimizers
def test_counts_are_true_for_every_kind_of_optimizer(make):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = make([param], lr=1.0)
    for grad in (1.0, INF, 1.0, NAN, 1.0):
        iterate(scaler, optimizer, param, grad)
    assert (scaler.applied_steps, scaler.skipped_steps) == (3, 2)
    assert scaler.applied_steps[optimizer] == 3
    assert scaler.skipped_steps[optimizer] == 2


def test_counts_are_zero_before_the_first_step():
    scaler = GradScaler("cpu")
    assert (scaler.applied_steps, scaler.skipped_steps) == (0, 0)
    assert scaler.applied_steps[SGD([parameter(2)], lr=1.0)] == 0


def test_a_new_optimizer_does_not_inherit_the_counts_of_a_dead_one():
    scaler, param = GradScaler("cpu"), parameter(2)

    def once():
        optimizer = SGD([param], lr=1.0)
        iterate(scaler, optimizer, param, 1.0)
        return scaler.applied_steps[optimizer]

    assert [once() for _ in range(20)] == [1] * 20
    assert scaler.applied_steps == 20


def test_counts_survive_a_checkpoint():
    scaler, *_held = two_optimizers([(1.0, 1.0), (1.0, NAN), (INF, INF)])
    resumed = GradScaler("cpu")
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.applied_steps == 1
    assert resumed.skipped_steps == 2
    a, b = parameter(2), parameter(2)
    one, two = SGD([a], lr=1.0), SGD([b], lr=1.0)
    backward(resumed, a, 1.0)
    backward(resumed, b, 1.0)
    resumed.step(one)
    resumed.step(two)
    resumed.update()
    # By the order in which the optimizers come.
    counts = [(c[one], c[two]) for c in (resumed.applied_steps, resumed.skipped_steps)]
    assert counts == [(3, 2), (1, 2)]


@pytest.mark.parametrize(
    ("scale", "grads", "line"),
    [
        (2.0**14, [], "S=2^14 skipped 0/0"),
        (2.0**14, [1.0, INF, 1.0], "S=2^13 skipped 1/3"),
        (1.0, [1.0], "S=2^0 skipped 0/1"),
        (0.25, [1.0], "S=2^-2 skipped 0/1"),
        (1000.0, [1.0], "S=1000 skipped 0/1"),
    ],
)
def test_postfix_shows_scale_and_skips(scale, grads, line):
    scaler, param = GradScaler("cpu", init_scale=scale), parameter(2)
    optimizer = SGD([param], lr=1.0)
    for grad in grads:
        iterate(scaler, optimizer, param, grad)
    assert scaler.postfix() == line


def test_a_fixed_scale_counts_its_skips():
    scaler, param = GradScaler("cpu", policy=StaticScale(scale=8.0)), parameter(2)
    optimizer = SGD([param], lr=1.0)
    for grad in (1.0, INF):
        iterate(scaler, optimizer, param, grad)
    assert scaler.postfix() == "S=2^3 skipped 1/2"
