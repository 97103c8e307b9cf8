"""One launch from partial results to the decision, against a formula given here."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale.torch.kernels import decide as deciding
from gradscale.torch.kernels import interpreted
from gradscale.torch.kernels import plain as reference
from gradscale.torch.kernels import read as reading
from gradscale.torch.kernels.decide import BLOCK, gather_and_decide
from gradscale.torch.kernels.plain import Decision
from gradscale.torch.kernels.pointer_table import PointerTable, Table
from gradscale.torch.kernels.read import (
    CHUNK,
    PartialStats,
    aligned,
    read_chunks,
    tiling_of,
)
from gradscale.torch.tensor_list import addresses

INF, NAN = math.inf, math.nan
F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
SMALLEST_NORMAL = 2.0**-126
SCALES = [2.0**-24, 2.0**-3, 1.0, 2.0**16, 2.0**126, 0.3, 1000.0, 3e-7, 7e37]
MAX_NORMS = [None, 0.0, 1e-30, 1e-3, 1.0, 1e30, INF]


def partial_stats(device, peaks, squares):
    """Return the partial results of tensors of one chunk each."""
    count = len(peaks)
    places = torch.arange(count, device=device)
    cells = torch.stack((torch.ones_like(places), places))
    each = torch.full((2 * aligned(count) + 1,), -1, device=device)
    each[-1] = 0
    table = Table(cells, places.int(), count, count, 1)
    chunks = torch.cat((bits_of(squares, device), peak_bits_of(peaks, device)))
    tiling = tiling_of(table.tensors, table.chunks, table.most)
    return PartialStats(table, chunks, each, tiling)


def bits_of(squares, device):
    return torch.tensor(squares, dtype=torch.float64, device=device).view(torch.int64)


def peak_bits_of(peaks, device):
    return torch.tensor(peaks, dtype=F32, device=device).view(torch.int32).long()


def by_kernel(device, peaks, squares, scale, max_norm, dtype):
    partial = partial_stats(device, peaks, squares)
    return gather_and_decide(partial, dtype, scale, max_norm)[1]


def by_torch(device, peaks, squares, scale, max_norm, dtype):
    bits = peak_bits_of(peaks, device), bits_of(squares, device)
    return reference.decide(reference.TensorStats(dtype, *bits), scale, max_norm)


def decided(device, peaks, squares, scale, max_norm, dtype=F32, by=by_kernel):
    """Return the fields of a decision, f32[] each, on the host."""
    scale = torch.tensor(scale, device=device)
    made = by(device, peaks, squares, scale, max_norm, dtype)
    assert all(field.dtype is F32 and field.shape == () for field in made)
    return {name: value.cpu() for name, value in made._asdict().items()}


def formula(peaks, squares, scale, max_norm, dtype=F32):
    """Return the same from the definition of each field."""
    scale = torch.tensor(scale, dtype=F32)
    inverse = 1.0 / scale
    amax = torch.tensor(peaks, dtype=F32).amax()
    total = torch.tensor(squares, dtype=torch.float64).sum()
    norm = (total.sqrt() * inverse.double()).float()
    coef, norm_unusable = torch.tensor(1.0), torch.tensor(0.0)
    if max_norm is not None:
        coef = (torch.tensor(max_norm, dtype=F32) / (norm + 1e-6)).clamp(max=1.0)
        usable = coef * inverse >= SMALLEST_NORMAL
        if max_norm == 0.0:
            usable = norm.isfinite()
        norm_unusable = (~usable).float()
    multiplier = inverse * coef
    nonfinite = (~(amax * multiplier).to(dtype).isfinite()).float()
    skip = torch.maximum(nonfinite, norm_unusable)
    made = (nonfinite, norm_unusable, skip, amax, norm, coef, multiplier, scale / coef)
    return dict(zip(Decision._fields, made, strict=True))


def assert_as_formula(device, *case, dtype=F32):
    truth = formula(*case, dtype=dtype)
    for by in (by_kernel, by_torch):
        ours = decided(device, *case, dtype=dtype, by=by)
        for name in Decision._fields:
            # Flags and the peak are exact; the rest is within the roundings of a sum in
            # another order and of the coefficient that is made from it.
            exact = name in ("nonfinite", "norm_unusable", "skip", "amax")
            rtol = 0.0 if exact else 2.0**-22
            torch.testing.assert_close(
                ours[name], truth[name], rtol=rtol, atol=0.0, equal_nan=True, msg=name
            )


@pytest.mark.parametrize("max_norm", MAX_NORMS)
@pytest.mark.parametrize("scale", SCALES)
def test_every_field_equals_its_definition(device, scale, max_norm):
    assert_as_formula(device, [3.0, 0.5, 2.0], [20.0, 1.25, 17.0], scale, max_norm)


@pytest.mark.parametrize("max_norm", MAX_NORMS)
@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_a_peak_that_is_not_finite_is_found(device, bad, max_norm, dtype):
    case = ([3.0, bad, 2.0], [20.0, bad, 17.0], 1024.0, max_norm)
    assert_as_formula(device, *case, dtype=dtype)
    made = decided(device, *case, dtype=dtype)
    assert made["nonfinite"] == 1.0
    assert made["skip"] == 1.0


@pytest.mark.parametrize("max_norm", MAX_NORMS)
def test_gradients_that_are_all_zero_step(device, max_norm):
    case = ([0.0, 0.0], [0.0, 0.0], 1024.0, max_norm)
    assert_as_formula(device, *case)
    assert decided(device, *case)["skip"] == 0.0


@pytest.mark.parametrize("scale", [2.0**-24, 0.3, 1.0, 1000.0])
def test_a_norm_beyond_f32_skips_although_all_gradients_are_finite(device, scale):
    top = 3e38 * min(scale, 1.0)
    case = ([top], [4.0 * (3.4e38 * scale) ** 2], scale, 1.0)
    assert_as_formula(device, *case)
    made = decided(device, *case)
    assert (made["nonfinite"], made["norm_unusable"], made["skip"]) == (0.0, 1.0, 1.0)


def test_without_a_clip_a_norm_beyond_f32_does_not_skip(device):
    made = decided(device, [3e38], [1e78], 1.0, None)
    assert made["skip"] == 0.0
    assert made["norm"] == INF


def test_a_coefficient_that_leaves_no_normal_multiplier_skips(device):
    case = ([1.0], [1.0], 2.0**126, 0.5)
    # Unscaled, the norm is 2^-126: nothing is clipped, and 1 / scale is normal.
    assert decided(device, *case)["skip"] == 0.0
    case = ([1.0], [2.0**252], 2.0**126, 0.5)
    assert_as_formula(device, *case)
    made = decided(device, *case)
    assert (made["nonfinite"], made["norm_unusable"]) == (0.0, 1.0)


def test_a_max_norm_of_zero_steps_by_nothing(device):
    made = decided(device, [3.0], [9.0], 1024.0, 0.0)
    assert made["skip"] == made["coef"] == made["multiplier"] == 0.0
    assert made["grad_scale"] == INF


def test_a_max_norm_below_f32_skips_as_in_plain_operations(device):
    if interpreted():
        pytest.skip("Triton's interpreter does not round arguments to f32")
    # Not 0, and too small for a coefficient: nothing sound can be stepped by.
    made = decided(device, [3.0], [9.0], 1024.0, 1e-50)
    assert (made["norm_unusable"], made["skip"]) == (1.0, 1.0)


# The last f16 is 65504; 65520 lies between it and 2^16 and rounds up to infinity.
@pytest.mark.parametrize(
    ("peak", "scale", "nonfinite"),
    [
        (65504.0, 1.0, 0.0),
        (32752.0, 0.5, 0.0),
        (32759.0, 0.5, 0.0),
        (32760.0, 0.5, 1.0),
        (2047.5, 2.0**-5, 1.0),
        (2047.4, 2.0**-5, 0.0),
        (6550.4, 0.1, 0.0),
        (6552.1, 0.1, 1.0),
        (60000.0, 0.9, 1.0),
        (65504.0, 2.0, 0.0),
    ],
)
def test_f16_that_would_overflow_when_unscaled_is_found(device, peak, scale, nonfinite):
    case = ([1.0, peak], [1.0, peak * peak], scale, None)
    assert formula(*case, dtype=F16)["nonfinite"] == nonfinite
    assert_as_formula(device, *case, dtype=F16)
    # The same peak in f32 is no trouble.
    assert decided(device, *case)["nonfinite"] == 0.0


def test_a_clip_keeps_f16_in_range(device):
    case = ([60000.0], [60000.0**2], 0.5, 1.0)
    assert decided(device, *case, dtype=F16)["nonfinite"] == 0.0
    assert decided(device, *case[:3], None, dtype=F16)["nonfinite"] == 1.0


@pytest.mark.parametrize(
    ("dtype", "halves", "nonfinite"),
    [(BF16, 511, 1.0), (BF16, 510, 0.0), (F32, 511, 0.0)],
)
def test_bf16_rounds_up_to_infinity_from_half_a_step_on(
    device, dtype, halves, nonfinite
):
    if dtype is BF16 and interpreted():
        pytest.skip("Triton's interpreter cuts bf16 off where a GPU rounds")
    # In units of half the last step below 2^128, which is 2^119.
    peak = halves * 2.0**119 * 0.5
    made = decided(device, [peak], [1.0], 0.5, None, dtype=dtype)
    assert made["nonfinite"] == nonfinite


def test_f32_that_would_overflow_when_unscaled_is_found(device):
    assert decided(device, [2e38], [1.0], 0.5, None)["nonfinite"] == 1.0
    assert decided(device, [1.6e38], [1.0], 0.5, None)["nonfinite"] == 0.0


def test_an_overflow_in_the_division_by_grad_scale_is_found(device):
    # 1 / scale is rounded down, so the product stays finite where the quotient, which
    # optimizers step by, does not.
    scale, peak = 0.8270044922828674, 2.814150460882631e38
    made = decided(device, [peak], [1.0], scale, None)
    quotient = torch.tensor(peak) / made["grad_scale"]
    assert made["nonfinite"] == 1.0 or quotient.isfinite()


# Smaller blocks for most of them: the interpreter takes a second for some hundred.
@pytest.mark.parametrize(
    ("block", "count"),
    [(64, 1), (64, 63), (64, 64), (64, 65), (64, 197), (BLOCK, 1030)],
)
@pytest.mark.parametrize("bad", [0, -1])
def test_all_tensors_count_however_many(device, monkeypatch, block, count, bad):
    monkeypatch.setattr(deciding, "BLOCK", block)
    monkeypatch.setattr(deciding, "FEW", block)
    peaks, squares = [0.5] * count, [0.25] * count
    peaks[bad], squares[bad] = 7.0, 49.0
    made = decided(device, peaks, squares, 2.0, None)
    assert made["amax"] == 7.0
    assert made["norm"].item() == pytest.approx(
        math.sqrt(0.25 * (count - 1) + 49.0) / 2.0, rel=1e-6
    )
    peaks[bad] = NAN
    assert decided(device, peaks, squares, 2.0, None)["nonfinite"] == 1.0


def test_the_next_decision_has_memory_of_its_own(device):
    scale = torch.tensor(2.0, device=device)
    _, first = gather_and_decide(partial_stats(device, [1.0], [1.0]), F32, scale, None)
    gather_and_decide(partial_stats(device, [1.0], [1.0]), F32, scale * 2.0, None)
    assert first.multiplier.item() == 0.5


SOME = (3, 2 * CHUNK + 1, 5 * CHUNK, 1, CHUNK + 7)


def some_tensors(device, sizes=SOME):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator).to(device) for size in sizes]


def read(tensors):
    """Return the partial results that a kernel has read of some tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    table = PointerTable(tensors[0].device, CHUNK).of(sizes, [addresses(tensors)])
    return read_chunks(table, F32)


TILINGS = {
    "whole": (1024, 2048, (128, 8, 1)),
    "slices": (1, 2048, (1, 1, 4)),
    "slices of two": (2, 2048, (1, 2, 4)),
    "two programs for each": (1, 10, (1, 1, 2)),
    "one program for each": (1, 1, (1, 1, 1)),
    "two tensors at once": (16, 2048, (2, 8, 1)),
}


@pytest.fixture(params=TILINGS.values(), ids=TILINGS)
def tiling(request, monkeypatch):
    """Gather by so many partial results and programs; return the tiling."""
    partials, programs, wanted = request.param
    for name in ("PARTIALS", "OF_SMALL", "FEW_PARTIALS"):
        monkeypatch.setattr(reading, name, partials)
    monkeypatch.setattr(reading, "PROGRAMS", programs)
    monkeypatch.setattr(reading, "tiling_of", tiling_of.__wrapped__)
    return wanted


def test_large_tensors_are_gathered_in_slices_and_small_ones_together(device, tiling):
    assert read(some_tensors(device)).tiling == tiling


@pytest.mark.usefixtures("tiling")
@pytest.mark.parametrize("sizes", [SOME, SOME[:2], SOME[:1]], ids=len)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_the_statistics_of_each_tensor_come_with_the_decision(device, sizes, max_norm):
    scale = torch.tensor(8.0, device=device)
    tensors = some_tensors(device, sizes)
    truth = reference.read_tensors(tensors)
    stats, made = gather_and_decide(read(tensors), F32, scale, max_norm)
    assert torch.equal(stats.peaks, truth.peaks)
    torch.testing.assert_close(stats.squares, truth.squares, rtol=1e-6, atol=0.0)
    expected = reference.decide(truth, scale, max_norm)
    assert torch.stack(made).tolist() == pytest.approx(
        torch.stack(expected).tolist(), rel=1e-6
    )
    assert made.amax == expected.amax


@pytest.mark.usefixtures("tiling")
def test_fresh_memory_that_holds_anything_does_not_change_a_decision(
    device, monkeypatch
):
    scale, empty = torch.tensor(8.0, device=device), torch.empty
    tensors = some_tensors(device, SOME[:2])
    truth = reference.decide(reference.read_tensors(tensors), scale, 1.0)

    def poisoned(*shape, **how):
        made = empty(*shape, **how)
        return made.fill_(math.nan if made.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", poisoned)
    _, made = gather_and_decide(read(tensors), F32, scale, 1.0)
    assert torch.stack(made).tolist() == pytest.approx(
        torch.stack(truth).tolist(), rel=1e-6
    )


@pytest.mark.usefixtures("tiling")
def test_a_decision_can_be_replayed(device):
    tensors = some_tensors(device)
    partial, scale = read(tensors), torch.tensor(8.0, device=device)
    _, first = gather_and_decide(partial, F32, scale, 1.0)
    _, second = gather_and_decide(partial, F32, scale, 1.0)
    assert torch.equal(torch.stack(second), torch.stack(first))


@settings(deadline=None, max_examples=60)
@given(
    peaks=st.lists(st.floats(0.0, 2.0**100, width=32), min_size=1, max_size=5),
    scale=st.floats(2.0**-24, 2.0**126, width=32),
    max_norm=st.none() | st.floats(0.0, 2.0**100, width=32),
    dtype=st.sampled_from([F32, F16]),
)
def test_any_peaks_are_decided_on_by_the_formula(device, peaks, scale, max_norm, dtype):
    squares = [4.0 * peak * peak for peak in peaks]
    truth = formula(peaks, squares, scale, max_norm, dtype=dtype)
    made = decided(device, peaks, squares, scale, max_norm, dtype=dtype)
    # The flags hang on comparisons: near a border either answer may be given.
    product = (truth["coef"] / torch.tensor(scale)).item()
    near = math.isclose(product, SMALLEST_NORMAL, rel_tol=1e-6)
    unscaled = (truth["amax"] * truth["multiplier"]).double().item()
    border = {F16: 65520.0, F32: 2.0**128}[dtype]
    near |= math.isclose(unscaled, border, rel_tol=1e-6)
    near |= math.isclose(truth["norm"].double().item(), 2.0**128, rel_tol=1e-6)
    if not near:
        for name in ("nonfinite", "norm_unusable", "skip"):
            assert made[name] == truth[name], name
    assert made["amax"] == truth["amax"]
