"""Counts exponents in the gradients of module outputs, where float16 flushes."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gradscale.torch.devices import can_touch_host
from gradscale.torch.locate.module_hooks import is_compiled
from gradscale.torch.underflow.exponent_counter import Counter

HALF = (torch.float16,)


class ActivationGradients:
    """Counts exponents in the gradients of module outputs while enabled. No host sync.

    While disabled, no module and no tensor has a hook. An output that a module returns
    unchanged is counted once, for the innermost module. Several passes of one step are
    added up. Outputs that a checkpoint recomputes have no gradient of their own and
    are not counted.

    Args:
        model: Its modules are watched.
        counter: Counts the exponents.
        dtypes: Gradients of other dtypes are ignored.
    """

    def __init__(
        self, model: nn.Module, counter: Counter, dtypes: Iterable[torch.dtype] = HALF
    ) -> None:
        self._model = weakref.ref(model)
        self._counter = counter
        self._dtypes = frozenset(dtypes)
        self._module_handles: list[RemovableHandle] = []
        self._tensor_handles: list[RemovableHandle] = []
        self._hooked: dict[int, tuple[Any, int]] = {}
        self._counts: dict[str, Tensor] = {}

    @property
    def enabled(self) -> bool:
        """Whether the modules have hooks."""
        return bool(self._module_handles)

    def enable(self) -> None:
        """Register the hooks, unless the model is compiled.

        With hooks it would be compiled again, and once more without them.
        """
        model = self._model()
        if self.enabled or model is None or any(map(is_compiled, model.modules())):
            return
        for name, module in model.named_modules():
            hook = partial(self._on_outputs, name)
            self._module_handles.append(module.register_forward_hook(hook))

    def disable(self) -> dict[str, Tensor]:
        """Remove all hooks; return i64[SLOTS] for each module that had a gradient."""
        # Those on tensors too: a graph that the user keeps would go on calling them.
        for handle in (*self._module_handles, *self._tensor_handles):
            handle.remove()
        counts = self._counts
        self._module_handles, self._tensor_handles = [], []
        self._hooked, self._counts = {}, {}
        return counts

    def _on_outputs(self, name: str, module: nn.Module, inputs: Any, out: Any) -> None:
        if not can_touch_host():
            return
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                continue
            known, version = self._hooked.get(id(tensor), (None, 0))
            if known is not None and known() is tensor and version == tensor._version:
                continue
            self._hooked[id(tensor)] = weakref.ref(tensor), tensor._version
            handle = tensor.register_hook(partial(self._on_gradient, name))
            self._tensor_handles.append(handle)

    def _on_gradient(self, name: str, grad: Tensor) -> None:
        to_local = getattr(grad, "to_local", None)
        values = grad.detach() if to_local is None else to_local().detach()
        if (
            values.layout is not torch.strided
            or values.dtype not in self._dtypes
            or values.numel() == 0
            or not can_touch_host()
        ):
            return
        counts = self._counter.count([values], (values.device, values.dtype))[0]
        known = self._counts.get(name)
        self._counts[name] = (
            counts if known is None else known + counts.to(known.device)
        )
