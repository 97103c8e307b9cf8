"""Replays a failing batch to locate its first non-finite value."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gradscale.errors import ConfigError
from gradscale.torch.devices import can_touch_host
from gradscale.torch.locate.analysis import Origin, first_origin
from gradscale.torch.locate.autograd_graph import (
    has_reentrant_checkpoint,
    leaf_behind,
    leaves_of,
    nodes_of,
)
from gradscale.torch.locate.module_tracker import (
    ModuleName,
    ModuleTracker,
    in_backward,
)
from gradscale.torch.locate.replay_mode import ReplayMode
from gradscale.torch.locate.result import Location
from gradscale.torch.locate.side_effects import preserve_state
from gradscale.torch.locate.tensor_stats import stats_of
from gradscale.torch.scaled_loss import times

# A gradient that overflows at 2**-40 of the scale overflows at any scale.
MAX_HALVINGS = 40


def diagnose(
    model: nn.Module, closure: Callable[[], Any], scale: float | Tensor
) -> Location:
    """Replay a failing batch and locate its first non-finite value.

    Leaves the model unchanged: weights, gradients, buffers, flags, hooks and random
    number generators. Syncs at every operation.

    Args:
        model: The model, wrapped or not.
        closure: Runs the forward pass of the batch, under autocast if training does,
            and returns the loss before scaling, or several in a tuple, list or dict.
        scale: The scale at which the step failed.

    >>> layer = nn.Linear(1, 1, bias=False).half()
    >>> _ = nn.init.constant_(layer.weight, 100.0)
    >>> x = torch.full((1, 1), 1000.0).half()
    >>> diagnose(layer, lambda: layer(x).sum(), 1.0).where
    'forward of the model itself (Linear), mm, output: 1 of 1 inf'
    """
    with preserve_state(model), _replaying(model) as mode:
        with mode:
            losses = _losses(closure())
            forward_peak = mode.forward_peak
            scaled = [times(loss, _like(scale, loss)) for loss in losses]
        backward = _Backward(model, mode, scaled)
        grads, searched = backward.run(), False
        loss_origins = mode.origins_of(losses)
        origins = loss_origins or mode.origins_of(scaled) or mode.origins_of(grads)
        nans = [origin for origin in origins if origin.kind == "nan"]
        first = first_origin(map(_root, nans or origins))
        fits = None
        fields: dict[str, Any] = {"found": False}
        if first is not None:
            first.context = _context(first, origins)
            fields = first.fields()
            if first.direction == "backward":
                searched, fits = True, backward.fitting_scale(float(scale))
        return Location(
            instrument="replay",
            scale=float(scale),
            loss_finite=not loss_origins,
            forward_peak=forward_peak,
            fits_at=fits,
            searched=searched,
            **fields,
        )


@contextmanager
def _replaying(model: nn.Module) -> Iterator[ReplayMode]:
    modules = ModuleTracker()
    mode = ReplayMode(model, modules)
    with ExitStack() as stack:
        stack.callback(mode.restore_weights)
        # Cached casts of weights belong to another graph; those made here must not
        # stay in the cache.
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(torch.enable_grad())
        torch.clear_autocast_cache()
        for handle in _track(model, modules):
            stack.callback(handle.remove)
        yield mode


def _track(model: nn.Module, modules: ModuleTracker) -> list[RemovableHandle]:
    """Track the modules that this thread runs, those outside the model too."""
    names = {id(module): name for name, module in model.named_modules()}
    thread = threading.get_ident()

    def name_of(module: nn.Module) -> ModuleName:
        return ModuleName(names.get(id(module)), type(module).__name__)

    def is_replay() -> bool:
        here = threading.get_ident() == thread
        return here and can_touch_host() and not in_backward()

    def enter(module: nn.Module, inputs: Any) -> None:
        if is_replay():
            modules.enter(name_of(module))

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if is_replay():
            modules.leave(name_of(module))

    return [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]


class _Backward:
    """Runs backward with hooks on every node, without accumulating into `.grad`."""

    def __init__(
        self, model: nn.Module, mode: ReplayMode, scaled: list[Tensor]
    ) -> None:
        self._mode = mode
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._model = model
        self._scaled = [loss for loss in scaled if loss.requires_grad]
        self._nodes = nodes_of(self._scaled)
        self._leaves = leaves_of(self._nodes, self._scaled)
        self._reentrant = has_reentrant_checkpoint(self._nodes)

    def run(self) -> list[Tensor]:
        """Return the gradients of all leaves, in the order of the graph."""
        if not self._scaled:
            return []
        handles = [
            node.register_prehook(partial(self._before_node, node))
            for node in self._nodes
        ]
        handles += [
            node.register_hook(partial(self._after_node, node)) for node in self._nodes
        ]
        self._mode.backward = True
        try:
            with self._mode:
                return self._gradients(1.0)
        finally:
            self._mode.backward = False
            # Breaks the cycle of hook and node.
            for handle in handles:
                handle.remove()

    def fitting_scale(self, scale: float) -> float | None:
        """Return the largest `scale / 2**k` at which all gradients are finite."""
        if not self._finite_at(2.0**-MAX_HALVINGS):
            return None
        bad, good = 0, MAX_HALVINGS
        while good - bad > 1:
            middle = (bad + good) // 2
            if self._finite_at(2.0**-middle):
                good = middle
            else:
                bad = middle
        return scale * 2.0**-good

    def _finite_at(self, factor: float) -> bool:
        stats = [stats_of(grad) for grad in self._gradients(factor)]
        return all(each is None or each.finite for each in stats)

    def _gradients(self, factor: float) -> list[Tensor]:
        """Return the gradients of the scaled losses times `factor`."""
        ones = [torch.full_like(loss, factor) for loss in self._scaled]
        if not self._reentrant:
            grads = torch.autograd.grad(
                self._scaled, self._leaves, ones, retain_graph=True, allow_unused=True
            )
            return _present(grads)
        if self._accumulating_has_effects():
            return []
        for leaf in self._leaves:
            leaf.grad = None
        torch.autograd.backward(self._scaled, ones, retain_graph=True)
        return _present(param.grad for param in self._model.parameters())

    def _accumulating_has_effects(self) -> bool:
        """Return whether filling `.grad` would trigger a reducer or an optimizer."""
        wrapped = any(
            isinstance(module, nn.parallel.DistributedDataParallel)
            for module in self._model.modules()
        )
        return wrapped or any(
            getattr(param, "_post_accumulate_grad_hooks", None)
            for param in self._model.parameters()
        )

    def _before_node(self, node: Any, grad_outputs: tuple[Tensor | None, ...]) -> None:
        """Assign sums of gradients, made between nodes, to the node they enter."""
        self._mode.paused = True
        for origin in self._mode.origins_of(_present(grad_outputs)):
            if not origin.in_node:
                origin.operation, origin.in_node = self._mode.operation_of(node), True
                origin.tensor = "grad_output"
        self._mode.node, self._mode.paused = node, False

    def _after_node(
        self,
        node: Any,
        grad_inputs: tuple[Tensor | None, ...],
        grad_outputs: tuple[Tensor | None, ...],
    ) -> None:
        """Name the parameter of an origin that is a parameter's gradient."""
        self._mode.paused = True
        for grad, (following, _) in zip(grad_inputs, node.next_functions, strict=False):
            stats = None if grad is None else stats_of(grad)
            if grad is None or stats is None or stats.finite:
                continue
            self._mode.add_unobserved(node, grad, stats)
            leaf = leaf_behind(following)
            name = None if leaf is None else self._names.get(id(leaf))
            for origin in self._mode.origins_of([grad]):
                own = origin.operation is self._mode.operation_of(node)
                if origin.tensor == "grad_input" and own and name is not None:
                    origin.tensor = f"gradient of {name}"
        self._mode.node, self._mode.paused = None, False


def _losses(returned: Any) -> list[Tensor]:
    losses = [
        each
        for each in tree_leaves(returned)
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex())
    ]
    if not losses:
        raise ConfigError(
            f"The closure returned {type(returned).__name__}, which contains no loss. "
            "The replay runs backward from the loss, so the closure must return it as "
            "a floating-point tensor. End the closure with `return loss`.",
            code="GS102",
        )
    return losses


def _like(scale: float | Tensor, loss: Tensor) -> Tensor:
    return torch.full((), float(scale), dtype=torch.float32, device=loss.device)


def _present(grads: Iterable[Tensor | None]) -> list[Tensor]:
    return [grad for grad in grads if grad is not None]


def _root(origin: Origin) -> Origin:
    """Return the earliest origin that `origin` follows from, masks aside."""
    earlier = [each for each in _ancestors(origin) if not each.is_mask]
    return min([*earlier, origin], key=lambda each: each.order)


def _ancestors(origin: Origin) -> list[Origin]:
    found: dict[int, Origin] = {}
    stack = list(origin.sources)
    while stack:
        each = stack.pop()
        if each.order not in found:
            found[each.order] = each
            stack += each.sources
    return list(found.values())


def _context(first: Origin, origins: list[Origin]) -> str:
    """Return the operation that turned an inf into NaN, or produced a NaN's inf."""
    if first.kind == "nan" and first.sources:
        source = min(first.sources, key=lambda each: each.order)
        return f"the inf came from {source.operation}"
    nans = [each for each in origins if each.kind == "nan" and each is not first]
    if first.kind == "inf" and nans:
        return f"it became NaN in {min(nans, key=lambda each: each.order).operation}"
    return ""
