"""The licence of the kernel that notes a loss: it does what plain operations do."""

import pytest
import torch

from gradscale.torch import GradScaler
from gradscale.torch.device_state import loss_stats as losses
from gradscale.torch.device_state.layout import new_ledger
from gradscale.torch.kernels import noting
from tests.torch.training import INF, NAN, planted

LOSSES = [0.0, -0.0, 1.5, -(2.0**-24), 60000.0, INF, -INF, NAN]


def shown(ledger):
    """Return all that a loss may change, as text, in which NaN equals NaN."""
    return repr((ledger.kept.tolist(), ledger.used_scale.item(), ledger.loss.item()))


@pytest.mark.parametrize("dtype", noting.DTYPES, ids=str)
@pytest.mark.parametrize("value", LOSSES)
def test_the_kernel_writes_what_plain_operations_write(device, dtype, value):
    by_kernel, by_torch = (new_ledger(device, 8.0) for _ in range(2))
    scale = torch.tensor(2.0**20, device=device)
    for count, loss in enumerate((0.1, value, 1e-3)):
        output = torch.tensor(loss, device=device).to(dtype).requires_grad_()
        noting.launch_(output, scale, by_kernel, first=count == 0)
        losses.note_plainly_(output, scale, by_torch, first=count == 0)
        assert shown(by_kernel) == shown(by_torch)


@pytest.mark.parametrize("first", [True, False])
def test_the_first_loss_replaces_whatever_was_there(device, first):
    ledger = new_ledger(device, 8.0)
    ledger.loss.fill_(NAN)
    noting.launch_(torch.tensor(2.0, device=device), ledger.one, ledger, first)
    assert repr(ledger.loss.item()) == ("2.0" if first else "nan")
    assert ledger.fields.loss_trace.item() == 0.0


def test_a_loss_that_only_f64_holds_is_finite(device):
    ledger = new_ledger(device, 8.0)
    loss = torch.tensor(1e300, dtype=torch.float64, device=device)
    noting.launch_(loss, ledger.one, ledger, first=True)
    assert (ledger.fields.loss_trace.item(), ledger.loss.item()) == (0.0, INF)


class Subclass(torch.Tensor):
    """Whose address may mean something else."""


def one(device, value=3.0, dtype=torch.float32):
    return torch.tensor([value], dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("output", "by_kernel"),
    [
        (lambda device: one(device), True),
        (lambda device: one(device).reshape(()), True),
        (lambda device: one(device).half(), True),
        (lambda device: one(device).expand(1, 1), True),
        (lambda device: torch.full((3,), 3.0, device=device), False),
        (lambda device: torch.zeros(0, device=device), False),
        (lambda device: one(device).to(torch.complex64), False),
        (lambda device: one(device).int(), False),
        (lambda device: one(device).as_subclass(Subclass), False),
        (lambda device: torch._neg_view(one(device, -3.0)), False),
        (lambda device: one(device).to_sparse(), False),
    ],
)
def test_whatever_is_scaled_is_noted_in_one_way_or_the_other(
    device, monkeypatch, output, by_kernel
):
    calls, note = [], noting.launch_

    def counted(*given):
        calls.append(given)
        note(*given)

    monkeypatch.setattr(noting, "launch_", counted)
    ledger, scale = new_ledger(device, 8.0), torch.tensor(4.0, device=device)
    output = output(device)
    losses.note_(output, scale, ledger, first=True, kernels="triton")
    assert len(calls) == by_kernel
    assert ledger.used_scale.item() == 4.0
    assert ledger.loss.item() == (3.0 if losses.is_a_loss(output) else 0.0)


@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_losses_of_one_iteration_are_added_up_and_of_the_next_begin_anew(
    device, kernels
):
    scaler = GradScaler(device.type, init_scale=4.0, kernels=kernels)
    param = torch.nn.Parameter(torch.zeros(2, device=device))
    optimizer = torch.optim.SGD([param], lr=1.0)
    sums = []
    for values in ((1.0, 0.5), (0.25,), (8.0, 8.0, 1.0)):
        optimizer.zero_grad()
        for value in values:
            scaler.scale(planted(param, 1.0) + value).backward()
        sums.append(scaler._ledger.loss.item())
        scaler.step(optimizer)
        scaler.update()
    assert sums == [1.5, 0.25, 17.0]
