"""What only a CUDA device can show: moves between devices, no sync, graphs."""

import pytest
import torch

from gradscale.torch.optim import AdamW
from tests.torch.optim.streams import KINDS, give, parameters, same, stream, train
from tests.torch.test_cuda import no_sync

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)
kinds = pytest.mark.parametrize(("kind", "how"), KINDS.values(), ids=KINDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)


def on_cuda(params):
    return [torch.nn.Parameter(param.detach().cuda()) for param in params]


@kinds
@dtypes
def test_a_step_with_everything_on_the_device_waits_for_nothing(kind, how, dtype):
    params = on_cuda(parameters(dtype))
    optimizer = kind(params, **{**how, "lr": torch.tensor(0.01, device="cuda")})
    optimizer.grad_scale = torch.tensor(8.0, device="cuda")
    optimizer.found_inf = torch.tensor(0.0, device="cuda")
    for grads in stream(3):
        give(params, [grad.cuda() for grad in grads])
        with no_sync():
            optimizer.step()


@kinds
def test_a_model_that_moves_to_the_device_in_mid_run_goes_on_there(kind, how):
    params = parameters()
    optimizer = kind(params, **how)
    train(optimizer, steps=2)
    for param in params:
        param.data = param.data.cuda()
    for grads in stream(2):
        give(params, [grad.cuda() for grad in grads])
        optimizer.step()
    devices = {
        v.device.type for state in optimizer.state.values() for v in state.values()
    }
    assert devices == {"cuda"}


def test_steps_that_a_checkpoint_has_on_the_host_go_to_the_device():
    torchs = torch.optim.AdamW(parameters())
    train(torchs, steps=2)
    optimizer = AdamW(on_cuda(parameters()))
    optimizer.load_state_dict(torchs.state_dict())
    steps = [state["step"] for state in optimizer.state.values()]
    assert {(step.device.type, step.item()) for step in steps} == {("cuda", 2.0)}


@kinds
@dtypes
def test_a_captured_step_replays_as_it_runs(kind, how, dtype):
    def run(replays):
        params = on_cuda(parameters(dtype))
        optimizer = kind(params, **how)
        give(params, [torch.zeros_like(param) for param in params])
        found = optimizer.found_inf = torch.tensor(0.0, device="cuda")
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        if replays:
            with torch.cuda.graph(graph):
                optimizer.step()
        for turn, grads in enumerate(stream(6)):
            found.fill_(float(turn == 2))
            for param, grad in zip(params, grads, strict=True):
                param.grad.copy_(grad)
            if replays:
                graph.replay()
            else:
                optimizer.step()
        return [param.detach().cpu() for param in params]

    assert same(run(True), run(False))
