"""The compared implementations: an optimizer, a scaler and the loop around them."""

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
# Small enough that no step overflows: a skipped step would take less time.
INIT_SCALE = 2.0**10

Loop = Callable[[Any, Any, list[Tensor]], None]


def bare(scaler: Any, optimizer: Any, params: list[Tensor]) -> None:
    """Step only."""
    optimizer.step()


def unscaling(scaler: Any, optimizer: Any, params: list[Tensor]) -> None:
    """Step with grad_scale=1, so that torch's kernel divides as under a scaler."""
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
    """Clip and step as torch documents it."""
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
    """One implementation of everything after backward.

    Attributes:
        optimizer: "fused" or "foreach", which are torch's, or "own".
        scaler: "torch", "gradscale", "plain" (gradscale without its kernels),
            "recorded" (gradscale with a run file) or "".
        loop: Called after backward.
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
    """Return whether gradscale's own optimizers can be imported."""
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
    """Return the selected implementations in order; by default all available ones."""
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
    # Marks the scaler as resumed: the shared optimizers already have state.
    scaler.load_state_dict(scaler.state_dict())
    return scaler


def new_run_file() -> Path:
    """Return the path of a run file that is deleted at exit."""
    folder = tempfile.mkdtemp(prefix="gradscale-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / "run.gs"


class Optimizers:
    """One AdamW of each kind over the same parameters, created on first use.

    Implementations share them: time does not depend on the values, and the state of
    each takes as much memory as parameters and gradients together.

    Attributes:
        params: As given.
    """

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self._made: dict[str, Any] = {}

    def get(self, kind: str) -> Any:
        """Return the optimizer of kind "fused", "foreach" or "own"."""
        if kind not in self._made:
            self._made[kind] = self._new(kind)
        return self._made[kind]

    def _new(self, kind: str) -> Any:
        if kind == "own":
            return _own_adamw()(self.params, lr=LR)
        how: Any = {kind: True}
        return torch.optim.AdamW(self.params, lr=LR, **how)


class Entered(NamedTuple):
    """An implementation bound to parameters.

    Attributes:
        scale: Scales a loss; called before every step.
        step: Everything after backward.
        optimizer: Possibly shared with others.
        scaler: None if there is none.
    """

    scale: Step
    step: Step
    optimizer: Any
    scaler: Any


def enter(
    who: Contestant, params: list[Tensor], optimizers: Optimizers, device: str
) -> Entered:
    """Bind an implementation to parameters."""
    optimizer = optimizers.get(who.optimizer)
    scaler = new_scaler(who.scaler, device)
    loss = torch.zeros((), device=device)

    def scale() -> None:
        if scaler is not None:
            scaler.scale(loss)

    def step() -> None:
        who.loop(scaler, optimizer, params)

    return Entered(scale, step, optimizer, scaler)
