"""Checks the origin of the gradients of the first step.

Wrong use of a scaler is systematic, so the first step shows it: the backward pass of an
unscaled loss leaves a sum of two scales, and a clip before `unscale_` uses the norm of
scaled gradients. Hooks on the parameters detect both until the first update.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.messages import Write
from gradscale.torch.step.foreign_grads import ForeignGrads
from gradscale.torch.tensor_list import Mark, mark_of

# The smallest scale at which a clip of scaled gradients cannot be intended.
LEAST_SCALE = 16.0
# Relative tolerance between a norm and a clip limit, or a quotient and the scale.
CLOSE = 1e-5
# Significant digits of a clip limit: 1.0, 0.25, 5.
DIGITS = 2


class Made(NamedTuple):
    """A gradient at the end of a scaled backward pass.

    Attributes:
        mark: The gradient and its version.
        sizes: f32[2], its norm and its peak; None if they are not known.
    """

    mark: Mark
    sizes: Tensor | None = None


class FirstBackwards(ForeignGrads):
    """Watches the backward passes before the first update."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Made] = {}
        # Parameters that the running backward pass has reached.
        self._reached: dict[int, Tensor] = {}

    def begin_scaled(self) -> None:
        """Mark the running backward pass as that of a scaled loss."""
        self.in_scaled_backward = True
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_scaled)

    def accumulated(self, param: Tensor, grad: Tensor) -> None:
        """Note a gradient after a backward pass has made it or added to it."""
        super().accumulated(param, grad)
        self._made[id(param)] = Made(mark_of(grad))
        if self.in_scaled_backward:
            self._reached[id(param)] = param

    @torch.no_grad()
    def _end_scaled(self) -> None:
        self.in_scaled_backward = False
        reached, self._reached = self._reached, {}
        for key, param in reached.items():
            if param.grad is not None and _is_plain(param.grad):
                sizes = _sizes_of([param.grad])
                self._made[key] = Made(mark_of(param.grad), sizes)

    @torch.no_grad()
    def write_to(self, params: Iterable[Tensor], scale: float) -> Write | None:
        """Return how other code has changed the gradients since backward, or None.

        Syncs if they were written to.

        Args:
            params: Of an optimizer, whose gradients the scaler has not touched.
            scale: The scale of the loss.
        """
        grads, sizes, written = [], [], False
        for param in params:
            made = self._made.get(id(param))
            # Non-tensors are refused when the gradients are read.
            grad = param.grad if isinstance(param, Tensor) else None
            if grad is None or grad.numel() == 0:
                continue
            if made is None or made.sizes is None or not made.mark.is_of(grad):
                return None
            written = written or not made.mark.holds(grad)
            grads.append(grad)
            sizes.append(made.sizes)
        if not written or scale < LEAST_SCALE:
            return None
        if len({size.device for size in sizes}) != 1:
            return None
        norms, peaks = torch.stack(sizes).unbind(1)
        before = torch.stack([norms.norm(), peaks.max()])
        both = torch.stack([before, _sizes_of(grads)]).tolist()
        (norm, peak), (norm_now, peak_now) = both
        if not all(0.0 < size < math.inf for size in (norm, peak, norm_now, peak_now)):
            return None
        if abs(norm / norm_now / scale - 1.0) < CLOSE:
            return "unscaled"
        lower = norm_now < (1.0 - CLOSE) * norm
        limits = [norm_now, *([peak_now] if peak_now < peak else [])]
        # A limit that is round once unscaled was intended for scaled gradients.
        clipped = any(_is_round(x) and not _is_round(x / scale) for x in limits)
        return "clipped" if lower and clipped else None

    def close(self) -> None:
        """Remove the hooks and their records."""
        super().close()
        self._made, self._reached = {}, {}


def _is_plain(grad: Tensor) -> bool:
    # An empty gradient has no peak.
    return type(grad) is Tensor and grad.layout is torch.strided and grad.numel() > 0


def _sizes_of(grads: list[Tensor]) -> Tensor:
    """Return f32[2], the norm and the peak of plain gradients on one device."""
    norm = torch.nn.utils.get_total_norm(grads)
    peak = torch.nn.utils.get_total_norm(grads, math.inf)
    return torch.stack([norm, peak]).float()


def _is_round(size: float) -> bool:
    """Return whether a size has as few digits as the limit of a clip.

    >>> _is_round(0.999999), _is_round(0.25), _is_round(0.73129)
    (True, True, False)
    """
    return abs(size - float(f"{size:.{DIGITS}g}")) <= CLOSE * size
