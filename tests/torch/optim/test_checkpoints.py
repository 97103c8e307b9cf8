"""Checkpoints: bit for bit, and both ways between torch and here."""

import copy
import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from gradscale.errors import StateError
from gradscale.torch.optim import SGD, Adam, AdamW
from tests.torch.optim.streams import (
    KINDS,
    NAMESAKES,
    TOLERANCE,
    everything,
    give,
    parameters,
    same,
    step_with,
    stream,
    train,
)
from tests.torch.optim.test_against_torch import distance

kinds = pytest.mark.parametrize(("kind", "how"), KINDS.values(), ids=KINDS)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
TORCH_WAYS = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
torch_ways = pytest.mark.parametrize("way", TORCH_WAYS.values(), ids=TORCH_WAYS)
with_namesake = pytest.mark.parametrize(
    ("kind", "how"),
    [KINDS[name] for name in ("AdamW", "Adam", "SGD")],
    ids=["AdamW", "Adam", "SGD"],
)


def saved_and_loaded(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS = {
    "state_dict": copy.deepcopy,
    "file": saved_and_loaded,
    "pickle": lambda state_dict: pickle.loads(pickle.dumps(state_dict)),
}


def all_saved(optimizer):
    """Return the parameters and what a checkpoint holds."""
    states = optimizer.state_dict()["state"].values()
    entries = [entry for state in states for entry in state.values()]
    return [*optimizer.param_groups[0]["params"], *entries]


def copies_of(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


@kinds
@dtypes
@pytest.mark.parametrize("through", WAYS.values(), ids=WAYS)
def test_a_resumed_run_is_bit_identical(kind, how, dtype, through):
    optimizer = kind(parameters(dtype), **how)
    train(optimizer, steps=3)
    resumed = kind(copies_of(optimizer.param_groups[0]["params"]))
    resumed.load_state_dict(through(optimizer.state_dict()))
    for each in (optimizer, resumed):
        train(each, steps=2)
    assert same(all_saved(resumed), all_saved(optimizer))


@kinds
@dtypes
def test_a_loaded_state_is_the_saved_one(kind, how, dtype):
    optimizer = kind(parameters(dtype), **how)
    train(optimizer, steps=3)
    resumed = kind(parameters(dtype))
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    saved = optimizer.state_dict()["state"]
    for place, state in resumed.state_dict()["state"].items():
        assert list(state) == list(saved[place])
        assert same(list(state.values()), list(saved[place].values()))


@kinds
@dtypes
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))],
    ids=["copy", "pickle"],
)
def test_a_copied_optimizer_goes_on_like_the_first(kind, how, dtype, copied):
    optimizer = kind(parameters(dtype), **how, write_back=True, kernels="plain")
    train(optimizer, steps=3)
    twin = copied(optimizer)
    assert (twin.write_back, twin.kernels) == (True, "plain")
    for each in (optimizer, twin):
        train(each, steps=2)
    assert same(everything(twin), everything(optimizer))
    assert (
        twin.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]
    )


@torch_ways
@with_namesake
def test_a_checkpoint_of_torch_is_carried_on(kind, how, way):
    theirs = parameters()
    torchs = NAMESAKES[kind](theirs, **how, **way)
    train(torchs, steps=3)
    ours = copies_of(theirs)
    optimizer = kind(ours)
    optimizer.load_state_dict(saved_and_loaded(torchs.state_dict()))
    for grads in stream(20):
        for each, params in ((torchs, theirs), (optimizer, ours)):
            give(params, grads)
            each.step()
    assert distance(ours, theirs) <= TOLERANCE[torch.float32]


@torch_ways
@with_namesake
def test_torch_carries_on_a_checkpoint_of_ours(kind, how, way):
    ours = parameters()
    optimizer = kind(ours, **how, **way)
    train(optimizer, steps=3)
    theirs = copies_of(ours)
    torchs = NAMESAKES[kind](theirs, **way)
    torchs.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for grads in stream(20):
        for each, params in ((torchs, theirs), (optimizer, ours)):
            give(params, grads)
            each.step()
    assert distance(ours, theirs) <= TOLERANCE[torch.float32]


def model_of(dtype):
    torch.manual_seed(3)
    return torch.nn.Linear(3, 2).to(dtype)


def through_distributed_checkpoint(saver, loader, dtype, flat):
    """Train one optimizer, load its state into another; return both after a step."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, other = model_of(dtype), model_of(dtype)
    first = saver(model.parameters())
    train(first, steps=3)
    state = copy.deepcopy(get_optimizer_state_dict(model, first, options=options))
    other.load_state_dict(model.state_dict())
    second = loader(other.parameters())
    set_optimizer_state_dict(other, second, state, options=options)
    for each in (first, second):
        train(each, steps=1)
    return list(model.parameters()), list(other.parameters())


flatness = pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
halves_too = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@kinds
@flatness
@halves_too
def test_a_distributed_checkpoint_is_carried_on(kind, how, dtype, flat):
    def make(params):
        return kind(params, **how)

    first, second = through_distributed_checkpoint(make, make, dtype, flat)
    assert same(first, second)


@with_namesake
@flatness
@halves_too
def test_a_distributed_checkpoint_of_torch_is_carried_on(kind, how, dtype, flat):
    theirs, ours = through_distributed_checkpoint(
        lambda params: NAMESAKES[kind](params, **how),
        lambda params: kind(params, **how),
        dtype,
        flat,
    )
    # One rounding of a parameter below 1 to its dtype, in one step of 0.01 or less.
    assert distance(ours, theirs) <= torch.finfo(dtype).eps


def test_moments_that_torch_kept_in_f16_are_widened():
    params = parameters(torch.float16)
    torchs = torch.optim.AdamW(params, lr=0.01)
    train(torchs, steps=2)
    optimizer = AdamW(params)
    optimizer.load_state_dict(torchs.state_dict())
    for param in params:
        state, kept = optimizer.state[param], torchs.state[param]
        assert kept["exp_avg"].dtype == torch.float16
        assert same([state["exp_avg"]], [kept["exp_avg"].float()])
        assert same([state["exp_avg_sq"]], [kept["exp_avg_sq"].float()])


def test_masters_that_a_checkpoint_lacks_are_made_from_the_parameters():
    params = parameters(torch.float16)
    torchs = torch.optim.SGD(params, lr=0.01, momentum=0.5)
    train(torchs, steps=2)
    optimizer = SGD(params)
    optimizer.load_state_dict(torchs.state_dict())
    wanted = [param.detach().clone().float() for param in params]
    give(params, [torch.zeros(p.shape) for p in params])
    step_with(optimizer, found_inf=1.0)
    assert same([optimizer.state[p]["master"] for p in params], wanted)


def test_masters_that_grew_stale_in_torch_give_way_to_the_parameters():
    params = parameters(torch.float16)
    optimizer = AdamW(params, lr=0.01)
    train(optimizer, steps=2)
    torchs = torch.optim.AdamW(params)
    torchs.load_state_dict(optimizer.state_dict())
    train(torchs, steps=2)
    optimizer.load_state_dict(torchs.state_dict())
    wanted = [param.detach().clone().float() for param in params]
    step_with(optimizer, found_inf=1.0)
    assert same([optimizer.state[p]["master"] for p in params], wanted)


def test_masters_of_a_half_are_dropped_where_the_parameter_is_f32():
    halved = AdamW(parameters(torch.float16))
    train(halved, steps=1)
    params = parameters()
    optimizer = AdamW(params)
    optimizer.load_state_dict(halved.state_dict())
    assert all("master" not in optimizer.state[param] for param in params)


def test_the_steps_of_adam_are_views_of_one_tensor():
    optimizer = AdamW(parameters())
    train(optimizer, steps=2)
    steps = [state["step"] for state in optimizer.state.values()]
    assert [step.tolist() for step in steps] == [2.0] * 3
    assert {step.untyped_storage().data_ptr() for step in steps} == {
        steps[0].untyped_storage().data_ptr()
    }
    assert {step.untyped_storage().nbytes() for step in steps} == {12}


def test_loaded_steps_are_views_of_one_tensor():
    torchs = torch.optim.AdamW(parameters())
    train(torchs, steps=2)
    optimizer = AdamW(parameters())
    optimizer.load_state_dict(torchs.state_dict())
    steps = [state["step"] for state in optimizer.state.values()]
    assert [(step.tolist(), step.dtype, step.shape) for step in steps] == [
        (2.0, torch.float32, ())
    ] * 3
    assert {step.untyped_storage().nbytes() for step in steps} == {12}


def test_a_step_that_is_a_number_loads():
    optimizer = Adam(parameters())
    train(optimizer, steps=2)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = 2
    optimizer.load_state_dict(saved)
    train(optimizer, steps=1)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


# --- hooks and mistakes ---------------------------------------------------------------


@kinds
def test_the_hooks_of_a_checkpoint_are_called_and_see_tensors(kind, how):
    optimizer = kind(parameters(torch.float16), **how)
    train(optimizer, steps=1)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("saving"))
    optimizer.register_state_dict_post_hook(
        lambda _, saved: seen.append(sorted(saved["state"][0]))
    )
    optimizer.register_load_state_dict_pre_hook(
        lambda _, saved: seen.append(sorted(saved["state"][0]))
    )
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: seen.append(
            {value.dtype for state in loaded.state.values() for value in state.values()}
        )
    )
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    names = sorted(saved["state"][0])
    assert seen == ["saving", names, names, {torch.float32}]
    assert ("step" in names) == isinstance(optimizer, Adam)


def test_a_hook_may_replace_what_is_loaded():
    optimizer = AdamW(parameters())
    train(optimizer, steps=1)

    def restart(_, saved):
        return {**saved, "state": {}}

    optimizer.register_load_state_dict_pre_hook(restart)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state == {}


def test_no_hook_is_left_behind():
    optimizer = SGD(parameters(), momentum=0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_state_dict_post_hooks


def test_what_others_keep_in_a_checkpoint_is_kept():
    optimizer = AdamW(parameters())
    train(optimizer, steps=1)
    saved = optimizer.state_dict()
    saved["state"][0]["mine"] = torch.tensor([1, 2])
    saved["state"]["all"] = "whatever"
    optimizer.load_state_dict(saved)
    train(optimizer, steps=2)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["mine"].tolist() == [
        1,
        2,
    ]
    assert optimizer.state["all"] == "whatever"


def test_a_checkpoint_of_another_model_is_refused_by_name_before_the_step():
    optimizer = AdamW(parameters(shapes=[(2,), (2, 3)]))
    train(optimizer, steps=1)
    other = AdamW(parameters(shapes=[(2,), (3, 2)]))
    other.load_state_dict(optimizer.state_dict())
    before = [p.detach().clone() for p in other.param_groups[0]["params"]]
    with pytest.raises(
        StateError,
        match=r"exp_avg of .*\[1\] has shape \(2, 3\).*Load the checkpoint of this",
    ):
        train(other, steps=1)
    assert same(other.param_groups[0]["params"], before)
