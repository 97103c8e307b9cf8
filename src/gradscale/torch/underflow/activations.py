"""Counts exponents in the gradients of module outputs, where float16 flushes."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gradscale.torch.locate.forward_hooks import (
    ForwardHooks,
    is_plain,
    is_plain_eager,
    plain_tensors,
)
from gradscale.torch.locate.module_tracker import ModuleName
from gradscale.torch.underflow.exponent_counter import Counter

HALF = (torch.float16,)


class ActivationGradients:
    """Counts exponents in the gradients of module outputs while enabled. No host sync.

    While disabled, no module and no tensor has a hook. Only training passes and plain
    dense tensors are observed. An output that a module returns unchanged is counted
    once, for the innermost module. Several passes of one step are added up. Outputs
    that a checkpoint recomputes have no gradient of their own and are not counted.

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
        self._hooks = ForwardHooks(lambda name, inputs: None, self._on_outputs)
        self._tensor_handles: list[RemovableHandle] = []
        self._hooked: dict[int, tuple[Any, int]] = {}
        self._counts: dict[str, Tensor] = {}

    @property
    def enabled(self) -> bool:
        """Whether the modules have hooks."""
        return self._hooks.registered

    @property
    def failure(self) -> str | None:
        """The exception inside the hooks, in words; they observe nothing after it."""
        return self._hooks.failure

    def enable(self) -> None:
        """Register the hooks, unless the model is compiled.

        It would be recompiled with the hooks, and again without them.
        """
        model = self._model()
        if model is not None:
            self._hooks.register(model)

    def disable(self) -> dict[str, Tensor]:
        """Remove all hooks; return i64[SLOTS] for each module that had a gradient."""
        self._hooks.remove()
        # A graph that the user keeps would go on calling them.
        for handle in self._tensor_handles:
            handle.remove()
        counts = self._counts
        self._tensor_handles = []
        self._hooked, self._counts = {}, {}
        return counts

    def _on_outputs(self, module: ModuleName, outputs: Any) -> None:
        for tensor in plain_tensors(outputs):
            if not tensor.requires_grad:
                continue
            known, version = self._hooked.get(id(tensor), (None, 0))
            if known is not None and known() is tensor and version == tensor._version:
                continue
            self._hooked[id(tensor)] = weakref.ref(tensor), tensor._version
            # Without the mark, saving the tensor would issue a warning.
            hook = unserializable_hook(partial(self._on_gradient, str(module.name)))
            self._tensor_handles.append(tensor.register_hook(hook))

    def _on_gradient(self, name: str, grad: Tensor) -> None:
        if is_plain_eager():
            self._hooks.guarded(self._count, name, grad)

    def _count(self, name: str, grad: Tensor) -> None:
        if not is_plain(grad) or grad.dtype not in self._dtypes:
            return
        values = grad.detach()
        counts = self._counter.count([values], (values.device, values.dtype))[0]
        known = self._counts.get(name)
        self._counts[name] = (
            counts if known is None else known + counts.to(known.device)
        )
