"""When one kernel ends a step, and when plain operations do."""

import pytest
import torch

from gradscale import DynamicScale
from gradscale.errors import ConfigError
from gradscale.torch import kernels
from gradscale.torch.device_state import update_kernel
from gradscale.torch.device_state.layout import new_totals
from gradscale.torch.device_state.update import StepSummary, update_
from tests.torch.device_state.update_case import UpdateCase


@pytest.fixture
def broken(monkeypatch):
    """Let the kernel fail to start."""

    def fail(*args, **constants):
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(update_kernel, "_update", fail)


@pytest.mark.usefixtures("broken")
def test_an_error_of_the_kernel_is_raised_and_nothing_is_written(device):
    case = UpdateCase(DynamicScale(), device, "triton")
    before = case.shown()
    with pytest.raises(RuntimeError, match="no ptxas"):
        case.end(1.0)
    assert case.shown() == before


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(("count", "forced"), [(2, None), (1, 32.0)])
def test_several_optimizers_and_a_forced_scale_are_left_to_plain_operations(
    device, count, forced
):
    case = UpdateCase(DynamicScale(init_scale=8.0), device, "triton")
    flag = torch.zeros((), device=device)
    steps = [
        StepSummary(new_totals(device), flag, True, flag, flag, None, None, None)
        for _ in range(count)
    ]
    update_(
        case.policy,
        case.scaling,
        case.state,
        steps,
        hold_on_bad_loss=False,
        forced_scale=case.number(forced),
        kernels="triton",
    )
    assert case.state.total.applied_and_skipped() == (1, 0)
    assert case.scaling.scale.item() == (forced or 8.0)


def test_triton_on_a_device_without_kernels_is_refused():
    case = UpdateCase(DynamicScale(), torch.device("meta"), "triton")
    with pytest.raises(ConfigError, match=r"no kernels for meta.*kernels='auto'"):
        case.end()


def test_auto_takes_the_plain_operations_on_the_cpu():
    assert not kernels.usable("auto", torch.device("cpu"))
