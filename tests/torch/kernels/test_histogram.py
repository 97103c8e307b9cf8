"""Counting exponents: a kernel and plain operations that give the same integers."""

import math
import struct
from collections import Counter as Tally

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale.runfile.rows import BINS, LOWEST_EXPONENT
from gradscale.torch.kernels import histogram
from gradscale.torch.kernels import plain as reference
from gradscale.torch.kernels.histogram import CHUNK
from gradscale.torch.kernels.plain import (
    ABOVE,
    BELOW,
    FIRST,
    LOWEST,
    NONFINITE,
    OUTSIDE,
    SLOTS,
    ZEROS,
    tally_on_device,
    tally_on_host,
)
from gradscale.torch.kernels.pointer_table import Table
from gradscale.torch.underflow.exponent_counter import Counter
from tests.torch.kernels.passes import bits, values
from tests.torch.kernels.reads import DTYPES, INF_BITS, INT, SIZES, dtypes

ALL_DTYPES = [*DTYPES, torch.float64]


def slot_of(number):
    """Return the slot of a float, by arithmetic on its value."""
    if not math.isfinite(number):
        return NONFINITE
    if number == 0.0:
        return ZEROS
    exponent = math.frexp(number)[1] - 1
    if exponent < LOWEST:
        return BELOW
    return ABOVE if exponent > 15 else FIRST + exponent - LOWEST


def by_hand(tensor):
    """Return the row of counts of a small tensor."""
    # To f64 by Python: torch may not keep subnormal bf16 on every path.
    tally = Tally(map(slot_of, tensor.reshape(-1).tolist()))
    return [tally[slot] for slot in range(SLOTS)]


def by_kernel(tensors, counter=None):
    counter = Counter("triton") if counter is None else counter
    kind = tensors[0].device, tensors[0].dtype
    return counter.count(tensors, kind).cpu()


def plain(tensors):
    return reference.count_tensors([t.cpu() for t in tensors])


def spread(sizes, device, dtype, seed=1):
    """Return tensors whose magnitudes are all over the range, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        exponents = torch.randint(-60, 24, (size,), generator=generator).double()
        mantissa = 1.0 + torch.rand(size, generator=generator).double()
        tensor = torch.ldexp(mantissa, exponents)
        tensor[torch.rand(size, generator=generator) < 0.1] = 0.0
        made.append((-tensor).to(dtype).to(device))
    return made


def test_the_slots_hold_the_bins_of_a_run_file_and_octaves_below():
    assert LOWEST < LOWEST_EXPONENT
    bins = range(FIRST, ABOVE)
    assert LOWEST + len(bins) == LOWEST_EXPONENT + BINS
    assert {ZEROS, BELOW, *bins, ABOVE, NONFINITE, OUTSIDE} == set(range(SLOTS))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_plain_operations_count_what_counting_by_hand_does(dtype):
    (tensor,) = spread((3000,), torch.device("cpu"), dtype)
    tensor[:3] = torch.tensor([math.inf, -math.inf, math.nan])
    assert plain([tensor])[0].tolist() == by_hand(tensor)


@pytest.mark.parametrize("exponent", [*range(-50, 20), -126, -149, 127])
def test_a_power_of_two_begins_its_bin(device, exponent):
    power = 2.0**exponent
    under = math.nextafter(power, 0.0)
    tensor = torch.tensor([power, -power, under], dtype=torch.float64)
    assert plain([tensor])[0].tolist() == by_hand(tensor)
    single = torch.tensor([power, -power], device=device)
    rows = by_kernel([single, torch.nextafter(single, torch.zeros_like(single))])
    assert rows[0].tolist() == by_hand(single)
    assert rows[1].tolist() == by_hand(torch.nextafter(single, single * 0.0).cpu())


@dtypes
def test_a_kernel_counts_as_plain_operations_do_in_all_sizes(device, dtype):
    tensors = spread(SIZES, device, dtype)
    assert torch.equal(by_kernel(tensors), plain(tensors))


@dtypes
def test_plain_operations_on_a_device_count_as_those_on_the_host(device, dtype):
    tensors = spread(SIZES, device, dtype)
    assert torch.equal(reference.count_tensors(tensors).cpu(), plain(tensors))


def test_both_ways_to_tally_give_the_same_integers(device):
    slots = torch.randint(0, NONFINITE, (5000,), dtype=torch.int32, device=device)
    ours = tally_on_device(slots)
    assert ours.dtype is torch.int64
    assert ours.shape == (SLOTS,)
    assert torch.equal(ours.cpu(), tally_on_host(slots.cpu()))


def test_pieces_of_a_large_tensor_are_added_up(monkeypatch):
    tensors = spread((1000, 2, 3, 2, 7, 8, 1), torch.device("cpu"), torch.float32)
    monkeypatch.setattr(reference, "PIECE", 7)
    assert plain(tensors).tolist() == [by_hand(tensor) for tensor in tensors]


def test_hundreds_of_tensors_are_counted(device, monkeypatch):
    count = 1000
    if device.type == "cpu":
        # The interpreter takes its time for every element of a chunk.
        monkeypatch.setattr(histogram, "CHUNK", 16)
        count = 300
    tensors = spread([1 + i % 37 for i in range(count)], device, torch.float32)
    assert torch.equal(by_kernel(tensors), plain(tensors))


@st.composite
def patterns(draw):
    """Return a dtype and bit patterns of it: any value at all."""
    dtype = draw(st.sampled_from(DTYPES))
    form, width = ("<i", 4) if dtype is torch.float32 else ("<h", 2)
    piece = st.binary(min_size=width, max_size=width)
    raw = draw(st.lists(piece, min_size=1, max_size=40))
    return dtype, [struct.unpack(form, each)[0] for each in raw]


@settings(deadline=None, max_examples=60)
@given(case=patterns())
def test_any_bit_patterns_are_counted_as_their_values(device, case):
    dtype, numbers = case
    tensor = torch.tensor(numbers, dtype=INT[dtype]).view(dtype)
    expected = by_hand(tensor)
    assert by_kernel([tensor.to(device)])[0].tolist() == expected
    assert plain([tensor])[0].tolist() == expected


@dtypes
@pytest.mark.parametrize("sign", [0, 1])
def test_every_nan_and_infinity_is_not_finite(device, dtype, sign):
    inf = INF_BITS[dtype]
    low = 2 ** (torch.finfo(dtype).bits - 1) if sign else 0
    patterns = [inf - low, inf + 1 - low, inf + (inf & -inf) - 1 - low]
    tensor = torch.tensor(patterns, dtype=INT[dtype]).view(dtype).to(device)
    row = by_kernel([tensor])[0]
    assert row[NONFINITE] == row.sum() == 3


def test_every_subnormal_bf16_is_below_the_bins(device):
    patterns = torch.arange(1, 128, dtype=torch.int16)
    row = by_kernel([patterns.view(torch.bfloat16).to(device)])[0]
    assert row[BELOW] == row.sum() == 127


@dtypes
def test_zeros_of_either_sign_are_zeros(device, dtype):
    tensor = torch.zeros(9, dtype=dtype, device=device)
    rows = by_kernel([tensor, -tensor])
    assert rows[:, ZEROS].tolist() == rows.sum(1).tolist() == [9, 9]


@dtypes
@pytest.mark.parametrize("offset", range(1, 9))
def test_what_lies_around_a_misaligned_tensor_is_not_counted(device, dtype, offset):
    room = torch.full((2 * CHUNK,), math.nan, dtype=dtype, device=device)
    inside = room[offset : offset + CHUNK + 3]
    inside.fill_(0.25)
    inside[-1] = -4.0
    row = by_kernel([inside])[0]
    assert row[FIRST + (-2 - LOWEST)] == CHUNK + 2
    assert row[FIRST + (2 - LOWEST)] == 1
    assert row.sum() == CHUNK + 3


@dtypes
def test_gaps_are_not_counted_and_the_order_does_not_matter(device, dtype):
    room = torch.full((4, 6), math.nan, dtype=dtype, device=device)
    window = room[1:3, 2:5]
    window.copy_(torch.tensor([[0.0, 1.0, 2.0], [1.0, 4.0, 1.0]]))
    rows = by_kernel([window, window.t(), window.contiguous().t()])
    expected = by_hand(window.cpu())
    assert rows.tolist() == [expected] * 3


def test_an_expanded_tensor_is_counted_as_often_as_it_is_expanded(device):
    tensor = torch.full((1,), 2.0, device=device).expand(5)
    assert by_kernel([tensor])[0].sum() == 5


@dtypes
def test_nothing_is_written(device, dtype):
    tensors = spread(SIZES, device, dtype)
    before, versions = [bits(t) for t in tensors], [t._version for t in tensors]
    by_kernel(tensors)
    assert all(map(torch.equal, map(bits, tensors), before))
    assert [t._version for t in tensors] == versions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_elements_beyond_two_to_the_31st_are_reached(device, dtype):
    # The last chunk of a tensor of 2^32 + 5 elements, the rest of which is not there.
    tensor = torch.tensor([0.0, 1.0, 1.0, 8.0, math.inf], dtype=dtype, device=device)
    ahead = 2**32
    begin = tensor.data_ptr() - ahead * tensor.element_size()
    cells = torch.tensor([[ahead + 5], [-(ahead // CHUNK)], [begin]], device=device)
    owners = torch.zeros(1, dtype=torch.int32, device=device)
    counts = histogram.count_tensors(Table(cells, owners, 1, 1, 1), dtype)
    assert counts[0].tolist() == by_hand(tensor.cpu())


def test_counts_beyond_two_to_the_31st_are_held(device, monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(
        torch, "zeros", lambda *shape, **how: zeros(*shape, **how).fill_(2**33)
    )
    row = by_kernel([torch.ones(7, device=device)])[0]
    assert row[FIRST - LOWEST] == 2**33 + 7


def test_one_counter_counts_kinds_in_turn_and_sees_what_was_written(device):
    counter = Counter("triton")
    for dtype in DTYPES:
        tensor = torch.ones(40, dtype=dtype, device=device)
        assert by_kernel([tensor], counter)[0, FIRST - LOWEST] == 40
        tensor[3:] = 0.0
        assert by_kernel([tensor], counter)[0, ZEROS] == 37


def test_f64_is_counted_by_plain_operations(device, monkeypatch):
    monkeypatch.setattr(histogram, "count_tensors", None)
    tensor = torch.full((3,), 2.0**-1000, dtype=torch.float64, device=device)
    assert by_kernel([tensor])[0, BELOW] == 3


def test_a_kernel_that_was_asked_for_and_fails_is_an_error(device, monkeypatch):
    def broken(*args, **constants):
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(histogram, "_count", broken)
    with pytest.raises(RuntimeError, match="no ptxas"):
        by_kernel(values((3,), device))


def test_one_launch_counts_in_all_tensors_of_a_kind(device, monkeypatch):
    launches = []
    launch = histogram._count

    def counted(*args, **constants):
        launches.append(args[0])
        launch(*args, **constants)

    monkeypatch.setattr(histogram, "_count", counted)
    by_kernel(values((3, CHUNK, CHUNK + 1), device))
    # A program for each chunk: every element is read by one of them.
    assert launches == [4]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 4 GiB of a GPU")
def test_a_tensor_of_more_than_two_to_the_31st_elements_is_counted(device):
    tensor = torch.zeros(2**31 + 5, dtype=torch.float16, device=device)
    tensor[-3:] = 2.0
    row = by_kernel([tensor])[0]
    assert row[ZEROS] == 2**31 + 2
    assert row[FIRST + 1 - LOWEST] == 3
