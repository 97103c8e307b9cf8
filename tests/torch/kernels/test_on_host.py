"""The passes on the CPU against the reference: the same steps, piece by piece."""

import pytest
import torch

from gradscale.torch.kernels import on_host, reference
from tests.torch.kernels.passes import (
    ADAM,
    LION,
    SGD,
    adam_lists,
    assert_close,
    bits,
    copied,
    handed,
    momentum_lists,
)

CPU = torch.device("cpu")
# Below, at and above a piece, and many that fill one together.
SIZES = (1, 7, 50, 64, 65, 200)

PASSES = {
    "AdamW": (adam_lists, {}, ADAM, on_host.adam_, reference.adam_),
    "Adam": (
        adam_lists,
        {"amsgrad": True},
        ADAM._replace(decoupled=False, weight_decay=0.1, maximize=True),
        on_host.adam_,
        reference.adam_,
    ),
    "SGD": (
        momentum_lists,
        {},
        SGD._replace(momentum=0.9, nesterov=True, weight_decay=0.1),
        on_host.sgd_,
        reference.sgd_,
    ),
    "Lion": (
        momentum_lists,
        {},
        LION._replace(weight_decay=0.1, maximize=True),
        on_host.lion_,
        reference.lion_,
    ),
}
passes = pytest.mark.parametrize("name", PASSES)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(on_host, "PIECE", 64)


def both(name, given, steps=3, **how):
    make, options, settings, ours, theirs = PASSES[name]
    lists = make(CPU, sizes=SIZES, **options, **how)
    other = copied(lists)
    assert on_host.fits(lists)
    for _ in range(steps):
        ours(lists, settings, given)
        theirs(other, settings, given)
    return lists, other


@passes
@pytest.mark.parametrize("scale", [None, 8.0])
def test_pieces_give_the_steps_of_the_reference(name, scale):
    ours, theirs = both(name, handed(CPU, scale, 0.0))
    assert_close(ours, theirs)
    assert [s.item() for s in ours.steps] == [s.item() for s in theirs.steps]


@passes
def test_a_skip_leaves_every_bit(name):
    make, options, settings, ours, _ = PASSES[name]
    lists = make(CPU, sizes=SIZES, **options)
    before = [[bits(t) for t in column] for column in lists]
    ours(lists, settings, handed(CPU, 8.0, 1.0))
    after = [[bits(t) for t in column] for column in lists]
    assert all(
        torch.equal(a, b)
        for now, then in zip(after, before, strict=True)
        for a, b in zip(now, then, strict=True)
    )


@passes
def test_the_gradients_are_written_only_where_asked(name):
    lists, _ = both(name, handed(CPU, 8.0, 0.0), steps=1)
    written, _ = both(name, handed(CPU, 8.0, 0.0, True), steps=1)
    for left, divided in zip(lists.grads, written.grads, strict=True):
        assert torch.equal(left / 8.0, divided)


@passes
def test_a_step_is_a_write_to_the_parameter(name):
    make, options, settings, ours, _ = PASSES[name]
    lists = make(CPU, sizes=SIZES, **options)
    before = [param._version for param in lists.params]
    ours(lists, settings, handed(CPU, None, 0.0))
    after = [param._version for param in lists.params]
    assert all(a > b for a, b in zip(after, before, strict=True))


def test_tensors_with_gaps_are_left_to_the_reference():
    lists = momentum_lists(CPU, sizes=(8,))
    gaps = lists._replace(params=[torch.zeros(16)[::2]])
    assert on_host.fits(lists)
    assert not on_host.fits(gaps)


def test_other_devices_are_left_to_the_reference():
    lists = momentum_lists(CPU, sizes=(8,))
    assert not on_host.fits(lists._replace(params=[torch.zeros(8, device="meta")]))
