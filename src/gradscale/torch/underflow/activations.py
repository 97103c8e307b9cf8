"""Counting in the gradients of activations, where float16 really flushes."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gradscale.torch.devices import host_may_act
from gradscale.torch.locate.module_hooks import is_compiled
from gradscale.torch.underflow.exponent_counter import Counter

HALF = (torch.float16,)


class ActivationGradients:
    """Counts in the gradients of module outputs while it is on. No host sync.

    Off it is nothing: no hook on any module or tensor. An output that a module passes
    on unchanged is counted once, under the innermost module. Several passes of one
    step are added up. Outputs that a checkpoint computes anew have no gradient of
    their own and are not seen.

    Args:
        model: Whose modules are watched.
        counter: Counts.
        dtypes: Gradients of other dtypes are passed over.
    """

    def __init__(
        self, model: nn.Module, counter: Counter, dtypes: Iterable[torch.dtype] = HALF
    ) -> None:
        self._model = weakref.ref(model)
        self._counter = counter
        self._dtypes = frozenset(dtypes)
        self._hooks: list[RemovableHandle] = []
        self._on_tensors: list[RemovableHandle] = []
        self._seen: dict[int, tuple[Any, int]] = {}
        self._counts: dict[str, Tensor] = {}

    @property
    def on(self) -> bool:
        """Whether modules are watched."""
        return bool(self._hooks)

    def turn_on(self) -> None:
        """Watch the modules from here on, unless the model is compiled.

        Hooks would make it compile again, and once more without them.
        """
        model = self._model()
        if self.on or model is None or any(map(is_compiled, model.modules())):
            return
        for name, module in model.named_modules():
            watch = partial(self._saw_outputs, name)
            self._hooks.append(module.register_forward_hook(watch))

    def turn_off(self) -> dict[str, Tensor]:
        """Remove every hook; return i64[SLOTS] of each module that had a gradient."""
        # Those on tensors too: a graph that its owner keeps would go on calling.
        for hook in (*self._hooks, *self._on_tensors):
            hook.remove()
        found = self._counts
        self._hooks, self._on_tensors, self._seen, self._counts = [], [], {}, {}
        return found

    def _saw_outputs(self, name: str, module: nn.Module, inputs: Any, out: Any) -> None:
        if not host_may_act():
            return
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                continue
            known, version = self._seen.get(id(tensor), (None, 0))
            if known is not None and known() is tensor and version == tensor._version:
                continue
            self._seen[id(tensor)] = weakref.ref(tensor), tensor._version
            hook = tensor.register_hook(partial(self._saw_gradient, name))
            self._on_tensors.append(hook)

    def _saw_gradient(self, name: str, grad: Tensor) -> None:
        to_local = getattr(grad, "to_local", None)
        values = grad.detach() if to_local is None else to_local().detach()
        if (
            values.layout is not torch.strided
            or values.dtype not in self._dtypes
            or values.numel() == 0
            or not host_may_act()
        ):
            return
        counts = self._counter.count([values], (values.device, values.dtype))[0]
        known = self._counts.get(name)
        self._counts[name] = (
            counts if known is None else known + counts.to(known.device)
        )
