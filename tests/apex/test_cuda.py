"""The apex room on a GPU: cuDNN's recurrent networks, kernels, the scripts."""

import sys

import pytest
import torch
from torch import nn

from gradscale.apex import amp
from gradscale.apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from tests.apex.test_scripts import RUNS, SCRIPTS, result_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_networks_are_half_with_cudnn(kind, dtype):
    amp.init()
    network = kind(4, 4, num_layers=2, bidirectional=True).cuda()
    x = torch.randn(3, 2, 4, device="cuda", dtype=dtype).requires_grad_()
    output, _ = network(x)
    assert output.dtype is torch.float16
    output.float().sum().backward()
    assert x.grad.dtype is dtype
    assert network.weight_ih_l0.grad.dtype is torch.float32


@pytest.mark.parametrize("make", [FusedAdam, FusedSGD, FusedLAMB])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_every_level_trains(make, level):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).cuda()
    optimizer = make(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(16, 4, device="cuda")
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 10.0)
        assert norm.is_cuda
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize(("name", "level"), RUNS)
def test_a_script_converges_as_its_fp32_run(name, level, capsys, monkeypatch):
    source = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    changed = source.replace("from apex", "from gradscale.apex")
    results = []
    for run in ("O0", level):
        monkeypatch.setattr(sys, "argv", [name, "--opt-level", run, "--device", "cuda"])
        exec(compile(changed, name, "exec"), {"__name__": "__main__"})
        if amp._amp_state.handle is not None:
            amp._amp_state.handle._deactivate()
        results.append(result_of(capsys.readouterr().out.splitlines()[-1]))
    assert abs(results[0][0] - results[1][0]) < 0.3
