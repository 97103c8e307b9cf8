"""Training by CUDA graphs beside the same training without them.

`python -m tests.torch.graphs NAME COUNT` runs one of `CASES` in a process of its own: a
capture that fails, or a table that points anywhere, would spoil all that comes after.
"""

import copy
import sys
from typing import Any

import torch
from torch import Tensor

from gradscale.torch import GradScaler
from tests.torch.on_cuda import OWN, batch, small_model, take_step


class Training:
    """A model, an optimizer and a scaler, stepped eagerly or by a graph."""

    def __init__(self, make: Any, model: torch.nn.Module) -> None:
        self.model, self.x = model, torch.zeros(8, 16, device="cuda")
        # By name: where a kernel fails, nothing else may take its place.
        self.optimizer = make(model.parameters(), kernels="triton")
        self.scaler = GradScaler(
            "cuda", 1024.0, growth_interval=3, model=model, kernels="triton"
        )

    def _step(self, set_to_none: bool) -> None:
        take_step(
            self.scaler, self.model, self.optimizer, self.x, set_to_none=set_to_none
        )

    def eagerly(self, step: int, *, set_to_none: bool = True) -> None:
        """Take a step now."""
        self.x.copy_(batch(step))
        self._step(set_to_none)

    def warm_up(self, step: int, *, set_to_none: bool = True) -> None:
        """Take a step now, as one before a capture is to be taken."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.eagerly(step, set_to_none=set_to_none)
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, *, set_to_none: bool = True, pool: Any = None) -> Any:
        """Return a graph of one step; nothing runs."""
        graph = torch.cuda.CUDAGraph()
        # Gradients of the last step would be let go inside.
        self.optimizer.zero_grad(set_to_none=set_to_none)
        with torch.cuda.graph(graph, pool=pool):
            self._step(set_to_none)
        return graph

    def replay(self, graph: Any, step: int) -> None:
        """Take a step by the graph."""
        self.x.copy_(batch(step))
        graph.replay()

    def row(self) -> tuple[float, bool, bool]:
        """Return what the last step showed."""
        last = self.scaler.last
        assert last is not None
        return self.scaler.get_scale(), last.applied, last.culprits != ()

    def weights(self) -> list[Tensor]:
        """Return the weights as they are now."""
        return [p.detach().clone() for p in self.model.parameters()]

    def counts(self) -> tuple[int, int]:
        """Return how many steps were applied and skipped."""
        return int(self.scaler.applied_steps), int(self.scaler.skipped_steps)


def twins(make: Any) -> tuple[Training, Training]:
    """Return two trainings that begin alike."""
    model = small_model()
    return Training(make, copy.deepcopy(model)), Training(make, model)


def assert_equal(ours: Training, theirs: Training) -> None:
    """Compare all bits of the weights, and the counts."""
    assert ours.counts() == theirs.counts()
    for mine, other in zip(ours.weights(), theirs.weights(), strict=True):
        assert torch.equal(mine, other)


def capture_after_tables(count: int) -> None:
    """Capture after as many steps, each with gradients in new memory."""
    graphed, eager = twins(OWN["Lion"])
    kept = []
    for step in range(count):
        graphed.warm_up(step)
        # They stay alive: the next ones must lie elsewhere.
        kept.append([p.grad for p in graphed.model.parameters()])
        eager.eagerly(step)
    graph = graphed.capture()
    for step in range(count, count + 3):
        graphed.replay(graph, step)
        eager.eagerly(step)
    assert_equal(graphed, eager)


def graphs_in_any_order(count: int) -> None:
    """Capture several graphs that share a pool; replay the last one first."""
    graphed, eager = twins(OWN["Lion"])
    graphed.warm_up(0)
    eager.eagerly(0)
    graphs = [graphed.capture()]
    while len(graphs) < count:
        graphs.append(graphed.capture(pool=graphs[0].pool()))
    for step, graph in enumerate(reversed(graphs * 2), start=10):
        graphed.replay(graph, step)
        eager.eagerly(step)
    assert_equal(graphed, eager)


def eager_before_the_first_replay(count: int) -> None:
    """Capture, then step eagerly on the very gradients that the graph has made."""
    graphed, eager = twins(OWN["Lion"])
    graphed.warm_up(0)
    eager.eagerly(0)
    graph = graphed.capture()
    for step in range(count):
        for one in (graphed, eager):
            one.scaler.scale(torch.ones((), device="cuda"))
            for param in one.model.parameters():
                # In place: they stay where the graph has them.
                if param.grad is None:
                    param.grad = torch.empty_like(param)
                param.grad.fill_(step - 0.5)
            one.scaler.step(one.optimizer)
            one.scaler.update()
    graphed.replay(graph, 1)
    eager.eagerly(1)
    assert_equal(graphed, eager)


CASES = {
    "capture after tables": capture_after_tables,
    "graphs in any order": graphs_in_any_order,
    "eager before the first replay": eager_before_the_first_replay,
}

if __name__ == "__main__":
    CASES[sys.argv[1]](int(sys.argv[2]))
    torch.cuda.synchronize()
