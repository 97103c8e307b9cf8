"""Random training programs, run under torch.amp.GradScaler and under gradscale's.

`python -m tests.torch.random_programs --first 0 --count 2000` runs many of them.
"""

import argparse
import random
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.torch import GradScaler

KINDS: dict[str, Callable[..., Any]] = {
    "SGD": torch.optim.SGD,
    # Not fused: torch leaves its momentum uninitialised when the first step is skipped.
    "momentum": lambda params, **how: torch.optim.SGD(
        params, momentum=0.9, **_unfused(how)
    ),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "amsgrad": lambda params, **how: torch.optim.Adam(params, amsgrad=True, **how),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda params, **how: torch.optim.RMSprop(params, **_unfused(how)),
}
WAYS: list[dict[str, bool]] = [
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
]


def _unfused(how: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in how.items() if name != "fused"}


class Net(nn.Module):
    """Dense layers, a shared one, a sparse embedding, a frozen and an unused weight."""

    def __init__(self, rnd: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        sparse = rnd.random() < 0.3
        self.table = nn.Embedding(7, 4, sparse=sparse, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for _ in range(2))
        self.shared = rnd.random() < 0.3
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        if rnd.random() < 0.3:
            self.layers[0].bias.requires_grad_(False)
        self.functional = rnd.random() < 0.2

    def forward(self, places: Tensor) -> Tensor:
        values = self.table(places)
        for layer in self.layers:
            if self.functional:
                own = dict(layer.named_parameters())
                values = torch.func.functional_call(layer, own, (values,)).tanh()
            else:
                values = layer(values).tanh()
        return self.layers[0](values) if self.shared else values


def program(seed: int, make: Callable[..., Any]) -> list[Any]:
    """Run the program of this seed; return what it has seen, step by step."""
    rnd = random.Random(seed)
    torch.manual_seed(seed)
    model = Net(rnd, rnd.choice([torch.float32, torch.float32, torch.float64]))
    sparse = model.table.sparse
    optimizers = _optimizers(rnd, model, sparse=sparse)
    scaler = make(
        "cpu",
        init_scale=2.0 ** rnd.randrange(0, 20),
        growth_factor=2.0 ** rnd.randrange(1, 4),
        backoff_factor=2.0 ** -rnd.randrange(1, 4),
        growth_interval=rnd.randrange(1, 4),
    )
    trained = model
    if rnd.random() < 0.02:
        trained = torch.compile(model, backend="eager")
    if rnd.random() < 0.2:
        model.layers[1].weight.register_hook(lambda grad: grad * 2.0)
    seen: list[Any] = []
    for _ in range(rnd.randrange(4, 10)):
        try:
            _iteration(rnd, scaler, trained, optimizers)
        except _Interrupted:
            for optimizer in optimizers:
                optimizer.zero_grad()
            seen.append("interrupted")
            continue
        if rnd.random() < 0.1:
            state = scaler.state_dict()
            scaler = make("cpu")
            scaler.load_state_dict(state)
        if rnd.random() < 0.1:
            _exchange(rnd, model)
        weights = [param.detach().clone() for param in model.parameters()]
        seen.append((scaler.get_scale(), scaler._get_growth_tracker(), weights))
    return seen


class _Interrupted(Exception):
    """Raised in the middle of an iteration, and caught around it."""


def _optimizers(rnd: random.Random, model: Net, *, sparse: bool) -> list[Any]:
    table = list(model.table.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("table")]
    if sparse:
        # Coalesces by itself, as gradscale does before: SGD adds duplicates one by one.
        return [torch.optim.SparseAdam(table, lr=0.1), _optimizer(rnd, rest)]
    if rnd.random() < 0.3:
        return [_optimizer(rnd, table), _optimizer(rnd, rest)]
    return [_optimizer(rnd, table + rest)]


def _optimizer(rnd: random.Random, params: list[Tensor]) -> Any:
    how = dict(rnd.choice(WAYS))
    groups: Any = params
    if len(params) > 1 and rnd.random() < 0.4:
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]
    return KINDS[rnd.choice(list(KINDS))](groups, lr=0.1, **how)


def _iteration(
    rnd: random.Random, scaler: Any, model: Any, optimizers: list[Any]
) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=rnd.random() < 0.7)
    for _ in range(rnd.choice([1, 1, 1, 2, 3])):
        places = torch.randint(7, (5,))
        loss = model(places).square().mean() * 2.0 ** rnd.randrange(-3, 3)
        loss = loss * rnd.choice([1.0] * 9 + [float("inf"), float("nan")])
        scaled = scaler.scale(loss)
        if rnd.random() < 0.1:
            scaled = scaler.scale([loss, (loss,)])[0]
        scaled.backward()
        if rnd.random() < 0.05:
            raise _Interrupted
    mode = torch.inference_mode if rnd.random() < 0.1 else nullcontext
    for optimizer in rnd.sample(optimizers, len(optimizers)):
        with mode():
            if rnd.random() < 0.4:
                scaler.unscale_(optimizer)
                params = [p for g in optimizer.param_groups for p in g["params"]]
                dense = all(p.grad is None or not p.grad.is_sparse for p in params)
                if dense and rnd.random() < 0.7:
                    torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
    scaler.update()


@torch.no_grad()
def _exchange(rnd: random.Random, model: Net) -> None:
    """Write to a weight, or exchange its memory, between two steps."""
    weight = model.layers[rnd.randrange(2)].weight
    if rnd.random() < 0.5:
        weight.mul_(0.5)
    else:
        weight.data = weight.data.clone()


def difference(seed: int) -> str:
    """Return where the program differs under the two scalers; empty if nowhere."""
    outcomes = []
    for make in (torch.amp.GradScaler, GradScaler):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                outcomes.append(program(seed, make))
            except (RuntimeError, ValueError, TypeError, AssertionError) as error:
                outcomes.append([f"{type(error).__name__}: {error}".split("\n")[0]])
    torchs, ours = outcomes
    if isinstance(torchs[0], str) and torchs[0] != "interrupted":
        # Torch refuses the program.
        return ""
    if isinstance(ours[0], str) and ours[0] != torchs[0]:
        return ours[0]
    for step, (one, other) in enumerate(zip(torchs, ours, strict=True)):
        if isinstance(one, str) or isinstance(other, str):
            if one != other:
                return f"step {step}: {one!r} against {other!r}"
        elif one[:2] != other[:2]:
            return f"step {step}: scale {one[:2]} against {other[:2]}"
        elif not all(map(_same, one[2], other[2])):
            return f"step {step}: other weights"
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def main() -> int:
    """Run the programs of many seeds; print those that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--count", type=int, default=2000, help="programs (2000)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(given.first, given.first + given.count)
    found = [(seed, text) for seed in seeds if (text := difference(seed))]
    for seed, text in found:
        print(f"seed {seed}: {text}")
    print(f"{len(found)} of {given.count} programs differ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
