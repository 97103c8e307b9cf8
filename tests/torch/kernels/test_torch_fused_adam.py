"""The kernel that stands in for torch's fused Adam and AdamW, against torch's own.

On a GPU the results are equal bit for bit. The interpreter is compared with torch's
kernel for the CPU, which rounds elsewhere.
"""

import math

import pytest
import torch

from gradscale.torch.kernels import fused_adam
from gradscale.torch.kernels.args import AdamConfig
from gradscale.torch.kernels.pointer_table import Table
from gradscale.torch.kernels.torch_fused_adam import StandIn
from tests.torch.kernels.stood_in import (
    ADAM,
    ADAMW,
    SIZES,
    SKIPPED,
    STEPS,
    all_of,
    assert_same,
    compared,
    optimizer_of,
    params_of,
    stepped,
    trained,
)

pytestmark = pytest.mark.usefixtures("few_are_many")

SETTINGS = {
    "defaults": {},
    "decay": {"weight_decay": 0.1},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "betas": {"betas": (0.5, 0.95)},
    "no momentum": {"betas": (0.0, 0.999)},
    "no squares": {"betas": (0.9, 0.0)},
    "eps": {"eps": 0.5},
    "lr 0": {"lr": 0.0},
    "all": {"amsgrad": True, "maximize": True, "weight_decay": 0.3, "eps": 1e-3},
}


@pytest.mark.parametrize("kind", [ADAM, ADAMW])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_gives_what_torch_gives(device, kind, settings):
    ours, torchs = compared(kind, device, **settings)
    assert ours.state_dict().keys() == torchs.state_dict().keys()


@pytest.mark.parametrize("scale", [None, 1.0, 3.0, 89784.32, 2.0**-24, 2.0**100])
def test_gradients_are_divided_as_torch_divides_them(device, scale):
    ours, _ = compared(ADAMW, device, scale)
    grad = params_of(ours)[1].grad
    stepped(ours, StandIn("triton"), scale=None)
    # The same gradients, as they came.
    assert torch.equal(grad, params_of(ours)[1].grad / by(scale, grad))


def by(scale, like):
    """Return what a gradient is divided by, as a tensor: torch inverts a number."""
    return torch.full_like(like, 1.0 if scale is None else scale)


def test_skipped_steps_are_not_counted(device):
    ours, _ = compared(ADAMW, device)
    counts = {ours.state[p]["step"].item() for p in params_of(ours)}
    assert counts == {float(STEPS - len(SKIPPED))}


def test_a_skip_leaves_every_bit_but_the_counts(device):
    optimizer, stand_in = optimizer_of(ADAMW, device, amsgrad=True), StandIn("triton")
    trained(optimizer, stand_in)
    before = {name: value.clone() for name, value in all_of(optimizer).items()}
    for param in params_of(optimizer):
        param.grad.fill_(math.nan)
    flag = torch.ones((), device=device)
    optimizer.grad_scale = torch.tensor(4.0, device=device)
    optimizer.found_inf = stand_in.flag(optimizer, flag)
    optimizer.step()
    for name, value in all_of(optimizer).items():
        if name.startswith("grad"):
            assert value.isnan().all()
        else:
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("where", ["device", "cpu"])
def test_a_learning_rate_in_a_tensor_is_read(device, where):
    place = device if where == "device" else torch.device("cpu")
    optimizers = []
    for stand_in in (None, StandIn("triton")):
        rate = torch.tensor(0.1, device=place)
        optimizer = optimizer_of(ADAMW, device, lr=rate, weight_decay=0.1)
        trained(optimizer, stand_in)
        rate.fill_(0.01)
        seen = trained(optimizer, stand_in)
        optimizers.append(optimizer)
    assert "_fused_adamw_" not in seen
    assert_same(*optimizers)


def test_groups_have_settings_and_tables_of_their_own(device):
    def made():
        optimizer = optimizer_of(ADAMW, device, sizes=(SIZES, (5,), (7, 8)))
        optimizer.param_groups[1] |= {"lr": 0.01, "betas": (0.8, 0.9)}
        optimizer.param_groups[2] |= {"weight_decay": 0.5, "maximize": True}
        return optimizer

    ours, torchs, stand_in = made(), made(), StandIn("triton")
    stepped(ours, stand_in)
    trained(torchs, None)
    assert_same(ours, torchs)
    assert len(stand_in._groups) == 3


def test_tensors_that_were_stepped_less_often_are_near_torchs(device):
    left_out = {(step, place) for step in (1, 2) for place in (0, 3)}
    # CUDA's powf is a millionth off where few steps were taken.
    ours, _ = compared(ADAMW, device, left_out=left_out, exact=False)
    counts = [ours.state[p]["step"].item() for p in params_of(ours)]
    assert counts == [2.0, 4.0, 4.0, 2.0]


def test_memory_that_is_not_aligned_is_stepped(device):
    def made():
        torch.manual_seed(0)
        memory = torch.randn(4000, device=device)
        params = [torch.nn.Parameter(memory[begin:end]) for begin, end in PIECES]
        return ADAMW(params, lr=0.1, fused=True)

    ours, torchs = made(), made()
    stepped(ours, StandIn("triton"))
    trained(torchs, None)
    assert_same(ours, torchs)


PIECES = [(1, 1026), (1026, 1027), (1030, 3500)]


def test_many_steps_lead_where_torch_leads(device):
    ours, torchs = (optimizer_of(ADAMW, device, sizes=((2000, 30),)) for _ in range(2))
    steps = 1000 if device.type == "cuda" else 30
    stepped(ours, StandIn("triton"), steps=steps)
    trained(torchs, None, steps=steps)
    assert_same(ours, torchs)


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_elements_beyond_two_to_the_31st_are_reached(device, found):
    # The last chunk of a tensor whose other elements do not exist.
    ahead = 2**31 + fused_adam.CHUNK
    ours = [torch.full((5,), value, device=device) for value in (1.0, 2.0, 0.5, 0.25)]
    theirs = [tensor.clone() for tensor in ours]
    step = torch.tensor(3.0, device=device)
    begins = [t.data_ptr() - ahead * t.element_size() for t in ours]
    rows = [ahead + 5, -(ahead // fused_adam.CHUNK), *begins, step.data_ptr()]
    cells = torch.tensor(rows, device=device)[:, None]
    owners = torch.zeros(1, dtype=torch.int32, device=device)
    how = AdamConfig(0.1, 0.9, 0.99, 1e-8, 0.1, decoupled=True, maximize=False)
    powers = torch.tensor([0.9, 0.99], device=device).pow(step)
    scale, flag = (torch.tensor(x, device=device) for x in (2.0, found))
    table = Table(cells, owners, 1, 1, 1)
    fused_adam.adam_(table, how, powers, scale, flag, amsgrad=False)
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    settings |= {"eps": 1e-8, "amsgrad": False, "maximize": False}
    lists = [[tensor] for tensor in theirs]
    torch._fused_adamw_(
        *lists, [], [step.clone()], **settings, grad_scale=scale, found_inf=flag
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=0.0)
    # Only the first chunk takes it back.
    assert step.item() == 3.0
