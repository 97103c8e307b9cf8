"""The same steps as torch's fused optimizers take, to rounding."""

import inspect

import pytest
import torch
from torch import Tensor

from gradscale.torch.optim import SGD, Adam, AdamW, Lion
from tests.torch.optim.streams import (
    CASE_IDS,
    CASES,
    NAMESAKES,
    STEPS,
    TOLERANCE,
    give,
    parameters,
    step_with,
    stream,
)

cases = pytest.mark.parametrize(("kind", "how"), CASES, ids=CASE_IDS)
namesakes = pytest.mark.parametrize("kind", NAMESAKES, ids=lambda kind: kind.__name__)


def distance(ours, theirs):
    """Return the largest difference, relative where the parameter exceeds 1."""
    with torch.no_grad():
        return max(
            float(((a - b).abs() / b.abs().clamp(min=1.0)).max())
            for a, b in zip(ours, theirs, strict=True)
        )


def step_together(kind, how, dtype, steps):
    """Return the parameters of our optimizer and of torch's after some steps."""
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = kind(ours, lr=0.01, **how)
    fused = NAMESAKES[kind](theirs, lr=0.01, fused=True, **how)
    for grads in stream(steps):
        give(ours, grads)
        give(theirs, grads)
        optimizer.step()
        fused.step()
    return ours, theirs


@cases
def test_a_thousand_steps_are_those_of_torch(kind, how):
    ours, theirs = step_together(kind, how, torch.float32, STEPS)
    assert distance(ours, theirs) <= TOLERANCE[torch.float32]
    assert distance(ours, parameters()) > 0.01


@cases
def test_steps_in_f64_are_those_of_torch_to_all_digits(kind, how):
    ours, theirs = step_together(kind, how, torch.float64, 100)
    assert distance(ours, theirs) <= TOLERANCE[torch.float64] * 100 / STEPS


@pytest.mark.parametrize("kind", [AdamW, Adam], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("taken", [0.0, 1.0, 10.0, 1000.0])
def test_the_corrections_of_early_steps_keep_their_digits(kind, taken):
    def run(make, **how):
        # From 0 in one step of size 1: the parameter is the update.
        param = torch.nn.Parameter(torch.zeros(1))
        optimizer = make([param], lr=1.0, **how)
        param.grad = torch.ones(1)
        step_with(optimizer, found_inf=1.0)
        optimizer.state[param]["step"].fill_(taken)
        optimizer.step()
        return param.item()

    wanted = run(NAMESAKES[kind], fused=True)
    assert run(kind) == pytest.approx(wanted, rel=TOLERANCE["update"])


def test_the_rounding_of_a_small_weight_decay_adds_no_decay_of_its_own():
    ours, theirs = step_together(AdamW, {}, torch.float32, 200)
    exact, _ = step_together(AdamW, {}, torch.float64, 200)
    assert distance(ours, exact) < distance(theirs, exact) / 2


def test_a_distance_is_seen():
    assert distance([torch.ones(2)], [torch.tensor([1.0, 2.0])]) == 0.5


@cases
def test_scaled_gradients_give_the_steps_of_torch(kind, how):
    ours, theirs = parameters(), parameters()
    optimizer = kind(ours, lr=0.01, **how)
    fused = NAMESAKES[kind](theirs, lr=0.01, fused=True, **how)
    for place, grads in enumerate(stream(50)):
        found = float(place % 7 == 3)
        give(ours, [grad * 1024.0 for grad in grads])
        give(theirs, [grad * 1024.0 for grad in grads])
        step_with(optimizer, grad_scale=1024.0, found_inf=found)
        step_with(fused, grad_scale=1024.0, found_inf=found)
    assert distance(ours, theirs) <= TOLERANCE[torch.float32] * 50 / STEPS


def lion_by_the_paper(param, momentum, grad, lr, betas, weight_decay):
    """Return parameter and momentum after algorithm 2 of arXiv 2302.06675."""
    update = torch.sign(betas[0] * momentum + (1 - betas[0]) * grad)
    momentum = betas[1] * momentum + (1 - betas[1]) * grad
    return param - lr * (update + weight_decay * param), momentum


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_steps_as_in_its_paper(maximize):
    params = parameters(torch.float64)
    optimizer = Lion(
        params, lr=0.01, betas=(0.75, 0.5), weight_decay=0.1, maximize=maximize
    )
    wanted = [(p.detach().clone(), torch.zeros_like(p)) for p in params]
    for grads in stream(STEPS, dtype=torch.float64):
        give(params, grads)
        optimizer.step()
        wanted = [
            lion_by_the_paper(p, m, -g if maximize else g, 0.01, (0.75, 0.5), 0.1)
            for (p, m), g in zip(wanted, grads, strict=True)
        ]
    assert distance(params, [p for p, _ in wanted]) <= TOLERANCE[torch.float64]


@namesakes
def test_an_optimizer_is_one_of_torch(kind):
    assert isinstance(kind(parameters()), NAMESAKES[kind])


@namesakes
def test_the_arguments_are_those_of_torch_and_three_more(kind):
    def arguments(of):
        found = inspect.signature(of.__init__).parameters.values()
        return [(p.name, p.kind, p.default) for p in found]

    ours, theirs = arguments(kind), arguments(NAMESAKES[kind])
    assert ours[: len(theirs)] == theirs
    more = [name for name, _, _ in ours[len(theirs) :]]
    assert more == ["write_back", "kernels", "check_data"]


def test_the_defaults_of_lion_are_those_of_its_paper():
    (group,) = Lion(parameters()).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (
        1e-4,
        (0.9, 0.99),
        0.0,
    )


@namesakes
def test_groups_have_the_keys_and_values_of_torch(kind):
    (ours,) = kind(parameters()).param_groups
    (theirs,) = NAMESAKES[kind](parameters()).param_groups
    assert {k: v for k, v in ours.items() if k != "params"} == {
        k: v for k, v in theirs.items() if k != "params"
    }


@cases
def test_the_state_has_the_keys_of_torch(kind, how):
    ours, theirs = parameters(), parameters()
    optimizer, fused = kind(ours, **how), NAMESAKES[kind](theirs, fused=True, **how)
    for params, each in ((ours, optimizer), (theirs, fused)):
        give(params, next(stream(1)))
        each.step()
    saved, wanted = optimizer.state_dict()["state"], fused.state_dict()["state"]
    assert {i: set(state) for i, state in saved.items()} == {
        # Torch writes a None where there is no momentum; 2.13 no longer does.
        i: {name for name, value in state.items() if value is not None}
        for i, state in wanted.items()
        if any(value is not None for value in state.values())
    }


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_parameters_step_as_in_torch(kind, dtype):
    def run(make):
        param = torch.nn.Parameter(torch.tensor([1 + 2j, -1j], dtype=dtype))
        optimizer = make([param], lr=0.01)
        for turn in range(20):
            param.grad = torch.tensor([turn - 3j, 2.0 + turn * 1j], dtype=dtype)
            optimizer.step()
        return torch.view_as_real(param.detach())

    real = torch.float32 if dtype is torch.complex64 else torch.float64
    assert distance([run(kind)], [run(NAMESAKES[kind])]) <= TOLERANCE[real] * 20 / STEPS


def test_a_lazily_conjugated_gradient_is_taken_as_it_reads():
    def run(grad):
        param = torch.nn.Parameter(torch.tensor([1 + 2j, -1j]))
        param.grad = grad
        SGD([param], lr=0.5).step()
        return param.tolist()

    grad = torch.tensor([1 - 1j, 2 + 3j])
    assert grad.conj().is_conj()
    assert run(grad.conj()) == run(grad.conj().resolve_conj())


@pytest.mark.parametrize("kind", [AdamW, SGD, Lion], ids=lambda kind: kind.__name__)
def test_strides_do_not_matter(kind):
    def run(lay):
        param = torch.nn.Parameter(lay(torch.arange(12.0).reshape(3, 4)))
        optimizer = kind([param], lr=0.25)
        for grads in stream(5, [(3, 4)]):
            param.grad = grads[0]
            optimizer.step()
        return param.detach().contiguous()

    def across(values: Tensor) -> Tensor:
        return values.t().contiguous().t()

    assert not across(torch.ones(3, 4)).is_contiguous()
    # On the CPU each has a pass of its own: equal to the roundings of five steps.
    torch.testing.assert_close(
        run(across), run(lambda values: values.clone()), rtol=5 * 2.0**-23, atol=0.0
    )


@pytest.mark.parametrize("kind", [AdamW, SGD, Lion], ids=lambda kind: kind.__name__)
def test_what_is_kept_lies_in_memory_like_its_parameter(kind):
    values = torch.ones(3, 4, dtype=torch.float16).t()
    param = torch.nn.Parameter(values)
    optimizer = kind([param], **({"momentum": 0.5} if kind is SGD else {}))
    param.grad = torch.ones(4, 3, dtype=torch.float16)
    optimizer.step()
    kept = [entry for entry in optimizer.state[param].values() if entry.dim() > 0]
    assert {entry.stride() for entry in kept} == {(1, 4)}
