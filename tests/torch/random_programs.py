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
    # Torch refuses it on a CPU: so must gradscale.
    "capturable": lambda params, **how: torch.optim.Adam(
        params, capturable=True, **_unfused(how)
    ),
    # Needs a closure, which neither scaler takes.
    "LBFGS": lambda params, **how: torch.optim.LBFGS(_flat(params), lr=0.1),
}
# The kinds that train, and those that are refused, which are drawn rarely.
TRAINING = [name for name in KINDS if name not in ("capturable", "LBFGS")]
WAYS: list[dict[str, bool]] = [
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
]


def _unfused(how: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in how.items() if name != "fused"}


def _flat(groups: Any) -> list[Tensor]:
    first = groups[0]
    if not isinstance(first, dict):
        return list(groups)
    return [param for group in groups for param in group["params"]]


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
        self.vmapped = rnd.random() < 0.1

    def forward(self, places: Tensor) -> Tensor:
        values = self.table(places)
        for layer in self.layers:
            if self.functional:
                own = dict(layer.named_parameters())
                values = torch.func.functional_call(layer, own, (values,)).tanh()
            elif self.vmapped:
                values = torch.func.vmap(layer)(values).tanh()
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
    _register_hooks(rnd, model)
    # Torch's scaler ends most programs that enter inference mode only sometimes.
    inference = rnd.choices([0.0, 1.0, 0.2], [90, 8, 2])[0]
    seen: list[Any] = []
    for _ in range(rnd.randrange(4, 10)):
        try:
            _iteration(rnd, scaler, trained, optimizers, inference)
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
            _exchange(rnd, model, optimizers)
        weights = [param.detach().clone() for param in model.parameters()]
        seen.append((scaler.get_scale(), scaler._get_growth_tracker(), weights))
    return seen


class _Interrupted(Exception):
    """Raised in the middle of an iteration, and caught around it."""


def _register_hooks(rnd: random.Random, model: Net) -> None:
    """Register some of the hooks that training code has."""

    @torch.no_grad()
    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    weight = model.layers[1].weight
    if rnd.random() < 0.2:
        weight.register_hook(lambda grad: grad * 2.0)
    if rnd.random() < 0.2:
        weight.register_post_accumulate_grad_hook(halve)
    if rnd.random() < 0.2:
        model.layers[0].register_full_backward_hook(lambda *_: None)
    if rnd.random() < 0.1:
        left = [rnd.randrange(1, 8)]

        def interrupt(grad: Tensor) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise _Interrupted

        weight.register_hook(interrupt)


def _optimizers(rnd: random.Random, model: Net, *, sparse: bool) -> list[Any]:
    table = list(model.table.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("table")]
    if sparse:
        kind = rnd.choice([torch.optim.SparseAdam, torch.optim.SGD])
        return [kind(table, lr=0.1), _optimizer(rnd, rest)]
    if rnd.random() < 0.3:
        return [_optimizer(rnd, table), _optimizer(rnd, rest)]
    return [_optimizer(rnd, table + rest)]


def _optimizer(rnd: random.Random, params: list[Tensor]) -> Any:
    how = dict(rnd.choice(WAYS))
    groups: Any = params
    if len(params) > 1 and rnd.random() < 0.4:
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]
    name = rnd.choice(TRAINING)
    if rnd.random() < 0.03:
        name = rnd.choice(["capturable", "LBFGS"])
    return KINDS[name](groups, lr=0.1, **how)


def _iteration(
    rnd: random.Random, scaler: Any, model: Any, optimizers: list[Any], inference: float
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
    for optimizer in rnd.sample(optimizers, len(optimizers)):
        with torch.inference_mode() if rnd.random() < inference else nullcontext():
            if rnd.random() < 0.4:
                scaler.unscale_(optimizer)
                params = [p for g in optimizer.param_groups for p in g["params"]]
                dense = all(p.grad is None or not p.grad.is_sparse for p in params)
                if dense and rnd.random() < 0.7:
                    torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
    scaler.update()


@torch.no_grad()
def _exchange(rnd: random.Random, model: Net, optimizers: list[Any]) -> None:
    """Write to a weight, exchange or resize it, or its memory, between two steps."""
    here, there = (layer.weight for layer in model.layers)
    way = rnd.choice(["write", "move", "swap", "resize", "replace"])
    if way == "write":
        here.mul_(0.5)
    elif way == "move":
        there.data = there.data.clone()
    elif way == "swap":
        here.data, there.data = there.data, here.data
    elif way == "resize":
        model.unused.data = torch.ones(5, dtype=here.dtype)
        # Torch's fused kernels would write beyond a state of the old size.
        if type(optimizers[0]) is torch.optim.SGD and not optimizers[0].state:
            table = model.table.weight
            table.grad = None
            table.data = torch.cat([table.data, here.data[:1]])
    else:
        model.layers[1].weight = nn.Parameter(there.detach().clone())
        for group in (group for each in optimizers for group in each.param_groups):
            group["params"] = [
                model.layers[1].weight if param is there else param
                for param in group["params"]
            ]
        for each in optimizers:
            # Torch's Adagrad, before 2.13, makes states when it is made, and no others.
            if type(each) is torch.optim.Adagrad and there in each.state:
                each.state[model.layers[1].weight] = each.state.pop(there)


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
    refused, ours_too = _refusal(torchs), _refusal(ours)
    if refused:
        # Gradscale's scaler goes on where torch's has made tensors for inference only.
        too = ours_too or "inference tensor" in refused
        return "" if too else f"torch refuses: {refused}"
    if ours_too:
        return ours_too
    for step, (one, other) in enumerate(zip(torchs, ours, strict=True)):
        if isinstance(one, str) or isinstance(other, str):
            if one != other:
                return f"step {step}: {one!r} against {other!r}"
        elif one[:2] != other[:2]:
            return f"step {step}: scale {one[:2]} against {other[:2]}"
        elif not all(map(_same, one[2], other[2])):
            return f"step {step}: other weights"
    return ""


def _refusal(seen: list[Any]) -> str:
    first = seen[0]
    return first if isinstance(first, str) and first != "interrupted" else ""


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
    differ = 0
    for seed in seeds:
        text = difference(seed)
        if text:
            differ += 1
            print(f"seed {seed}: {text}", flush=True)
    print(f"{differ} of {given.count} programs differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
