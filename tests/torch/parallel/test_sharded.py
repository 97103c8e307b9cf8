"""The scaler for FSDP1: a drop-in for torch's, on two ranks and with real FSDP1."""

import inspect
import warnings

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import (
    ShardedGradScaler as TorchShardedGradScaler,
)

from gradscale.torch import GradScaler, ShardedGradScaler
from tests.torch.parallel.launch import all_saw, seen_by
from tests.torch.parallel.sharded_cases import CASES, KINDS, OPTIMIZERS

PUBLIC = [
    name
    for name, value in inspect.getmembers(TorchShardedGradScaler, inspect.isfunction)
    if not name.startswith("_")
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return seen_by("tests.torch.parallel.sharded_cases", 2, folder)


def cases(begin):
    """Return the names of cases that begin so."""
    return [name for name in CASES if name.startswith(begin)]


@pytest.mark.parametrize("name", [*cases("clip-"), "ignored-module", "no-shard"])
def test_a_clip_is_that_of_one_process_and_of_fsdp(seen, name):
    for saw in all_saw(seen, name):
        alone, spread = saw["alone"], saw["fsdp"]
        # Two roundings of f32 more where FSDP1 adds up the parts.
        assert spread["norm"] == pytest.approx(alone["norm"], rel=1e-6)
        assert spread["norm"] == pytest.approx(saw["own"], rel=1e-6)
        assert spread["weights"] == pytest.approx(alone["weights"], abs=1e-6)


def test_with_original_parameters_each_rank_lacks_some_gradients(seen):
    first, second = all_saw(seen, "empty-shards")
    assert any(first)
    assert any(second)
    assert first != second


@pytest.mark.parametrize("name", cases("inf-in-one-shard"))
def test_an_inf_in_one_shard_is_a_skip_on_all_ranks(seen, name):
    assert all_saw(seen, name) == [[True, False, 2.0]] * 2


def test_half_precision_trains_from_the_default_scale(seen):
    first, second = all_saw(seen, "half-precision")
    assert first == second
    assert first["losses"][-1] < 0.5 * first["losses"][0]
    assert not first["applied"][0]
    assert first["applied"][-10:] == [True] * 10
    assert first["scale"] == 2.0 ** (16 - first["applied"].count(False))


def test_half_gradients_are_accepted(seen):
    assert all_saw(seen, "half-gradients") == [[-0.5, -0.5]] * 2


@pytest.mark.parametrize("name", cases("sequence"))
def test_a_run_is_torchs_run_bit_for_bit(seen, name):
    first, second = all_saw(seen, name)
    assert first["ours"] == first["torch"]
    assert second["ours"] == second["torch"]
    scales = [[step[:2] for step in one["ours"]] for one in (first, second)]
    assert scales[0] == scales[1]


@pytest.mark.parametrize("name", cases("training"))
def test_a_training_under_fsdp_is_torchs_bit_for_bit(seen, name):
    first, second = all_saw(seen, name)
    assert first == second
    assert first["ours"] == first["torch"]
    assert first["ours"][0] == [256, 512, 256, 256, 512, 256, 256, 512]


def test_a_copy_through_pickle_still_decides_with_the_others(seen):
    first, second = all_saw(seen, "pickling")
    assert first == second == [2.0, 2, [0.0, 0.0]]


def test_a_scaler_with_a_group_says_that_it_cannot_be_pickled(seen):
    for text in all_saw(seen, "pickling-with-a-group"):
        assert "process_group" in text
        assert "state_dict()" in text


def test_states_go_both_ways(seen):
    expected = {
        "scale": 2.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 5,
        "_growth_tracker": 2,
    }
    assert all_saw(seen, "states") == [[expected, expected]] * 2


def test_the_ranks_of_the_given_group_decide_together_and_no_others(seen):
    assert all_saw(seen, "smaller-group") == [[8.0, True], [4.0, True]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_every_optimizer_is_tried_with_both_scalers(kind, make):
    assert len(cases(f"clip-flat-{make}-{kind}")) == 2


def _parameters(function):
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found]


def test_the_constructor_begins_as_torchs_does():
    theirs = _parameters(TorchShardedGradScaler.__init__)
    assert _parameters(ShardedGradScaler.__init__)[: len(theirs)] == theirs


@pytest.mark.parametrize("name", PUBLIC)
def test_a_method_takes_what_torchs_takes(name):
    theirs = _parameters(getattr(TorchShardedGradScaler, name))
    assert _parameters(getattr(ShardedGradScaler, name))[: len(theirs)] == theirs


def test_positional_arguments_mean_what_they_mean_in_torch():
    def settings(kind):
        scaler = kind("cpu", 32.0, 0.25, 4.0, 7, True, None)
        return scaler.state_dict(), scaler.is_enabled(), scaler.process_group

    (ours, *ours_too), (theirs, *theirs_too) = map(
        settings, (ShardedGradScaler, TorchShardedGradScaler)
    )
    assert {key: ours[key] for key in theirs} == theirs
    assert ours_too == theirs_too


def test_options_of_the_plain_scaler_are_taken_too():
    scaler = ShardedGradScaler("cpu", guard="raise", allow_fp16=False)
    assert isinstance(scaler, GradScaler)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert (scaler._guard, scaler._allow_fp16) == ("raise", False)


def test_without_a_process_group_one_process_decides_alone():
    scaler = ShardedGradScaler("cpu", 4.0)
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(param.sum()).backward()
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(2.0**0.5)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.applied


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to scale on")
def test_a_missing_device_is_reported_at_the_users_line():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scaler = ShardedGradScaler()
    assert [w.filename for w in said] == [__file__]
    assert not scaler.is_enabled()
