"""When the one-launch end of a step is taken, and what happens where it fails."""

import pytest
import torch

from gradscale import DynamicScale
from gradscale.errors import ConfigError
from gradscale.torch import kernels
from gradscale.torch.device_state import update as settling
from gradscale.torch.device_state.layout import new_account
from gradscale.torch.device_state.update import Part, settle
from gradscale.torch.kernels import update as kernel
from tests.torch.kernels.books import Books


@pytest.fixture
def broken(monkeypatch):
    """Let the kernel fail to start, where Triton is taken to be usable."""

    class Broken:
        def __call__(self, *args, **constants):
            raise RuntimeError("no ptxas")

    monkeypatch.setattr(kernel, "_settle", Broken())
    monkeypatch.setattr(settling, "usable", lambda kind, device: kind != "plain")


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("kind", ["auto", "triton"])
def test_a_kernel_that_fails_is_an_error_and_nothing_is_written(device, kind):
    books = Books(DynamicScale(), device, kind)
    before = books.shown()
    with pytest.raises(RuntimeError, match="no ptxas"):
        books.end(1.0)
    assert books.shown() == before


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(("count", "forced"), [(2, None), (1, 32.0)])
def test_several_parts_and_a_forced_scale_are_left_to_the_plain_operations(
    device, count, forced
):
    books = Books(DynamicScale(init_scale=8.0), device, "triton")
    flag = torch.zeros((), device=device)
    parts = [
        Part(new_account(device), flag, True, flag, flag, None, None, None)
        for _ in range(count)
    ]
    settle(
        books.policy,
        books.state,
        books.ledger,
        parts,
        hold_on_bad_loss=False,
        forced_scale=books.number(forced),
        kernels="triton",
    )
    assert books.ledger.total.counts() == (1, 0)
    assert books.state.scale.item() == (forced or 8.0)


def test_triton_on_a_device_that_has_no_kernels_is_refused():
    books = Books(DynamicScale(), torch.device("meta"), "plain")
    books.kind = "triton"
    with pytest.raises(ConfigError, match=r"no kernels for meta.*kernels='auto'"):
        books.end()


def test_auto_takes_the_plain_operations_on_the_cpu():
    assert not kernels.usable("auto", torch.device("cpu"))
