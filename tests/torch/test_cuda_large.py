"""Tensors of more than 2^31 elements, which only a device has the time for."""

import math

import pytest
import torch

from gradscale.torch import optim
from gradscale.torch.kernels.grad_reader import GradReader
from tests.torch.kernels.passes import read_by

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


def free_bytes():
    return torch.cuda.mem_get_info()[0]


def test_more_than_2_to_the_31_elements_are_read():
    size = 2**31 + 5
    if free_bytes() < 6e9:
        pytest.skip("needs 6 GB of device memory")
    tensor = torch.zeros(size, dtype=torch.float16, device="cuda")
    reader = GradReader("triton")
    tensor[2**31 + 1] = -3.0
    stats = read_by(reader, [tensor])
    assert (stats.peaks.item(), stats.squares.item()) == (3.0, 9.0)
    tensor[2**31 + 2] = -math.inf
    assert read_by(reader, [tensor]).peaks.item() == math.inf
    tensor[-1] = math.nan
    assert read_by(reader, [tensor]).peaks.isnan().item()
    tensor[2**31 + 1 :] = 0.0
    tensor[0] = 2.0
    assert read_by(reader, [tensor]).peaks.item() == 2.0


def test_more_than_2_to_the_31_elements_are_stepped():
    size = 2**31 + 5
    if free_bytes() < 20e9:
        pytest.skip("needs 20 GB of device memory")
    param = torch.nn.Parameter(torch.zeros(size, device="cuda"))
    param.grad = torch.zeros_like(param)
    places = [0, 1023, 1024, 2**31 - 1, 2**31, size - 1]
    for i, place in enumerate(places):
        param.grad[place] = -(i + 1.0)
    optim.SGD([param], lr=1.0, kernels="triton").step()
    assert [param[place].item() for place in places] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert param.count_nonzero().item() == len(places)
