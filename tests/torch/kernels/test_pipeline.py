"""Whole steps with kernels, against the same steps by plain operations."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale.torch import GradScaler, optim
from gradscale.torch.kernels.read import CHUNK
from gradscale.torch.step import optimizer_step
from tests.torch.kernels.passes import bits, values

INF, NAN = math.inf, math.nan
F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
OWN = {
    "AdamW": lambda p, k: optim.AdamW(p, lr=0.01, kernels=k),
    "amsgrad": lambda p, k: optim.Adam(p, lr=0.01, amsgrad=True, kernels=k),
    "SGD": lambda p, k: optim.SGD(
        p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1, kernels=k
    ),
    "dampened": lambda p, k: optim.SGD(
        p, lr=0.01, momentum=0.9, dampening=0.5, kernels=k
    ),
    "Lion": lambda p, k: optim.Lion(p, lr=0.01, kernels=k),
    "write_back": lambda p, k: optim.AdamW(p, lr=0.01, write_back=True, kernels=k),
}
OF_TORCH = {
    "fused": lambda p, k: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p, k: torch.optim.AdamW(p, 0.01, eps=1e-4, foreach=True),
    "loop": lambda p, k: torch.optim.SGD(p, lr=0.01, foreach=False),
}
MAKES = OWN | OF_TORCH
makes = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
BAD_STEPS = (2, 3, 7)


def model_on(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)
    ).to(device)


def train(make, kernels, device, max_norm, steps=9):
    """Return what every step showed, and the weights."""
    model = model_on(device)
    optimizer = make(model.parameters(), kernels)
    scaler = GradScaler(
        device.type, 1024.0, growth_interval=3, kernels=kernels, model=model
    )
    rows = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        x = torch.randn(8, 6).to(device)
        if step in BAD_STEPS:
            x[0, 0] = INF
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if max_norm is not None:
            scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
        scaler.update()
        last = scaler.last
        facts = (scaler.get_scale(), last.scale, last.applied, last.verdict)
        # As text: NaN equals NaN.
        rows.append((*facts, last.culprits, f"{last.amax:.5g}"))
    counts = int(scaler.applied_steps), int(scaler.skipped_steps)
    return rows, counts, [p.detach() for p in model.parameters()]


@makes
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_kernels_give_the_same_run(device, make, max_norm):
    ours = train(make, "triton", device, max_norm)
    theirs = train(make, "plain", device, max_norm)
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1] == (6, 3)
    for mine, other in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@makes
def test_the_path_says_that_kernels_are_taken(device, make):
    model = model_on(device)
    scaler = GradScaler(device.type, kernels="triton")
    assert scaler.path(make(model.parameters(), "triton")).kernels == "triton"


@cache
def expected_run(make, kernels, device):
    """Return the same run with f32 as default dtype."""
    assert torch.get_default_dtype() is F32
    return planted_run(make, kernels, device)


def planted_run(make, kernels, device):
    """Return all that a short run in f32 shows, with an overflow in it."""
    param = torch.nn.Parameter(torch.ones(5, dtype=F32, device=device))
    optimizer = make([param], kernels)
    scaler = GradScaler(device.type, 8.0, growth_interval=2, kernels=kernels)
    seen = []
    for size in (1.0, INF, 0.3, 0.7, 1e-3):
        scaler.scale(torch.full((), 0.1, dtype=F32, device=device))
        param.grad = torch.full((5,), size, dtype=F32, device=device)
        norm = scaler.clip_grad_norm_(optimizer, 0.05)
        scaler.step(optimizer)
        scaler.update()
        seen.append((norm.dtype, str(scaler.last.record), scaler.get_scale()))
    return seen, param.tolist(), int(scaler.applied_steps)


def assert_unchanged_by(dtype, make, kernels, device):
    expected, before = expected_run(make, kernels, device), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert planted_run(make, kernels, device) == expected
    finally:
        torch.set_default_dtype(before)


@makes
@pytest.mark.parametrize("kernels", ["triton", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, BF16], ids=str)
def test_another_default_dtype_changes_nothing(device, make, kernels, dtype):
    assert_unchanged_by(dtype, make, kernels, device)


@pytest.mark.parametrize("make", ["AdamW", "fused", "foreach"])
@pytest.mark.parametrize("kernels", ["triton", "plain"])
def test_f16_as_default_dtype_changes_nothing(device, make, kernels):
    # Its range is smaller than that of BF16; its precision is higher.
    assert_unchanged_by(F16, MAKES[make], kernels, device)


@pytest.mark.parametrize("kernels", ["triton", "plain"])
def test_memory_that_is_exchanged_between_clip_and_step_is_taken(device, kernels):
    param = torch.nn.Parameter(torch.zeros(1000, device=device))
    optimizer = optim.SGD([param], lr=1.0, kernels=kernels)
    scaler = GradScaler(device.type, 4.0, kernels=kernels)
    for step in range(3):
        param.grad = torch.full((1000,), 4.0, device=device)
        scaler.scale(torch.ones((), device=device))
        scaler.clip_grad_norm_(optimizer, 1e9)
        if step == 2:
            param.grad.data = param.grad.data * 0.5
            others = [torch.full((1000,), 777.0, device=device) for _ in range(5)]
        scaler.step(optimizer)
        scaler.update()
    assert param.unique().tolist() == [-2.5]
    assert len(others) == 5


@pytest.mark.usefixtures("few_are_many")
@makes
@pytest.mark.parametrize("kernels", ["triton", "plain"])
def test_a_gradient_that_is_negated_on_reading_is_taken_as_it_reads(
    device, make, kernels
):
    def run(negate):
        params = [torch.nn.Parameter(torch.ones(5, device=device)) for _ in range(2)]
        optimizer = make(params, kernels)
        scaler = GradScaler(device.type, 8.0, kernels=kernels)
        for size in (1.0, -3.0, 0.5):
            scaler.scale(torch.ones((), device=device))
            for param in params:
                param.grad = negate(torch.full((5,), size, device=device))
            scaler.step(optimizer)
            scaler.update()
        return [param.tolist() for param in params]

    assert run(torch._neg_view) == run(torch.neg)


def mixed(device):
    """Return parameters and gradients of all dtypes and layouts."""
    a, b, c, d, e = values(((CHUNK + 7,), (33,), (5, 7), (6, 4), (40,)), device)
    room = torch.full((41,), NAN, device=device)
    gaps = torch.full((5, 14), NAN, device=device, dtype=BF16)[:, ::2]
    return {
        "whole": (torch.zeros_like(a), a),
        "f16": (torch.zeros_like(b, dtype=F16), b.half()),
        "gaps": (torch.zeros_like(c, dtype=BF16), gaps.copy_(c)),
        "turned": (torch.zeros_like(d), d.t().contiguous().t()),
        "odd": (torch.zeros_like(e), room[1:].copy_(e)),
        "empty": (torch.zeros(0, device=device), torch.zeros(0, device=device)),
    }


def given_grads(device, scaler, make, kernels):
    """Return an optimizer whose parameters have gradients of all kinds."""
    pairs = mixed(device)
    if refused(device, make):
        pairs = {name: pair for name, pair in pairs.items() if name not in OTHER_ORDER}
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(p) for name, (p, _) in pairs.items()}
    )
    scaler._model = model
    scaler.scale(torch.ones((), device=device))
    for name, (_, grad) in pairs.items():
        model[name].grad = grad
    return model, make(list(model.values()), kernels)


OTHER_ORDER = ("gaps", "turned")


def refused(device, make):
    """Return whether torch refuses gradients in another order than the parameter's."""
    return device.type == "cuda" and make is OF_TORCH["fused"]


PLACES = {
    "whole": (0, CHUNK - 1, CHUNK, CHUNK + 6),
    "f16": (0, 32),
    "gaps": ((0, 0), (4, 6)),
    "turned": ((0, 0), (5, 3)),
    "odd": (0, 39),
}
SPOTS = [(name, place) for name, places in PLACES.items() for place in places]
# Each place with each optimizer; each bad value at each place and with each optimizer.
BAD_ELEMENTS = [
    (name, place, (INF, -INF, NAN)[(i + j) % 3], make)
    for i, (name, place) in enumerate(SPOTS)
    for j, make in enumerate(("AdamW", "Lion", "fused", "foreach"))
]


@pytest.mark.parametrize(("name", "place", "bad", "make"), BAD_ELEMENTS, ids=str)
def test_one_bad_element_anywhere_skips_and_is_named(device, name, place, bad, make):
    if refused(device, MAKES[make]) and name in OTHER_ORDER:
        pytest.skip("PyTorch's fused kernels refuse such a gradient on CUDA")
    scaler = GradScaler(device.type, 4.0, kernels="triton", allow_fp16=True)
    model, optimizer = given_grads(device, scaler, MAKES[make], "triton")
    model[name].grad[place] = bad
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last.applied
    assert scaler.last.culprits == (name,)
    assert scaler.get_scale() == 2.0
    assert all(not param.any() for param in model.values())


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("make", ["AdamW", "foreach"])
def test_with_a_clip_too_only_the_bad_one_is_named(device, bad, make):
    scaler = GradScaler(device.type, 4.0, kernels="triton", allow_fp16=True)
    model, optimizer = given_grads(device, scaler, MAKES[make], "triton")
    model["odd"].grad[39] = bad
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last.applied
    assert scaler.last.culprits == ("odd",)


@pytest.mark.parametrize("max_norm", [None, 1.0, INF])
@pytest.mark.parametrize("norm_type", [2.0, INF, 1.0])
def test_a_mix_of_kinds_gives_the_same_norm_and_step(device, max_norm, norm_type):
    ends = []
    for kernels in ("triton", "plain"):
        scaler = GradScaler(device.type, 4.0, kernels=kernels, allow_fp16=True)
        model, optimizer = given_grads(device, scaler, OWN["SGD"], kernels)
        norm = 0.0
        if max_norm is not None:
            norm = scaler.clip_grad_norm_(optimizer, max_norm, norm_type).item()
        scaler.step(optimizer)
        scaler.update()
        weights = {name: p.detach().float() for name, p in model.items()}
        ends.append((norm, scaler.last.amax, scaler.last.applied, weights))
    ours, theirs = ends
    assert ours[1:3] == theirs[1:3]
    assert ours[2] is True
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    for name, weights in ours[3].items():
        step = {"f16": 2.0**-10, "gaps": 2.0**-7}.get(name, 1e-5)
        torch.testing.assert_close(weights, theirs[3][name], rtol=step, atol=1e-8)


def test_own_optimizers_leave_the_gradients_as_they_came(device):
    scaler = GradScaler(device.type, 4.0, kernels="triton")
    model, optimizer = given_grads(device, scaler, OWN["AdamW"], "triton")
    before = {name: bits(p.grad) for name, p in model.items()}
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.applied
    assert all(torch.equal(bits(p.grad), before[name]) for name, p in model.items())


def test_a_read_does_not_write(device):
    scaler = GradScaler(device.type, 4.0, kernels="triton")
    model, optimizer = given_grads(device, scaler, OWN["AdamW"], "triton")
    before = {name: bits(p.grad) for name, p in model.items()}
    versions = {name: p.grad._version for name, p in model.items()}
    scaler.clip_grad_norm_(optimizer, 0.5)
    assert all(torch.equal(bits(p.grad), before[name]) for name, p in model.items())
    assert {name: p.grad._version for name, p in model.items()} == versions


@pytest.mark.parametrize("kernels", ["triton", "plain"])
@pytest.mark.parametrize("make", ["SGD", "fused", "foreach"])
def test_what_overflows_in_the_optimizers_division_never_reaches_a_weight(
    device, kernels, make
):
    # 1 / scale is rounded down: times it the gradient is finite, divided by the scale
    # it is not.
    scaler = GradScaler(device.type, 0.8270044922828674, kernels=kernels)
    param = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = MAKES[make]([param], kernels)
    scaler.scale(torch.ones((), device=device))
    param.grad = torch.full_like(param, 2.814150460882631e38)
    scaler.step(optimizer)
    scaler.update()
    assert param.isfinite().all()


def test_unscale_between_clip_and_step_is_the_same_with_kernels(device):
    ends = []
    for kernels in ("triton", "plain"):
        scaler = GradScaler(device.type, 4.0, kernels=kernels)
        param = torch.nn.Parameter(torch.zeros(40, device=device))
        optimizer = OWN["SGD"]([param], kernels)
        scaler.scale(torch.ones((), device=device))
        param.grad = values((40,), device)[0]
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
        ends.append((param.grad.clone(), param.detach().clone(), scaler.last.applied))
    torch.testing.assert_close(ends[0][:2], ends[1][:2], rtol=1e-6, atol=0.0)
    assert ends[0][2] is ends[1][2] is True


@pytest.mark.parametrize("make", ["SGD", "fused", "foreach"])
@pytest.mark.parametrize("size", [1.0, INF])
def test_unscale_reads_and_writes_the_gradients_in_one_pass(
    device, monkeypatch, make, size
):
    def no_pass(*given):
        raise AssertionError("a second pass")

    monkeypatch.setattr(optimizer_step, "multiply_", no_pass)
    scaler = GradScaler(device.type, 4.0, kernels="triton")
    param = torch.nn.Parameter(torch.zeros(40, device=device))
    optimizer = MAKES[make]([param], "triton")
    scaler.scale(torch.ones((), device=device))
    param.grad = torch.full_like(param, size)
    version = param.grad._version
    scaler.unscale_(optimizer)
    assert param.grad.eq(size / 4.0).all()
    # As after any write in place.
    assert param.grad._version > version
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.applied is (size == 1.0)
    assert scaler.last.amax == size
    assert param.eq(0.0).all() == (size == INF)


def test_a_gradient_of_two_optimizers_is_unscaled_once_with_kernels(device):
    scaler = GradScaler(device.type, 4.0, kernels="triton")
    shared, own = (torch.nn.Parameter(torch.zeros(9, device=device)) for _ in range(2))
    first = OWN["SGD"]([shared], "triton")
    second = OWN["SGD"]([own, shared], "triton")
    scaler.scale(torch.ones((), device=device))
    shared.grad, own.grad = torch.ones_like(shared), torch.ones_like(own)
    scaler.unscale_(first)
    scaler.unscale_(second)
    assert shared.grad.eq(0.25).all()
    assert own.grad.eq(0.25).all()


def test_a_gradient_written_after_the_clip_is_read_again(device):
    scaler = GradScaler(device.type, 4.0, kernels="triton")
    param = torch.nn.Parameter(torch.zeros(40, device=device))
    optimizer = OWN["AdamW"]([param], "triton")
    scaler.scale(torch.ones((), device=device))
    param.grad = torch.ones_like(param)
    scaler.clip_grad_norm_(optimizer, 1.0)
    param.grad[39] = NAN
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last.applied
    assert not param.any()


@settings(deadline=None, max_examples=25)
@given(
    exponent=st.integers(-24, 40),
    grads=st.lists(
        st.floats(width=32, min_value=-(2.0**80), max_value=2.0**80),
        min_size=1,
        max_size=9,
    ),
    max_norm=st.none() | st.floats(0.0, 2.0**60, width=32),
)
def test_any_gradients_step_or_skip_as_by_plain_operations(
    device, exponent, grads, max_norm
):
    ends = []
    for kernels in ("triton", "plain"):
        scaler = GradScaler(device.type, 2.0**exponent, kernels=kernels)
        param = torch.nn.Parameter(torch.zeros(len(grads), device=device))
        optimizer = optim.SGD([param], lr=0.5, kernels=kernels)
        scaler.scale(torch.ones((), device=device))
        param.grad = torch.tensor(grads, device=device)
        if max_norm is not None:
            scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
        scaler.update()
        ends.append((param.detach(), scaler.last.applied, scaler.get_scale()))
    assert ends[0][1:] == ends[1][1:]
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-6, atol=0.0)
