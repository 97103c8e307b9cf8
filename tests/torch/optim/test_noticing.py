"""What changes between two steps is noticed in the next."""

import pytest
import torch

import gradscale.torch.optim.adam
from gradscale.errors import StateError
from gradscale.torch.optim import SGD, AdamW
from gradscale.torch.optim.batches import Batch
from tests.torch.optim.streams import (
    KINDS,
    everything,
    give,
    parameters,
    same,
    stream,
    train,
)

kinds = pytest.mark.parametrize(("kind", "how"), KINDS.values(), ids=KINDS)


@pytest.fixture
def made(monkeypatch):
    """Count the batches that are made."""
    counted = []
    plain_init = Batch.__init__

    def counting_init(self, *args):
        counted.append(self)
        plain_init(self, *args)

    monkeypatch.setattr(Batch, "__init__", counting_init)
    return counted


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_lists_are_kept_from_step_to_step(kind, how, dtype, made):
    optimizer = kind(parameters(dtype), **how)
    train(optimizer, steps=5)
    assert len(made) == 1


def test_after_a_change_lists_are_made_once(made):
    optimizer = AdamW(parameters())
    train(optimizer, steps=2)
    optimizer.add_param_group({"params": parameters(shapes=[(2,)])})
    train(optimizer, steps=3)
    assert len(made) == 2
    optimizer.state.clear()
    train(optimizer, steps=3)
    assert len(made) == 4


def test_lists_are_kept_where_some_parameters_never_have_a_gradient(made):
    params = parameters()
    optimizer = AdamW(params)
    for grads in stream(3):
        give(params, grads)
        params[1].grad = None
        optimizer.step()
    assert len(made) == 1
    assert params[1] not in optimizer.state


@kinds
def test_gradients_that_come_and_go_are_those_of_their_parameters(kind, how):
    def run(alone):
        params = parameters()
        optimizers = (
            [kind([p], **how) for p in params] if alone else [kind(params, **how)]
        )
        for turn, grads in enumerate(stream(12)):
            give(params, grads)
            params[turn % 3].grad = None
            for optimizer in optimizers:
                optimizer.step()
        return [p.detach() for p in params]

    assert same(run(False), run(True))


@kinds
def test_state_that_is_bound_anew_is_used(kind, how):
    optimizer = kind(parameters(), **how)
    twin = kind(parameters(), **how)
    train(optimizer, steps=2)
    train(twin, steps=2)
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.to(torch.float64).to(value.dtype).clone()
    old = [value for state in optimizer.state.values() for value in state.values()]
    train(optimizer, steps=2)
    train(twin, steps=2)
    assert same(everything(optimizer), everything(twin))
    new = [value for state in optimizer.state.values() for value in state.values()]
    assert all(a is b for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_one_entry_that_is_bound_anew_is_used(name):
    optimizer = AdamW(parameters())
    train(optimizer, steps=2)
    param = optimizer.param_groups[0]["params"][1]
    bound = optimizer.state[param][name] = torch.zeros_like(
        optimizer.state[param][name]
    )
    train(optimizer, steps=1)
    assert optimizer.state[param][name] is bound
    assert bool((bound != 0.0).all())


def test_an_entry_of_another_dtype_is_adopted():
    optimizer = AdamW(parameters())
    train(optimizer, steps=2)
    param = optimizer.param_groups[0]["params"][0]
    optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"].half()
    train(optimizer, steps=1)
    assert optimizer.state[param]["exp_avg"].dtype == torch.float32


def test_state_that_is_cleared_starts_anew():
    optimizer = AdamW(parameters())
    train(optimizer, steps=2)
    optimizer.state.clear()
    train(optimizer, steps=1)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_an_entry_that_is_deleted_starts_anew():
    optimizer = AdamW(parameters())
    train(optimizer, steps=2)
    last = optimizer.param_groups[0]["params"][-1]
    del optimizer.state[last]["exp_avg_sq"]
    train(optimizer, steps=1)
    assert "exp_avg_sq" in optimizer.state[last]


def test_a_parameter_that_replaces_another_takes_over_its_state():
    optimizer = AdamW(parameters(shapes=[(4,)]))
    train(optimizer, steps=2)
    (group,) = optimizer.param_groups
    (old,) = group["params"]
    state = optimizer.state.pop(old)
    new = torch.nn.Parameter(old.detach()[:2].clone())
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = state[name][:2].clone()
    group["params"][0] = new
    optimizer.state[new] = state
    before = old.detach().clone()
    train(optimizer, steps=1)
    assert float(optimizer.state[new]["step"]) == 3.0
    assert torch.equal(old, before)


def test_a_parameter_that_replaces_another_without_state_is_stepped():
    optimizer = SGD(parameters(shapes=[(4,)]), lr=0.5)
    train(optimizer, steps=2)
    new = optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(4))
    train(optimizer, steps=1)
    assert bool((new != 0.0).all())


def test_state_that_is_given_to_another_is_no_longer_used():
    optimizer = AdamW(parameters(shapes=[(4,)]))
    train(optimizer, steps=2)
    (param,) = optimizer.param_groups[0]["params"]
    other = torch.nn.Parameter(torch.ones(4))
    optimizer.state[other] = optimizer.state.pop(param)
    train(optimizer, steps=1)
    assert float(optimizer.state[other]["step"]) == 2.0
    assert float(optimizer.state[param]["step"]) == 1.0


def test_a_load_in_mid_run_is_used():
    optimizer = AdamW(parameters())
    train(optimizer, steps=2)
    other = AdamW(parameters())
    train(other, steps=5)
    optimizer.load_state_dict(other.state_dict())
    train(optimizer, steps=1)
    assert {float(state["step"]) for state in optimizer.state.values()} == {6.0}


@kinds
def test_data_that_is_swapped_is_stepped_on(kind, how):
    optimizer = kind(parameters(), **how)
    train(optimizer, steps=2)
    param = optimizer.param_groups[0]["params"][0]
    swapped = torch.full_like(param, 5.0)
    param.data = swapped
    train(optimizer, steps=1)
    assert bool((swapped != 5.0).all())
    assert param.data_ptr() == swapped.data_ptr()


def test_a_group_that_is_added_is_stepped():
    params = parameters()
    optimizer = AdamW(params[:1], lr=0.5)
    train(optimizer, steps=2)
    optimizer.add_param_group({"params": params[1:], "lr": 0.25})
    train(optimizer, steps=1)
    assert [float(optimizer.state[p]["step"]) for p in params] == [3.0, 1.0, 1.0]


@kinds
def test_groups_have_settings_of_their_own(kind, how):
    def run(settings):
        params = parameters(shapes=[(3,)] * len(settings))
        groups = [
            {"params": [param], **each}
            for param, each in zip(params, settings, strict=True)
        ]
        optimizer = kind(groups, **how)
        for grads in stream(4, [(3,)]):
            give(params, grads * len(params))
            optimizer.step()
        return [param.detach() for param in params][:1]

    slow, fast = {"lr": 0.25, "weight_decay": 0.5}, {"lr": 0.5, "maximize": True}
    assert same(run([slow, fast]), run([slow]))
    assert same(run([fast, slow]), run([fast]))
    assert not same(run([slow]), run([fast]))


def test_a_setting_that_is_changed_is_used():
    optimizer = SGD(parameters(shapes=[(2,)]), lr=0.5)
    (param,) = optimizer.param_groups[0]["params"]
    before = param.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, steps=1)
    assert torch.equal(param, before)


def test_amsgrad_can_be_turned_on_in_mid_run():
    optimizer = AdamW(parameters())
    train(optimizer, steps=2)
    optimizer.param_groups[0]["amsgrad"] = True
    train(optimizer, steps=1)
    assert all("max_exp_avg_sq" in state for state in optimizer.state.values())


def test_a_schedule_moves_a_tensor_and_a_number_alike():
    def run(lr):
        params = parameters()
        optimizer = SGD(params, lr=lr, momentum=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        for grads in stream(4):
            give(params, grads)
            optimizer.step()
            schedule.step()
        return [p.detach() for p in params]

    assert same(run(0.5), run(torch.tensor(0.5)))


def test_gradients_that_turn_sparse_are_refused_and_nothing_is_stepped():
    params = parameters(shapes=[(2,), (3,)])
    optimizer = AdamW([{"params": [param]} for param in params])
    train(optimizer, steps=2)
    before = everything(optimizer)
    params[1].grad = params[1].grad.to_sparse()
    with pytest.raises(ValueError, match="AdamW does not support sparse gradients"):
        optimizer.step()
    assert same(everything(optimizer), before)


def test_a_step_can_be_repeated_after_a_refusal():
    params = parameters()
    optimizer, twin = AdamW(params), AdamW(parameters())
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(99)
    with pytest.raises(StateError, match=r"exp_avg of .*\[1\] has shape \(99,\)"):
        train(optimizer, steps=1)
    del optimizer.state[params[1]]["exp_avg"]
    train(optimizer)
    train(twin)
    for param, other in zip(params, twin.param_groups[0]["params"], strict=True):
        assert torch.equal(param, other)


def test_an_error_in_a_pass_leaves_no_lists_behind(monkeypatch):
    optimizer = AdamW(parameters())
    train(optimizer, steps=1)
    twin = AdamW(parameters())
    train(twin, steps=1)

    def failing(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(gradscale.torch.optim.adam, "adam_", failing)
        with pytest.raises(ZeroDivisionError):
            train(optimizer, steps=1)
    for each in (optimizer, twin):
        train(each, steps=2)
    assert same(everything(optimizer), everything(twin))
