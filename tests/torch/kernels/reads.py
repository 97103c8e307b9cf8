"""Statistics of tensors for the tests of the read: by kernels, and in f64."""

import pytest
import torch

from gradscale.torch.kernels import plain as reference
from gradscale.torch.kernels.grad_reader import GradReader
from gradscale.torch.kernels.read import CHUNK
from tests.torch.kernels.passes import read_by

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Around a chunk, and what is left of a vector of 16 bytes.
SIZES = (1, 5, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)
# Partial sums of 8192 squares in f32, the rest in f64.
CLOSE = 1e-6
INT = {torch.float32: torch.int32, torch.float16: torch.int16}
INT[torch.bfloat16] = torch.int16
# Infinity, and a NaN with the highest payload, of either sign.
INF_BITS = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}


def stats_of(tensors):
    """Return (peaks, squares) of tensors that are not empty, on the host."""
    stats = read_by(GradReader("triton"), tensors)
    return stats.peaks.cpu(), stats.squares.cpu()


def exact(tensors):
    """Return the same by plain operations in f64."""
    stats = reference.read_tensors([t.detach().cpu() for t in tensors])
    return stats.peaks, stats.squares


def assert_exact(tensors):
    peaks, squares = stats_of(tensors)
    true_peaks, true_squares = exact(tensors)
    assert torch.equal(peaks, true_peaks)
    torch.testing.assert_close(squares, true_squares, rtol=CLOSE, atol=0.0)
