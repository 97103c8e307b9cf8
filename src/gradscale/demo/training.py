"""Trains the model in one precision and returns its curves."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradscale.demo.precisions import Precision
from gradscale.demo.settings import Settings
from gradscale.demo.text import Text, draw
from gradscale.torch import GradScaler


@dataclass(frozen=True, kw_only=True)
class Run:
    """The curves of one run.

    Attributes:
        name: Of the precision.
        seed: Of its weights and batches.
        losses: (steps done, loss on held-out text); the loss is computed in FP32.
        scales: Scale of each step; empty without loss scaling.
        skipped: Indices of the skipped steps, from 0.
        lost_share: Share of weight gradient elements, of those non-zero in FP32, that
            are zero in this run.
    """

    name: str
    seed: int
    losses: tuple[tuple[int, float], ...]
    scales: tuple[float, ...]
    skipped: tuple[int, ...]
    lost_share: float

    @property
    def final_loss(self) -> float:
        """The held-out loss after the last step."""
        return self.losses[-1][1]


def train(
    precision: Precision,
    model: nn.Module,
    text: Text,
    settings: Settings,
    on_step: Callable[[], None],
) -> Run:
    """Train `model` in place and return its curves.

    Args:
        precision: Compute dtype and loss scaling.
        model: With f32 weights, on `settings.device`.
        text: Training and held-out text.
        settings: The seed determines the batches.
        on_step: Called after each step.
    """
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=settings.learning_rate)
    scaled = precision.policy is not None
    scaler = GradScaler(settings.device, policy=precision.policy, enabled=scaled)
    # Drawn on the CPU: the same batches on every device.
    batches = torch.Generator().manual_seed(settings.seed)
    probe = held_out_windows(text, settings).to(settings.device)
    losses = [(0, _held_out_loss(model, probe))]
    scales: list[float] = []
    skipped: list[int] = []
    shares: list[float] = []
    for step in range(settings.steps):
        windows = draw(text.training, settings.shape, batches).to(settings.device)
        optimizer.zero_grad()
        scaler.scale(_loss(model, windows, precision.dtype)).backward()
        scaler.unscale_(optimizer)
        share = None
        if step in settings.measured_steps:
            exact = torch.autograd.grad(_loss(model, windows, torch.float32), params)
            share = lost_share(exact, [p.grad for p in params if p.grad is not None])
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        if scaler.skipped_steps > len(skipped):
            skipped.append(step)
        elif share is not None:
            shares.append(share)
        if step + 1 in settings.shown_steps:
            losses.append((step + 1, _held_out_loss(model, probe)))
        on_step()
    return Run(
        name=precision.name,
        seed=settings.seed,
        losses=tuple(losses),
        scales=tuple(scales) if scaled else (),
        skipped=tuple(skipped),
        lost_share=sum(shares) / len(shares) if shares else math.nan,
    )


def held_out_windows(text: Text, settings: Settings) -> Tensor:
    """Return i64[batch, context + 1] of held-out text, the same for every seed."""
    return draw(text.held_out, settings.shape, torch.Generator().manual_seed(0))


def lost_share(exact: Iterable[Tensor], grads: Iterable[Tensor]) -> float:
    """Return the share of non-zero elements of `exact` that are zero in `grads`.

    >>> lost_share([torch.tensor([1.0, 2.0, 0.0])], [torch.tensor([1.0, 0.0, 0.0])])
    0.5
    """
    lost = nonzero = 0
    for true, grad in zip(exact, grads, strict=True):
        lost += int(((true != 0) & (grad == 0)).sum())
        nonzero += int((true != 0).sum())
    return lost / nonzero if nonzero else 0.0


def _loss(model: nn.Module, windows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return f32[], the mean over the batch, under autocast to `dtype`."""
    half = dtype is not torch.float32
    device = windows.device.type
    with torch.autocast(device, dtype=dtype if half else None, enabled=half):
        logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.float(), windows[:, -1])


@torch.no_grad()
def _held_out_loss(model: nn.Module, windows: Tensor) -> float:
    return float(_loss(model, windows, torch.float32))
