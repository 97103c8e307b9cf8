"""The same mistake as with torch: the same type, the same words, and advice.

Longer than other files because every mistake is a function of its own.
"""

import copy
import pickle
from functools import partial

import pytest
import torch

from gradscale import GradscaleError
from gradscale.torch import GradScaler
from tests.torch.training import (
    OPTIMIZERS,
    backward,
    parameter,
    scaled_once,
)

TORCH = torch.amp.GradScaler
SGD = torch.optim.SGD


def _loaded(kind):
    scaler = kind("cpu")
    scaler.load_state_dict(TORCH("cpu").state_dict())
    return scaler


def growth_factor_of_one(kind):
    kind("cpu", growth_factor=1.0)


def growth_factor_below_one(kind):
    kind("cpu", growth_factor=-2.0)


def backoff_factor_of_one(kind):
    kind("cpu", backoff_factor=1.0)


def backoff_factor_above_one(kind):
    kind("cpu", backoff_factor=2.0)


def step_before_scale(kind):
    kind("cpu").step(SGD([parameter(2)], lr=1.0))


def unscale_before_scale(kind):
    kind("cpu").unscale_(SGD([parameter(2)], lr=1.0))


def update_before_scale(kind):
    kind("cpu").update()


def update_to_a_scale_before_scale(kind):
    kind("cpu").update(8.0)


def step_after_loading_and_before_scale(kind):
    _loaded(kind).step(SGD([parameter(2)], lr=1.0))


def unscale_after_loading_and_before_scale(kind):
    _loaded(kind).unscale_(SGD([parameter(2)], lr=1.0))


def update_after_loading_and_before_scale(kind):
    _loaded(kind).update()


def check_before_scale(kind):
    kind("cpu")._check_scale_growth_tracker("anything")


def check_without_a_tracker(kind):
    scaler, _, _ = scaled_once(kind)
    scaler._growth_tracker = None
    scaler._check_scale_growth_tracker("anything")


def lazy_init_twice(kind):
    scaler = kind("cpu")
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))


def scale_a_number(kind):
    kind("cpu").scale(3.0)


def scale_none(kind):
    kind("cpu").scale(None)


def scale_a_nest_with_a_number(kind):
    kind("cpu").scale([torch.ones(()), (torch.ones(()), [3.0])])


def unscale_twice(kind):
    scaler, optimizer, _ = scaled_once(kind)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_after_step(kind):
    scaler, optimizer, _ = scaled_once(kind)
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def step_twice(kind):
    scaler, optimizer, _ = scaled_once(kind)
    scaler.step(optimizer)
    scaler.step(optimizer)


def step_twice_after_unscale(kind):
    scaler, optimizer, _ = scaled_once(kind)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.step(optimizer)


def step_twice_fused(kind):
    scaler, _, param = scaled_once(kind)
    optimizer = SGD([param], lr=1.0, fused=True)
    scaler.step(optimizer)
    scaler.step(optimizer)


def _half(kind):
    scaler, param = kind("cpu"), parameter(2, dtype=torch.float16)
    scaler.scale(torch.zeros(()))
    param.grad = torch.ones_like(param)
    return scaler, SGD([param], lr=1.0)


def unscale_fp16(kind):
    scaler, optimizer = _half(kind)
    scaler.unscale_(optimizer)


def step_fp16(kind):
    scaler, optimizer = _half(kind)
    scaler.step(optimizer)


def _no_tensor(kind):
    scaler, optimizer, _ = scaled_once(kind)
    optimizer.param_groups[0]["params"] = ["weight"]
    return scaler, optimizer


def unscale_what_is_no_tensor(kind):
    scaler, optimizer = _no_tensor(kind)
    scaler.unscale_(optimizer)


def step_what_is_no_tensor(kind):
    scaler, optimizer = _no_tensor(kind)
    scaler.step(optimizer)


def closure_as_keyword(kind):
    scaler, optimizer, _ = scaled_once(kind)
    scaler.step(optimizer, closure=lambda: 0.0)


def update_with_nothing_recorded(kind):
    scaler, _, _ = scaled_once(kind)
    scaler.update()


def update_twice(kind):
    scaler, optimizer, _ = scaled_once(kind)
    scaler.step(optimizer)
    scaler.update()
    scaler.update()


def update_after_a_refused_step(kind):
    scaler, optimizer = _half(kind)
    with pytest.raises(ValueError, match="FP16"):
        scaler.step(optimizer)
    scaler.update()


def update_to_two_elements(kind):
    scaled_once(kind)[0].update(torch.ones(2))


def update_to_a_scale_with_a_gradient(kind):
    scaled_once(kind)[0].update(torch.ones((), requires_grad=True))


def update_to_a_scale_on_another_device(kind):
    scaled_once(kind)[0].update(torch.ones((), device="meta"))


def load_an_empty_dict(kind):
    kind("cpu").load_state_dict({})


def pickle_in_mid_iteration(kind):
    scaler, optimizer, _ = scaled_once(kind)
    scaler.unscale_(optimizer)
    pickle.dumps(scaler)


def copy_in_mid_iteration(kind):
    scaler, optimizer, _ = scaled_once(kind)
    scaler.step(optimizer)
    copy.deepcopy(scaler)


MISUSES = [
    growth_factor_of_one,
    growth_factor_below_one,
    backoff_factor_of_one,
    backoff_factor_above_one,
    step_before_scale,
    unscale_before_scale,
    update_before_scale,
    update_to_a_scale_before_scale,
    step_after_loading_and_before_scale,
    unscale_after_loading_and_before_scale,
    update_after_loading_and_before_scale,
    check_before_scale,
    check_without_a_tracker,
    lazy_init_twice,
    scale_a_number,
    scale_none,
    scale_a_nest_with_a_number,
    unscale_twice,
    unscale_after_step,
    step_twice,
    step_twice_after_unscale,
    step_twice_fused,
    unscale_fp16,
    step_fp16,
    unscale_what_is_no_tensor,
    step_what_is_no_tensor,
    closure_as_keyword,
    update_with_nothing_recorded,
    update_twice,
    update_after_a_refused_step,
    update_to_two_elements,
    update_to_a_scale_with_a_gradient,
    update_to_a_scale_on_another_device,
    load_an_empty_dict,
    pickle_in_mid_iteration,
    copy_in_mid_iteration,
]
named = partial(pytest.mark.parametrize, ids=lambda misuse: misuse.__name__)


def _caught(misuse, kind):
    try:
        misuse(kind)
    except Exception as error:
        return error
    return None


@named("misuse", MISUSES)
def test_a_misuse_raises_torchs_type_and_words(misuse):
    theirs, ours = _caught(misuse, TORCH), _caught(misuse, GradScaler)
    assert theirs is not None
    assert isinstance(ours, type(theirs))
    assert str(ours).partition("\n")[0] == str(theirs)


# What torch raises as its own invariant, or for lack of a tensor, has no code.
UNCODED = {
    lazy_init_twice,
    scale_a_number,
    scale_none,
    scale_a_nest_with_a_number,
    unscale_what_is_no_tensor,
    step_what_is_no_tensor,
}


@named("misuse", [misuse for misuse in MISUSES if misuse not in UNCODED])
def test_a_misuse_says_below_torchs_words_what_to_do(misuse):
    error = _caught(misuse, GradScaler)
    assert isinstance(error, GradscaleError)
    _, remedy = str(error).split("\n")
    assert remedy.endswith(f" [{error.code}]")
    assert len(remedy.split(". ")) >= 2


@named("misuse", [step_twice, unscale_twice, closure_as_keyword, unscale_fp16])
def test_an_error_survives_pickling(misuse):
    error = _caught(misuse, GradScaler)
    revived = pickle.loads(pickle.dumps(error))
    assert type(revived) is type(error)
    assert (str(revived), revived.code) == (str(error), error.code)


@pytest.mark.parametrize("key", TORCH("cpu").state_dict())
def test_a_missing_key_is_a_key_error_that_names_it(key):
    state = GradScaler("cpu").state_dict()
    del state[key]
    with pytest.raises(KeyError) as caught:
        GradScaler("cpu").load_state_dict(state)
    assert f"lacks {key}." in str(caught.value)
    assert "state_dict()" in str(caught.value)


def test_a_positional_closure_gets_the_words_of_the_keyword():
    scaler, optimizer, _ = scaled_once(GradScaler)
    with pytest.raises(RuntimeError, match=r"^Closure use is not currently supported"):
        scaler.step(optimizer, lambda: 0.0)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_none_as_positional_closure_works(make):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.step(optimizer, None)
    scaler.update()
    assert param[0].item() < 0.0
