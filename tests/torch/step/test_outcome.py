"""What became of a step: `last`, its verdict and its culprits.

Longer than other files because every fact of an outcome is asked for on its own.
"""

import weakref

import pytest
import torch

from gradscale import Verdict
from gradscale.torch import GradScaler
from tests.torch.training import (
    INF,
    NAN,
    OPTIMIZERS,
    backward,
    iterate,
    parameter,
    planted,
    two_optimizers,
)

SGD = torch.optim.SGD
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def test_there_is_no_outcome_before_the_first_update():
    scaler, param = GradScaler("cpu"), parameter(2)
    assert scaler.last is None
    backward(scaler, param, 1.0)
    assert scaler.last is None
    scaler.step(SGD([param], lr=1.0))
    assert scaler.last is None


@optimizers
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize(("grad", "applied"), [(1.0, True), (INF, False), (NAN, False)])
def test_applied_says_whether_the_step_was_taken(make, unscale, grad, applied):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, grad)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.applied is applied
    assert scaler.last[optimizer].applied is applied
    assert (param[0].item() != 0.0) is applied


@optimizers
def test_the_scale_is_the_one_that_multiplied_the_loss(make):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    iterate(scaler, make([param], lr=1.0), param, INF)
    assert scaler.last.scale == 8.0
    assert scaler.get_scale() == 4.0


@optimizers
def test_amax_is_the_largest_scaled_magnitude(make):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    iterate(scaler, make([param], lr=1.0), param, [1.0, -3.0])
    assert scaler.last.amax == 24.0


def test_the_norm_is_none_if_nobody_asked():
    scaler, param = GradScaler("cpu"), parameter(2)
    iterate(scaler, SGD([param], lr=1.0), param, 1.0)
    assert scaler.last.grad_norm is None


def test_steps_are_counted_from_one():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    steps = []
    for grad in (1.0, INF, 1.0):
        iterate(scaler, optimizer, param, grad)
        steps.append(scaler.last.step)
    assert steps == [1, 2, 3]


def test_an_outcome_does_not_change_with_the_next_step():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = SGD([param], lr=1.0)
    iterate(scaler, optimizer, param, INF)
    kept = scaler.last
    iterate(scaler, optimizer, param, 1.0)
    assert (kept.applied, kept.scale, kept.step) == (False, 8.0, 1)
    assert kept.culprits == ("param_groups[0]['params'][0]",)


def test_an_outcome_outlives_a_pickling():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    iterate(scaler, SGD([param], lr=1.0), param, INF)
    kept = scaler.last
    scaler.load_state_dict(scaler.state_dict())
    assert (kept.applied, kept.step) == (False, 1)


def _judged(grads, **how):
    scaler, param = GradScaler("cpu", **how), parameter(2)
    optimizer = SGD([param], lr=1.0)
    verdicts = []
    for grad in grads:
        iterate(scaler, optimizer, param, grad)
        verdicts.append(scaler.last.verdict)
    return verdicts


def test_an_overflow_before_the_first_finite_step_is_calibration():
    assert _judged([INF, INF, 1.0]) == [
        Verdict.CALIBRATING,
        Verdict.CALIBRATING,
        Verdict.OK,
    ]


def test_an_overflow_right_after_growth_is_probing():
    assert _judged([1.0, 1.0, INF, 1.0], growth_interval=2) == [
        Verdict.OK,
        Verdict.OK,
        Verdict.PROBING,
        Verdict.OK,
    ]


def test_any_other_overflow_is_an_overflow():
    assert _judged([1.0, 1.0, INF], growth_interval=9)[-1] is Verdict.OVERFLOW


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@optimizers
def test_a_loss_that_is_not_finite_is_kept_apart_from_gradient_overflow(make, bad):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = make([param], lr=1.0)
    iterate(scaler, optimizer, param, 1.0)
    optimizer.zero_grad()
    scaler.scale(planted(param, bad) + bad).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.verdict is Verdict.FORWARD_NONFINITE
    assert scaler.last.verdict.code == "GS203"
    assert not scaler.last.applied


def test_the_next_loss_starts_clean():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    scaler.scale(planted(param, NAN) + NAN).backward()
    scaler.step(optimizer)
    scaler.update()
    iterate(scaler, optimizer, param, 1.0)
    assert scaler.last.verdict is Verdict.OK


@pytest.mark.parametrize(("size", "noticed"), [(1, True), (4096, True), (4097, False)])
def test_losses_of_at_most_4096_elements_are_looked_at(size, noticed):
    scaler, param = GradScaler("cpu"), parameter(2)
    loss = torch.zeros(size)
    loss[-1] = NAN
    scaler.scale(loss)
    backward(scaler, param, INF)
    scaler.step(SGD([param], lr=1.0))
    scaler.update()
    forward = scaler.last.verdict is Verdict.FORWARD_NONFINITE
    assert forward is noticed


@pytest.mark.parametrize(
    "loss",
    [
        torch.tensor(3e38),
        torch.tensor(-3e38),
        torch.tensor(65504.0, dtype=torch.float16),
        torch.tensor(1e300, dtype=torch.float64),
        torch.tensor(3e38 + 3e38j),
        torch.full((4096,), 3e38),
        torch.tensor(7),
        torch.zeros(0),
    ],
    ids=str,
)
def test_a_large_loss_is_not_taken_for_a_bad_one(loss):
    scaler, param = GradScaler("cpu"), parameter(2)
    scaler.scale(loss)
    backward(scaler, param, INF)
    scaler.step(SGD([param], lr=1.0))
    scaler.update()
    assert scaler.last.verdict is Verdict.CALIBRATING


def test_one_bad_loss_among_several_is_noticed():
    scaler, param = GradScaler("cpu"), parameter(2)
    backward(scaler, param, 1.0)
    scaler.scale([torch.ones(()), (torch.full((), NAN),)])
    backward(scaler, param, INF)
    scaler.step(SGD([param], lr=1.0))
    scaler.update()
    assert scaler.last.verdict is Verdict.FORWARD_NONFINITE


def test_three_bad_steps_at_the_floor_are_a_collapse():
    scaler, param = GradScaler("cpu", init_scale=2.0**-24), parameter(2)
    optimizer = SGD([param], lr=1.0)
    verdicts = []
    for _ in range(4):
        iterate(scaler, optimizer, param, INF)
        verdicts.append(scaler.last.verdict)
    assert verdicts == [Verdict.CALIBRATING] * 2 + [Verdict.COLLAPSE] * 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_without_gradients_says_so(fused):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0, fused=fused)
    scaler.scale(torch.zeros(()))
    with pytest.warns(UserWarning, match="GS103"):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.last.verdict is Verdict.NO_GRADIENTS
    assert scaler.last[optimizer].verdict is Verdict.NO_GRADIENTS
    assert not scaler.last.applied
    assert (scaler.applied_steps, scaler.skipped_steps) == (0, 0)
    assert scaler._get_growth_tracker() == 0


@pytest.mark.parametrize(
    ("grads", "applied"),
    [
        ((1.0, 1.0), (True, True, True)),
        ((INF, 1.0), (False, False, True)),
        ((1.0, INF), (False, True, False)),
        ((INF, INF), (False, False, False)),
    ],
)
def test_each_of_two_optimizers_has_its_own_outcome(grads, applied):
    scaler, first, second = two_optimizers([grads])
    last = scaler.last
    assert (last.applied, last[first].applied, last[second].applied) == applied


def test_nonfinite_gradients_that_are_only_unscaled_make_the_update_a_skip():
    scaler, params = GradScaler("cpu"), [parameter(2), parameter(2)]
    first, second = (SGD([param], lr=1.0) for param in params)
    for param, value in zip(params, (1.0, INF), strict=True):
        scaler.scale(planted(param, [value, 1.0])).backward()
    scaler.step(first)
    scaler.unscale_(second)
    scaler.update()
    assert (scaler.last.applied, scaler.last[first].applied) == (False, True)
    assert (scaler.applied_steps, scaler.skipped_steps) == (0, 1)
    assert (scaler.applied_steps[first], scaler.skipped_steps[second]) == (1, 0)


def test_an_optimizer_that_was_idle_has_no_outcome_of_an_earlier_step():
    scaler, first, second = two_optimizers([(1.0, 1.0), (1.0, None)])
    assert scaler.last[second].verdict is Verdict.NO_GRADIENTS
    assert not scaler.last[second].applied
    assert scaler.last[first].applied
    assert scaler.last.applied


def test_an_optimizer_that_took_no_part_is_named():
    scaler, param = GradScaler("cpu"), parameter(2)
    iterate(scaler, SGD([param], lr=1.0), param, 1.0)
    stranger = torch.optim.Adam([param])
    with pytest.raises(
        KeyError, match=r"Adam took no part in step 1.*step\(optimizer\)"
    ):
        scaler.last[stranger]


def test_the_whole_has_the_larger_amax_and_each_its_own():
    scaler, first, second = two_optimizers([(1.0, 3.0)], init_scale=8.0)
    last = scaler.last
    assert (last.amax, last[first].amax, last[second].amax) == (24.0, 8.0, 24.0)


@optimizers
def test_culprits_are_named_by_the_model(make):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    scaler, optimizer = GradScaler("cpu", model=model), make(model.parameters(), lr=1.0)
    scaler.scale(model(torch.ones(2)).sum()).backward()
    model[0].bias.grad[1] = INF
    model[1].weight.grad[0] = NAN
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.culprits == ("0.bias", "1.weight")
    assert scaler.last[optimizer].culprits == ("0.bias", "1.weight")


def test_culprits_are_named_by_group_and_index_without_a_model():
    scaler, params = GradScaler("cpu"), [parameter(2) for _ in range(3)]
    optimizer = SGD([{"params": params[:1]}, {"params": params[1:]}], lr=1.0)
    for param, grad in zip(params, (1.0, 1.0, NAN), strict=True):
        backward(scaler, param, grad)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.culprits == ("param_groups[1]['params'][1]",)


def test_culprits_are_named_by_the_optimizers_own_names():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([("decoder.bias", param)], lr=1.0)
    iterate(scaler, optimizer, param, INF)
    assert scaler.last.culprits == ("decoder.bias",)


@pytest.mark.parametrize("change", [list.pop, list.reverse])
def test_culprits_keep_their_names_when_a_group_changes(change):
    model = torch.nn.ParameterDict({"a": parameter(2), "b": parameter(2)})
    scaler = GradScaler("cpu", init_scale=4.0, model=model)
    optimizer = torch.optim.SGD(model.values(), lr=0.5)
    for step in range(5):
        optimizer.zero_grad()
        backward(scaler, model["a"], 1.0)
        backward(scaler, model["b"], INF if step == 1 else 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            kept = scaler.last
            change(optimizer.param_groups[0]["params"])
    assert kept.culprits == ("b",)


def test_there_are_no_culprits_in_a_finite_step():
    scaler, param = GradScaler("cpu"), parameter(2)
    iterate(scaler, SGD([param], lr=1.0), param, 1.0)
    assert scaler.last.culprits == ()


def test_who_overflows_in_unscaling_is_a_culprit():
    scaler, params = (
        GradScaler("cpu", init_scale=2.0**-10),
        [parameter(2), parameter(2)],
    )
    optimizer = SGD(params, lr=1.0)
    scaler.scale(torch.zeros(()))
    params[0].grad, params[1].grad = torch.ones(2), torch.full((2,), 3e38)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.culprits == ("param_groups[0]['params'][1]",)


def test_culprits_of_two_optimizers_are_listed_together_and_apart():
    scaler, first, second = two_optimizers([(INF, NAN)])
    name = "param_groups[0]['params'][0]"
    assert scaler.last.culprits == (name, name)
    assert scaler.last[first].culprits == (name,)
    assert scaler.last[second].culprits == (name,)


def test_a_step_that_was_only_unscaled_was_not_applied():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.unscale_(optimizer)
    scaler.update()
    assert not scaler.last.applied
    assert (scaler.applied_steps, scaler.skipped_steps) == (0, 0)


def test_a_disabled_scaler_has_an_outcome_too():
    scaler, a, b = GradScaler("cpu", enabled=False), parameter(2), parameter(2)
    first, second = SGD([a], lr=1.0), SGD([b], lr=1.0)
    assert scaler.last is None
    for _ in range(2):
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert (scaler.last.applied, scaler.last.scale, scaler.last.step) == (True, 1.0, 2)
    assert scaler.last[first].applied
    assert (scaler.applied_steps, scaler.applied_steps[second]) == (2, 2)
    assert scaler.postfix() == "S=2^0 skipped 0/2"


def test_an_outcome_shows_itself():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    iterate(scaler, SGD([param], lr=1.0), param, INF)
    shown = "StepOutcome(step=1, scale=8, applied=False, verdict=calibrating)"
    assert repr(scaler.last) == shown


def test_the_gradients_of_a_step_are_let_go():
    scaler, param = GradScaler("cpu"), parameter(2)
    iterate(scaler, SGD([param], lr=1.0), param, INF)
    grad = weakref.ref(param.grad)
    param.grad = None
    assert grad() is None
