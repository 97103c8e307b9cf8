"""A look at the weights, once a loss or gradients are not finite."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradscale.torch.device_state.late import Late
from gradscale.torch.grads.read_plain import peaks_on_host, read_on_device
from gradscale.torch.grads.stats import by_kind
from gradscale.torch.names import names_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def weights_of(
    model: nn.Module | None, optimizers: Iterable[Any]
) -> list[tuple[str, Tensor]]:
    """Return all parameters that a forward pass computes with, and their names.

    No buffers: a mask may be infinite for good, and running statistics that a bad
    batch has spoilt are not what a step in training depends on.

    Args:
        model: Its parameters, frozen ones too.
        optimizers: Parameters of theirs that the model does not have.
    """
    named: list[tuple[str, Tensor]] = []
    if model is not None:
        named += model.named_parameters()
    known = {id(tensor) for _, tensor in named}
    for optimizer in optimizers:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        others = [param for param in params if id(param) not in known]
        named += zip(names_of(others, (optimizer,)), others, strict=True)
    return named


class WeightsLook:
    """Which of some weights are not finite. No host sync; reading it may wait.

    >>> spoilt = torch.tensor([1.0, torch.nan])
    >>> look = WeightsLook([("a", torch.ones(2)), ("b", spoilt)])
    >>> look.not_finite()
    ['b']

    Args:
        weights: With their names. On this rank alone; what is no float is passed over.
    """

    @torch.no_grad()
    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        seen = [(name, _values(weight)) for name, weight in weights]
        seen = [(n, v) for n, v in seen if v.dtype in _DTYPES and v.numel()]
        names = [name for name, _ in seen]
        self._flags = []
        for (device, _), places, tensors in by_kind([values for _, values in seen]):
            if device.type == "cpu":
                peaks = peaks_on_host(tensors)
            else:
                peaks = read_on_device(tensors, None)[1]()
            here = [names[place] for place in places]
            self._flags.append((here, Late(~torch.isfinite(peaks))))

    @property
    def on_its_way(self) -> bool:
        """Whether something is not on the host yet."""
        return any(flags.on_its_way for _, flags in self._flags)

    def not_finite(self) -> list[str]:
        """Return the names of those that are not finite, in order."""
        return [
            name
            for names, flags in self._flags
            for name, flag in zip(names, flags.values().tolist(), strict=True)
            if flag
        ]


def _values(weight: Tensor) -> Tensor:
    """Return the elements, dense and real."""
    if is_lazy(weight):
        return torch.empty(0)
    local = getattr(weight, "_local_tensor", weight).detach()
    # What a library keeps in classes of its own may not have such elements.
    if type(local) is not Tensor or local.layout is not torch.strided or local.is_meta:
        return torch.empty(0)
    return torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
