"""A failing batch again, under instruments."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradscale.errors import ConfigError
from gradscale.judge.unsafe_ops import recognise
from gradscale.torch.locate.autograd_graph import (
    leaf_behind,
    leaves_of,
    nodes_of,
    runs_backward_inside,
)
from gradscale.torch.locate.births import Birth, Operation
from gradscale.torch.locate.module_tracker import NOWHERE, Places
from gradscale.torch.locate.replay_mode import Replay
from gradscale.torch.locate.result import Diagnosis, named_place
from gradscale.torch.locate.side_effects import untouched
from gradscale.torch.locate.tensor_stats import measured
from gradscale.torch.scaling import times

# Below 2**-40 of its scale no overflow is one of the scale.
LOWEST = 40


def diagnose(
    model: nn.Module, closure: Callable[[], Any], scale: float | Tensor
) -> Diagnosis:
    """Replay a failing batch and name where a value first stopped being finite.

    Nothing of the model changes: no weight, gradient, buffer, flag or hook, and no
    random number is used up. Waits for the device at every operation.

    Args:
        model: The model, wrapped or not.
        closure: Runs the forward pass of the batch, under autocast if training does,
            and returns the loss before scaling, or several in a tuple, list or dict.
        scale: The scale at which it failed.

    >>> layer = nn.Linear(1, 1, bias=False).half()
    >>> _ = nn.init.constant_(layer.weight, 100.0)
    >>> x = torch.full((1, 1), 1000.0).half()
    >>> diagnose(layer, lambda: layer(x).sum(), 1.0).where
    'forward of the model itself (Linear), mm, output: 1 of 1 inf'
    """
    places = Places(model)
    with untouched(model), _instruments(model, places) as replay:
        with replay:
            losses = _losses(closure())
            forward_peak = replay.forward_peak
            scaled = [times(loss, _like(scale, loss)) for loss in losses]
        backward = _Backward(model, replay, scaled)
        grads, searched = backward.run(), False
        loss_births = replay.births_in(losses)
        births = loss_births or replay.births_in(scaled) or replay.births_in(grads)
        origin = _origin(births)
        fits = None
        if origin is not None and origin.direction == "backward":
            searched, fits = True, backward.fitting_scale(float(scale))
        # Only the numbers leave: no graph and no tensor is kept.
        return Diagnosis(
            instrument="replay",
            scale=float(scale),
            loss_finite=not loss_births,
            forward_peak=forward_peak,
            fits_at=fits,
            searched=searched,
            **_fields(origin, births),
        )


@contextmanager
def _instruments(model: nn.Module, places: Places) -> Iterator[Replay]:
    replay = Replay(model, places)
    with ExitStack() as stack:
        stack.callback(replay.put_back_weights)
        stack.callback(places.leave)
        # Casts of weights that autocast keeps belong to another graph, and ours must
        # not stay behind.
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(torch.enable_grad())
        torch.clear_autocast_cache()
        places.follow()
        yield replay


class _Backward:
    """Runs backward under hooks on every node, with nothing kept in `.grad`."""

    def __init__(self, model: nn.Module, replay: Replay, scaled: list[Tensor]) -> None:
        self._replay = replay
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._model = model
        self._scaled = [loss for loss in scaled if loss.requires_grad]
        self._nodes = nodes_of(self._scaled)
        self._leaves = leaves_of(self._nodes, self._scaled)
        self._reentrant = runs_backward_inside(self._nodes)

    def run(self) -> list[Tensor]:
        """Return the gradients of all leaves, in the order of the graph."""
        if not self._scaled:
            return []
        handles = [
            node.register_prehook(partial(self._pre, node)) for node in self._nodes
        ]
        handles += [
            node.register_hook(partial(self._post, node)) for node in self._nodes
        ]
        self._replay.backward = True
        try:
            with self._replay:
                return self._gradients(1.0)
        finally:
            self._replay.backward = False
            # A hook holds its node, which holds the hook.
            for handle in handles:
                handle.remove()

    def fitting_scale(self, scale: float) -> float | None:
        """Return the largest `scale / 2**k` at which all gradients are finite."""
        if not self._finite_at(2.0**-LOWEST):
            return None
        bad, good = 0, LOWEST
        while good - bad > 1:
            middle = (bad + good) // 2
            if self._finite_at(2.0**-middle):
                good = middle
            else:
                bad = middle
        return scale * 2.0**-good

    def _finite_at(self, share: float) -> bool:
        seen = [measured(grad) for grad in self._gradients(share)]
        return all(each is None or each.finite for each in seen)

    def _gradients(self, share: float) -> list[Tensor]:
        ones = [torch.full_like(loss, share) for loss in self._scaled]
        if not self._reentrant:
            found = torch.autograd.grad(
                self._scaled, self._leaves, ones, retain_graph=True, allow_unused=True
            )
            return [grad for grad in found if grad is not None]
        if self._accumulating_has_effects():
            return []
        for leaf in self._leaves:
            leaf.grad = None
        torch.autograd.backward(self._scaled, ones, retain_graph=True)
        return [p.grad for p in self._model.parameters() if p.grad is not None]

    def _accumulating_has_effects(self) -> bool:
        """Return whether filling `.grad` would set off a reducer or an optimizer."""
        wrapped = any(
            isinstance(module, nn.parallel.DistributedDataParallel)
            for module in self._model.modules()
        )
        return wrapped or any(
            getattr(param, "_post_accumulate_grad_hooks", None)
            for param in self._model.parameters()
        )

    def _pre(self, node: Any, grad_outputs: tuple[Tensor | None, ...]) -> None:
        """Give sums of gradients, made between nodes, to the node that takes them."""
        self._replay.paused = True
        for birth in self._replay.births_in(_there(grad_outputs)):
            if not birth.node:
                birth.operation, birth.node = self._replay.operation_of(node), True
                birth.tensor = "grad_output"
        self._replay.node, self._replay.paused = node, False

    def _post(
        self,
        node: Any,
        grad_inputs: tuple[Tensor | None, ...],
        grad_outputs: tuple[Tensor | None, ...],
    ) -> None:
        """Say of what was born in a node which of its results it is."""
        self._replay.paused = True
        for grad, (following, _) in zip(grad_inputs, node.next_functions, strict=False):
            seen = None if grad is None else measured(grad)
            if grad is None or seen is None or seen.finite:
                continue
            self._replay.unseen(node, grad, seen)
            leaf = leaf_behind(following)
            name = None if leaf is None else self._names.get(id(leaf))
            for birth in self._replay.births_in([grad]):
                own = birth.operation is self._replay.operation_of(node)
                if birth.tensor == "grad_input" and own and name is not None:
                    birth.tensor = f"gradient of {name}"
        self._replay.node, self._replay.paused = None, False


def _losses(returned: Any) -> list[Tensor]:
    losses = [
        each
        for each in tree_leaves(returned)
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex())
    ]
    if not losses:
        raise ConfigError(
            f"The closure returned {type(returned).__name__} without a loss in it. "
            "The replay runs backward from the loss, so it must be a floating-point "
            "tensor. End the closure with `return loss`.",
            code="GS102",
        )
    return losses


def _like(scale: float | Tensor, loss: Tensor) -> Tensor:
    return torch.full((), float(scale), dtype=torch.float32, device=loss.device)


def _there(grads: tuple[Tensor | None, ...]) -> list[Tensor]:
    return [grad for grad in grads if grad is not None]


def _origin(births: list[Birth]) -> Birth | None:
    """Return the birth that all others follow from."""
    nans = [birth for birth in births if birth.kind == "nan"]
    roots = [_root(birth) for birth in nans or births]
    return min(
        roots, key=lambda birth: (_is_constant(birth), birth.order), default=None
    )


def _root(birth: Birth) -> Birth:
    """Return the overflow that a NaN came from; itself if it came from none."""
    earlier = [each for each in _ancestors(birth) if not _is_constant(each)]
    return min([*earlier, birth], key=lambda each: each.order)


def _ancestors(birth: Birth) -> list[Birth]:
    found: dict[int, Birth] = {}
    waiting = list(birth.sources)
    while waiting:
        each = waiting.pop()
        if each.order not in found:
            found[each.order] = each
            waiting += each.sources
    return list(found.values())


def _is_constant(birth: Birth) -> bool:
    """Return whether the call itself named infinity, as a mask does."""
    return birth.given and birth.tensor == "output"


def _fields(origin: Birth | None, births: list[Birth]) -> dict[str, Any]:
    if origin is None:
        return {"found": False}
    operation = origin.operation
    seen = origin.seen
    return {
        "found": True,
        "direction": origin.direction,
        "module": operation.place.name,
        "module_class": operation.place.kind,
        "operation": operation.name,
        "tensor": origin.tensor,
        "kind": origin.kind,
        "count": seen.nan if origin.kind == "nan" else seen.inf,
        "elements": seen.elements,
        "dtype": str(origin.dtype).removeprefix("torch."),
        "peak": origin.peak,
        "line": operation.line,
        "context": _context(origin, births),
        "pattern": None if origin.given else recognise(origin.evidence()),
    }


def _context(origin: Birth, births: list[Birth]) -> str:
    if origin.kind == "nan" and origin.sources:
        first = min(origin.sources, key=lambda each: each.order)
        return f"the inf came from {_described(first.operation)}"
    later = [each for each in births if each.kind == "nan" and each is not origin]
    if origin.kind == "inf" and later:
        first = min(later, key=lambda each: each.order)
        return f"it became NaN in {_described(first.operation)}"
    return ""


def _described(operation: Operation) -> str:
    if operation.place == NOWHERE:
        return operation.name
    return f"{operation.name} of {named_place(operation.place)}"
