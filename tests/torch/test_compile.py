"""`torch.compile(fullgraph=True)` of scale, unscale_, clip and update equals eager."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from gradscale.torch import GradScaler
from tests.torch.training import INF, NAN, parameter

# Grows on every second finite step: overflow, growth and the first overflow after it.
GRADS = (1.0, INF, 1.0, 1.0, NAN, 1.0, 1.0, 1.0)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Loop:
    """A training loop of which one piece is compiled, or none."""

    def __init__(self, compiled, piece):
        self.scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.param = parameter(3)
        self.optimizer = torch.optim.SGD([self.param], lr=1.0)
        self.norm = None
        setattr(self, piece, compiled(getattr(self, piece)))

    def scale(self, loss):
        return self.scaler.scale(loss)

    def scale_of_model(self, param):
        return self.scaler.scale((param * param).sum())

    def unscale(self):
        self.scaler.unscale_(self.optimizer)

    def clip(self):
        return self.scaler.clip_grad_norm_(self.optimizer, 1.0)

    def update(self):
        self.scaler.update()

    def together(self, loss):
        scaled = self.scaler.scale(loss)
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()
        return scaled

    def iterate(self, grad, piece):
        """Run one iteration; return all that can be seen of it."""
        # The gradient is written by hand: its backward is not what is compiled.
        self.param.grad = torch.full((3,), grad * self.scaler.get_scale())
        if piece == "together":
            scaled = self.together(torch.tensor(2.0))
            applied = None
        else:
            scaled = self.scale(torch.tensor(2.0))
            if piece == "scale_of_model":
                scaled = self.scale_of_model(self.param.detach() + 1.0)
            if piece == "unscale":
                self.unscale()
            if piece == "clip":
                self.norm = self.clip()
            self.scaler.step(self.optimizer)
            self.update()
            applied = self.scaler.last.applied
        return repr(
            (
                scaled.item(),
                self.param.grad.tolist(),
                self.param.tolist(),
                None if self.norm is None else self.norm.item(),
                self.scaler.state_dict(),
                applied,
                self.scaler.last.record,
                self.scaler.last.culprits,
            )
        )


PIECES = ["scale", "scale_of_model", "unscale", "clip", "update", "together"]


def _runs(backend, piece):
    """Return what was seen of an eager and of a compiled run, and the graphs made."""
    counter = CompileCounterWithBackend(backend)
    eager = Loop(lambda function: function, piece)
    compiled = Loop(
        lambda function: torch.compile(function, fullgraph=True, backend=counter), piece
    )
    seen = [[loop.iterate(grad, piece) for grad in GRADS] for loop in (eager, compiled)]
    return *seen, counter.frame_count


# With aot_eager, Dynamo traces as for eager, and writes are made functional after it.
@pytest.mark.parametrize(
    ("piece", "backend"),
    [*((piece, "aot_eager") for piece in PIECES), ("together", "eager")],
)
def test_a_compiled_piece_does_what_it_does_in_eager(piece, backend):
    eager, compiled, graphs = _runs(backend, piece)
    assert compiled == eager
    # One before the tensors are there and one after: the scale is no constant.
    assert 1 <= graphs <= 2


NO_COMPILER = shutil.which("gcc") is None and shutil.which("cc") is None


@pytest.mark.skipif(NO_COMPILER, reason="inductor needs a C++ compiler: gcc or cc")
@pytest.mark.skipif(
    " " in torch.__file__, reason="inductor hands g++ torch's path unquoted"
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_inductor_does_what_eager_does():
    eager, compiled, graphs = _runs("inductor", "together")
    assert compiled == eager
    assert 1 <= graphs <= 2


def test_torchs_own_scaler_cannot_be_compiled():
    # The reason why every method is defined here and none inherited.
    scaler = torch.amp.GradScaler("cpu")
    compiled = torch.compile(scaler.scale, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="marked as skipped"):
        compiled(torch.tensor(2.0))


def test_a_compiled_loss_runs_backward():
    scaler, param = GradScaler("cpu", init_scale=64.0), parameter(3, value=1.0)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(param):
        return scaler.scale((param * param).sum())

    loss(param).backward()
    optimizer = torch.optim.SGD([param], lr=0.25)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.5] * 3
    assert scaler.last.applied


def test_a_bad_loss_is_noticed_in_a_compiled_scale():
    scaler, param = GradScaler("cpu"), parameter(3)
    compiled = torch.compile(scaler.scale, fullgraph=True, backend="aot_eager")
    compiled(torch.tensor(NAN))
    param.grad = torch.full((3,), NAN)
    scaler.step(torch.optim.SGD([param], lr=1.0))
    scaler.update()
    assert str(scaler.last.verdict) == "forward_nonfinite"
