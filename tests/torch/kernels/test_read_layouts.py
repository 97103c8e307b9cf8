"""What a read touches: every layout, nothing around, nothing written, no old table."""

import math

import pytest
import torch

from gradscale.torch.kernels.grad_reader import GradReader
from gradscale.torch.kernels.read import CHUNK
from tests.torch.kernels.passes import bits, read_by, values
from tests.torch.kernels.reads import (
    CLOSE,
    DTYPES,
    INF_BITS,
    INT,
    SIZES,
    assert_exact,
    dtypes,
    exact,
    stats_of,
)


def laid_out(device):
    """Return tensors of all layouts: some without gaps, some with."""
    flat = values((5000,), device)[0]
    image = values(((2, 3, 5, 7),), device)[0]
    return {
        "transposed": flat.view(50, 100).t(),
        "permuted": flat[:4896].view(17, 16, 18).permute(2, 0, 1),
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "every other column": flat.view(50, 100)[:, ::2],
        "every third": flat[1::3],
        "a window": flat.view(50, 100)[3:40, 7:33],
        "scalar": flat[17],
        "ones around": flat[:20].view(1, 20, 1),
        "misaligned": flat[1:4000],
        "misaligned window": flat[3:4903].view(70, 70)[::2, 1:],
    }


@dtypes
@pytest.mark.parametrize("which", laid_out(torch.device("cpu")))
def test_every_layout_is_read(device, dtype, which):
    of_dtype = laid_out(device)[which]
    if dtype is not torch.float32:
        room = torch.empty(6000, dtype=dtype, device=device)
        here = room.as_strided(
            of_dtype.shape, of_dtype.stride(), of_dtype.storage_offset()
        )
        of_dtype = here.copy_(of_dtype)
    assert_exact([of_dtype])


@dtypes
def test_what_lies_in_the_gaps_is_not_read(device, dtype):
    room = torch.full((4, 6), math.nan, dtype=dtype, device=device)
    window = room[1:3, 2:5]
    window.fill_(2.0)
    peaks, squares = stats_of([window, window.t()])
    assert peaks.tolist() == [2.0, 2.0]
    assert squares.tolist() == [24.0, 24.0]


@dtypes
@pytest.mark.parametrize("offset", range(1, 9))
def test_what_lies_around_a_misaligned_tensor_is_not_read(device, dtype, offset):
    room = torch.full((2 * CHUNK,), math.nan, dtype=dtype, device=device)
    inside = room[offset : offset + CHUNK + 3]
    inside.fill_(0.25)
    inside[-1] = -4.0
    peaks, squares = stats_of([inside])
    assert peaks.item() == 4.0
    assert squares.item() == pytest.approx((CHUNK + 2) / 16 + 16, rel=CLOSE)


@dtypes
def test_nothing_is_written(device, dtype):
    tensors = [t.to(dtype) for t in values(SIZES, device)]
    tensors[3].view(INT[dtype])[5] = INF_BITS[dtype] | 1
    room = torch.full((4, 6), math.nan, dtype=dtype, device=device)
    tensors.append(room[1:3, 2:5])
    before = [bits(t) for t in (*tensors, room)]
    versions = [t._version for t in tensors]
    stats_of(tensors)
    assert all(
        torch.equal(bits(t), old)
        for t, old in zip((*tensors, room), before, strict=True)
    )
    assert [t._version for t in tensors] == versions


@dtypes
def test_two_runs_give_the_same_bits(device, dtype):
    tensors = [t.to(dtype) for t in values(SIZES, device)]
    first = stats_of(tensors)
    second = stats_of(tensors)
    assert torch.equal(bits(first[0]), bits(second[0]))
    assert torch.equal(bits(first[1]), bits(second[1]))


def test_where_a_tensor_lies_does_not_change_a_bit(device):
    source = values((CHUNK + 100,), device)[0]
    room = torch.empty(CHUNK + 101, device=device)
    room[1:].copy_(source)
    assert [x.tolist() for x in stats_of([source])] == [
        x.tolist() for x in stats_of([room[1:]])
    ]


@dtypes
@pytest.mark.parametrize("norm_type", [None, 2.0, math.inf])
def test_kernels_read_f32_f16_and_bf16_with_these_norms(device, dtype, norm_type):
    assert GradReader("triton").reads((device, dtype), norm_type)


@pytest.mark.parametrize("norm_type", [1.0, 3.0])
def test_other_norms_are_left_to_plain_operations(device, norm_type):
    assert not GradReader("triton").reads((device, torch.float32), norm_type)


def test_f64_is_left_to_plain_operations(device):
    assert not GradReader("triton").reads((device, torch.float64), 2.0)


def test_one_reader_reads_kinds_in_turn(device):
    reader = GradReader("triton")
    for _ in range(2):
        for dtype in DTYPES:
            tensors = [t.to(dtype) for t in values((3, 70), device)]
            assert torch.equal(read_by(reader, tensors).peaks.cpu(), exact(tensors)[0])


def test_a_reader_sees_what_was_written_since(device):
    reader, tensor = GradReader("triton"), torch.ones(40, device=device)
    read_by(reader, [tensor])
    tensor[39] = -7.0
    assert read_by(reader, [tensor]).peaks.item() == 7.0


def test_a_reader_sees_tensors_that_moved_shrank_and_came(device):
    reader, room = GradReader("triton"), values((100,), device)[0]
    for tensors in (
        [room],
        [room[:50]],
        [room[:50].clone()],
        [room[:50], room[50:]],
        [room[50:], room[:50]],
        [room[:1]],
    ):
        stats = read_by(reader, tensors)
        assert torch.equal(stats.peaks.cpu(), exact(tensors)[0])
