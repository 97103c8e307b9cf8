"""Failing runs of all kinds of models end as under torch's scaler, bit for bit."""

import gc
import warnings

import pytest
import torch
from torch import nn

from gradscale.torch import GradScaler
from tests.torch.locate.kinds_of_models import KINDS, STEPS, batch, is_bad
from tests.torch.locate.parallel_kinds import SPREADS
from tests.torch.parallel.launch import all_saw, seen_by


def trained(make, scaler):
    """Train a kind of model; return all that must be the same under any scaler."""
    torch.manual_seed(0)
    kind = make()
    model = kind.model
    before = hooks_on(model)
    params = [param for param in model.parameters() if param.requires_grad]
    del model
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    losses, scales, enabled = [], [], False
    for step in range(STEPS):
        kind.between(step)
        optimizer.zero_grad()
        loss = kind.loss(batch(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        scales.append(scaler.get_scale())
        enabled |= getattr(scaler, "_monitor", None) is not None and (
            scaler._monitor.module_hooks.enabled
        )
    result = {
        "losses": bits(torch.stack(losses)),
        "weights": [bits(param) for param in params],
        "buffers": [bits(each) for each in kind.model.buffers()],
        "momentum": [bits(s["momentum_buffer"]) for s in optimizer.state.values()],
        "scales": scales,
        "random": bits(torch.get_rng_state()),
        "notes": repr(kind.notes),
        "hooks": hooks_on(kind.model) == before,
    }
    assert [is_bad(step) for step in range(STEPS)] == [
        not loss.isfinite().item() for loss in losses
    ]
    return result, enabled, kind


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def hooks_on(model):
    """Return the number of hooks on each module, and of hooks on all modules."""
    of_all = nn.modules.module._global_forward_hooks
    tables = [
        (module._forward_hooks, module._forward_pre_hooks)
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    return [[len(table) for table in pair] for pair in tables], len(of_all)


@pytest.fixture(autouse=True)
def _quiet():
    # Torch's own, on deprecated and experimental parts of it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", KINDS)
def test_a_failing_run_ends_as_under_torch(name, caplog):
    expected, _, _ = trained(KINDS[name], torch.amp.GradScaler("cpu"))
    gc.collect()
    scaler = GradScaler("cpu")
    result, enabled, kind = trained(KINDS[name], scaler)
    assert result == expected
    assert result["hooks"]
    assert enabled == kind.hooked
    assert not scaler._monitor.module_hooks.enabled


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    return all_saw(seen_by("tests.torch.locate.parallel_kinds", 2, folder), "all")


@pytest.mark.parametrize("name", SPREADS)
def test_a_failing_run_on_two_ranks_ends_as_under_torch(name, ranks):
    for seen in ranks:
        assert seen[name]["result"] == seen[name]["expected"]
        assert seen[name]["enabled"]
        assert seen[name]["gone"]
