"""Who takes part: an optimizer, a scaler and the loop around them."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gradscale.torch
from benchmarks.timing import Step

MAX_NORM = 1.0
LR = 1e-5
# Small enough that nothing overflows, so that nobody saves time by skipping.
INIT_SCALE = 2.0**10

Loop = Callable[[Any, Any, list[Tensor]], None]


def bare(scaler: Any, optimizer: Any, params: list[Tensor]) -> None:
    """Step, and nothing else."""
    optimizer.step()


def unscaling(scaler: Any, optimizer: Any, params: list[Tensor]) -> None:
    """Step, and let torch's kernel divide the gradients by 1, as under a scaler."""
    optimizer.grad_scale, optimizer.found_inf = _numbers(params[0].device)
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


@cache
def _numbers(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.ones((), device=device), torch.zeros((), device=device)


def clipped(scaler: Any, optimizer: Any, params: list[Tensor]) -> None:
    """Clip and step without a scaler."""
    torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
    optimizer.step()


def torchs(scaler: Any, optimizer: Any, params: list[Tensor]) -> None:
    """Clip and step in torch's documented way."""
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
    scaler.step(optimizer)
    scaler.update()


def ours(scaler: Any, optimizer: Any, params: list[Tensor]) -> None:
    """Clip and step with the clip folded into the step."""
    scaler.clip_grad_norm_(optimizer, MAX_NORM)
    scaler.step(optimizer)
    scaler.update()


class Contestant(NamedTuple):
    """One way to do everything after backward.

    Attributes:
        optimizer: "fused" or "foreach", which are torch's, or "own".
        scaler: "torch", "gradscale", "plain" (gradscale without its kernels),
            "recorded" (gradscale with a run file) or "".
        loop: What is called after backward.
    """

    optimizer: str
    scaler: str
    loop: Loop


TORCH, BARE = "torch.amp + fused", "bare fused"
OWN, FUSED = "gradscale + own AdamW", "gradscale + fused"

STEP = {
    TORCH: Contestant("fused", "torch", torchs),
    "torch.amp + foreach": Contestant("foreach", "torch", torchs),
    BARE: Contestant("fused", "", bare),
    "bare fused, unscaling": Contestant("fused", "", unscaling),
    OWN: Contestant("own", "gradscale", ours),
    FUSED: Contestant("fused", "gradscale", ours),
    "gradscale + foreach": Contestant("foreach", "gradscale", ours),
    "gradscale, plain + fused": Contestant("fused", "plain", ours),
    "gradscale, torch's loop + fused": Contestant("fused", "gradscale", torchs),
}


def own_is_there() -> bool:
    """Return whether this version of gradscale has optimizers."""
    try:
        _own_adamw()
    except (ImportError, AttributeError):
        return False
    return True


def _own_adamw() -> Any:
    return import_module("gradscale.torch.optim").AdamW


def chosen(
    everyone: dict[str, Contestant], only: Iterable[str] | None
) -> dict[str, Contestant]:
    """Return those asked for, in the order of `everyone`; by default all there are."""
    if only:
        return {name: who for name, who in everyone.items() if name in set(only)}
    there = own_is_there()
    return {
        name: who for name, who in everyone.items() if there or who.optimizer != "own"
    }


def new_scaler(kind: str, device: str) -> Any:
    """Return a scaler, or None for ""."""
    if not kind:
        return None
    if kind == "torch":
        return torch.amp.GradScaler(device, init_scale=INIT_SCALE)
    kernels: Any = "plain" if kind == "plain" else "auto"
    record = new_run_file() if kind == "recorded" else None
    scaler = gradscale.torch.GradScaler(
        device, init_scale=INIT_SCALE, kernels=kernels, record=record
    )
    # The optimizers are shared and have steps behind them: that is meant.
    scaler.load_state_dict(scaler.state_dict())
    return scaler


def new_run_file() -> Path:
    """Return the path of a run file that goes with the process."""
    folder = tempfile.mkdtemp(prefix="gradscale-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / "run.gs"


class Optimizers:
    """One AdamW of each kind over the same parameters, made when first asked for.

    Contestants share them: time does not depend on the values, and the state of each
    takes as much memory as parameters and gradients together.

    Attributes:
        params: As given.
    """

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self._made: dict[str, Any] = {}

    def get(self, kind: str) -> Any:
        """Return the "fused", "foreach" or "own" one."""
        if kind not in self._made:
            self._made[kind] = self._new(kind)
        return self._made[kind]

    def _new(self, kind: str) -> Any:
        if kind == "own":
            return _own_adamw()(self.params, lr=LR)
        how: Any = {kind: True}
        return torch.optim.AdamW(self.params, lr=LR, **how)


class Entered(NamedTuple):
    """A contestant on its parameters.

    Attributes:
        scale: Scale a loss: what comes before backward, and before every step.
        step: Everything after backward.
        optimizer: Perhaps shared with others.
        scaler: Its own; None if it has none.
    """

    scale: Step
    step: Step
    optimizer: Any
    scaler: Any


def enter(
    who: Contestant, params: list[Tensor], optimizers: Optimizers, device: str
) -> Entered:
    """Return the contestant on these parameters."""
    optimizer = optimizers.get(who.optimizer)
    scaler = new_scaler(who.scaler, device)
    loss = torch.zeros((), device=device)

    def scale() -> None:
        if scaler is not None:
            scaler.scale(loss)

    def step() -> None:
        who.loop(scaler, optimizer, params)

    return Entered(scale, step, optimizer, scaler)
