"""A look at gradients that leaves them as they are."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.grads.read_plain import read_on_device, read_on_host
from gradscale.torch.names import apart, names_of
from gradscale.torch.tensor_list import GradSnapshot, numbers


@dataclass
class Peek:
    """What was seen of the gradients of one optimizer.

    Attributes:
        peak: float[], the largest magnitude, NaN if there is one; None without any
            gradient.
        kinds: For each device and dtype, the parameters and what returns their peaks;
            None where all are far from overflow.
        sources: Where their names are looked up.
    """

    peak: Tensor | None
    kinds: list[tuple[list[Tensor], Callable[[], Tensor] | None]]
    sources: tuple[Any, ...]

    def named(self) -> dict[str, float]:
        """Return the largest magnitude of each gradient, by name. Syncs."""
        return {
            name: peak
            for params, peaks in self.kinds
            if peaks is not None
            for name, peak in zip(
                names_of(params, self.sources), peaks().tolist(), strict=True
            )
        }


@torch.no_grad()
def peek(optimizer: Any, model: Any = None) -> Peek:
    """Read the gradients of an optimizer once; write nothing. No host sync.

    Args:
        optimizer: Whose.
        model: Names the parameters.
    """
    grouped: dict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(
        lambda: ([], [])
    )
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                values = _values(param.grad)
                if values.numel():
                    params, tensors = grouped[values.device, values.dtype]
                    params.append(param)
                    tensors.append(values)
    kinds, peaks = [], []
    for (device, _), (params, tensors) in grouped.items():
        look = read_on_host if device.type == "cpu" else read_on_device
        peak, each, _ = look(tensors, None)
        kinds.append((params, each))
        peaks.append(peak)
    return Peek(_whole(peaks), kinds, (model, optimizer))


def named_peaks(peeks: Iterable[Peek]) -> dict[str, float]:
    """Return the largest magnitude of each gradient of all optimizers. Syncs."""
    peaks: dict[str, float] = {}
    for each in peeks:
        own = each.named()
        peaks.update(zip(apart(own, set(peaks)), own.values(), strict=True))
    return peaks


def values_of(params: Iterable[Tensor]) -> GradSnapshot:
    """Return the elements of gradients as they lie here, for reading alone."""
    present = [(param, param.grad) for param in params]
    pairs = [(param, _values(grad)) for param, grad in present if grad is not None]
    pairs = [(param, values) for param, values in pairs if values.numel()]
    return GradSnapshot(
        params=[param for param, _ in pairs],
        tensors=[values for _, values in pairs],
        addresses=numbers([]),
        versions=numbers([]),
        numels=numbers(map(Tensor.numel, [values for _, values in pairs])),
        kind=None,
        present=len(pairs),
    )


def _values(grad: Tensor) -> Tensor:
    """Return the elements of a gradient, dense and real; of this rank alone."""
    local = getattr(grad, "_local_tensor", grad).detach()
    if local.is_sparse:
        local = local._values()
    return torch.view_as_real(local) if local.is_complex() else local


def _whole(peaks: list[Tensor]) -> Tensor | None:
    if len(peaks) < 2:
        return peaks[0] if peaks else None
    home = peaks[0].device
    return torch.stack([p.float().to(home, non_blocking=True) for p in peaks]).amax()
