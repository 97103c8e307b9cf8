"""The lists of an optimizer, kept from step to step for as long as they hold."""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import GradientError, StateError
from gradscale.torch import tensor_list
from gradscale.torch.kernels.optimizer_pass import Plans
from gradscale.torch.names import names_of
from gradscale.torch.optim.batch import (
    Batch,
    Mark,
    is_plain,
    like_its_parameter,
    plain,
)
from gradscale.torch.optim.state import (
    MASTER,
    STEP,
    WIDE,
    adopt,
    fresh,
    needs_master,
    share_steps,
)
from gradscale.torch.tensor_list import GradSnapshot

_GRAD = attrgetter("grad")

# Group, batch, gradients, and where these begin if a scaler has just looked.
Walk = list[tuple[dict[str, Any], Batch, Sequence[Tensor], tensor_list.Numbers | None]]


class _Held(NamedTuple):
    """What was made of a group.

    Attributes:
        params: Its parameters.
        kinds: The type of each gradient; NoneType where there is none.
        entries: What the state was asked for.
        lasting: The batches hold the tensors themselves, not views of them.
        batches: Those of the parameters with a gradient.
    """

    params: list[Tensor]
    kinds: list[type]
    entries: tuple[str, ...]
    lasting: bool
    batches: list[Batch]


class Batches:
    """All batches of an optimizer.

    Parameters, state and gradients may be exchanged by anybody between two steps.
    What is held is compared with them by identity, in passes over whole lists; where
    it differs the batches are made anew.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._known: tuple[list[Any], list[Any]] | None = None
        self._marks: dict[int, Mark] = {}
        self._plans: dict[Any, Plans] = {}

    def walk(self, optimizer: Any, seen: GradSnapshot | None = None) -> Walk:
        """Return all that is to be stepped. No sync.

        Nothing but missing state is written, so that a refusal leaves all as it was.

        Args:
            optimizer: Whose batches these are.
            seen: Its gradients, if a scaler has just looked at them.
        """
        known = self._knows(optimizer.state)
        walk: Walk = []
        begin = 0
        for place, group in enumerate(optimizer.param_groups):
            params = group["params"]
            part = None if seen is None else _part_of(seen, begin, params)
            begin += len(params)
            entries = optimizer.entries(group)
            if known and part is not None:
                batch = self._ready_for(place, params, entries, part)
                if batch is not None:
                    walk.append((group, batch, part.tensors, part.addresses))
                    continue
            grads = list(map(_GRAD, params))
            ready = self._ready(place, group, grads, entries) if known else None
            if ready is None:
                # Until the end: an error on the way must not leave old lists behind.
                self._known = None
                ready = self._make(optimizer, place, group, grads, entries)
            walk += [(group, batch, own, None) for batch, own in ready]
        for _, batch, used, at in walk:
            _check_sizes(optimizer, batch, used, seen=at is not None)
        if self._known is None:
            self._known = _shot_of(optimizer.state)
        return walk

    def _knows(self, state: Any) -> bool:
        if self._known is None:
            return False
        return tensor_list.same_state(state, *self._known)

    def _ready_for(
        self,
        place: int,
        params: list[Tensor],
        entries: tuple[str, ...],
        part: GradSnapshot,
    ) -> Batch | None:
        """Return the one batch of a group, if it is for these very gradients."""
        held = self._held.get(place)
        if held is None or not held.lasting or held.entries != entries:
            return None
        alone = tensor_list.same(held.params, params) and len(held.batches) == 1
        return held.batches[0] if alone and held.batches[0].is_for(part) else None

    def _ready(
        self,
        place: int,
        group: dict[str, Any],
        grads: list[Any],
        entries: tuple[str, ...],
    ) -> list[tuple[Batch, list[Tensor]]] | None:
        """Return the batches as held, each with its gradients; None if they changed."""
        held, params = self._held.get(place), group["params"]
        fit = (
            held is not None
            and held.lasting
            and held.entries == entries
            and tensor_list.same(held.params, params)
            and held.kinds == list(map(type, grads))
        )
        if held is None or not fit:
            return None
        ready = []
        for batch in held.batches:
            own = batch.grads_among(grads)
            if own is None:
                return None
            ready.append((batch, own))
        return ready

    def _make(
        self,
        optimizer: Any,
        place: int,
        group: dict[str, Any],
        grads: list[Any],
        entries: tuple[str, ...],
    ) -> list[tuple[Batch, list[Tensor]]]:
        """Make the batches of a group anew, with the state that they need."""
        params = group["params"]
        old = self._held.pop(place, None)
        for batch in old.batches if old is not None else ():
            self._marks.update(batch.marks())
        kinds: dict[Any, list[int]] = {}
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is not None:
                _check(optimizer, param, grad)
                grads[i] = grad = like_its_parameter(param, grad)
                key = param.device, param.dtype, grad.dtype
                kinds.setdefault(key, []).append(i)
        with_grad = [params[i] for i in chain.from_iterable(kinds.values())]
        _complete(optimizer, with_grad, entries)
        made = []
        for key, members in kinds.items():
            owners = [params[i] for i in members]
            names = (*entries, MASTER) if needs_master(owners[0]) else entries
            # Not asked for where there is none: asking would make it.
            states = [optimizer.state[param] for param in owners] if names else []
            columns = {name: [state[name] for state in states] for name in names}
            plans = self._plans.setdefault((place, *key), Plans())
            marks = [self._marks.get(id(param), Mark()) for param in owners]
            chosen = None
            if len(members) < len(params):
                inside = set(members)
                chosen = [i in inside for i in range(len(params))]
            own = [grads[i] for i in members]
            batch = Batch(owners, columns, chosen, own[0], plans, marks)
            made.append((batch, [plain(grad) for grad in own]))
        self._held[place] = _Held(
            list(params),
            list(map(type, grads)),
            entries,
            all(map(is_plain, with_grad))
            and all(g is None or is_plain(g) for g in grads),
            [batch for batch, _ in made],
        )
        return made


def _complete(optimizer: Any, params: list[Tensor], entries: tuple[str, ...]) -> None:
    """Make the state that is missing; adopt what others have put there."""
    uncounted = []
    for param in params:
        names = (*entries, MASTER) if needs_master(param) else entries
        if not names:
            continue
        state = optimizer.state[param]
        if STEP in entries and not isinstance(state.get(STEP), Tensor):
            if state.get(STEP) is None:
                state[STEP] = optimizer.first_count(state)
            uncounted.append((param, state))
        for name in names:
            value = state.get(name)
            if value is None:
                state[name] = fresh(param, name)
                continue
            state[name] = adopt(param, name, value)
            if name != STEP and state[name].shape != param.shape:
                raise _wrong_shape(optimizer, param, name, state[name])
    share_steps(uncounted)


def _part_of(
    seen: GradSnapshot, begin: int, params: list[Tensor]
) -> GradSnapshot | None:
    """Return what was seen of a group; None if a parameter of it was not."""
    end = begin + len(params)
    # The usual optimizer has one group: nothing is cut out.
    part = seen if len(seen.params) == len(params) else _cut(seen, begin, end)
    return part if tensor_list.same(part.params, params) else None


def _cut(seen: GradSnapshot, begin: int, end: int) -> GradSnapshot:
    return seen._replace(
        params=seen.params[begin:end],
        tensors=seen.tensors[begin:end],
        addresses=seen.addresses[begin:end],
        versions=seen.versions[begin:end],
        numels=seen.numels[begin:end],
        present=end - begin,
    )


def _shot_of(state: Any) -> tuple[list[Any], list[Any]] | None:
    """Return who has state, and every entry; None if it is not what torch makes."""
    if not all(isinstance(entries, dict) for entries in state.values()):
        return None
    entries = chain.from_iterable(map(dict.values, state.values()))
    return list(state), list(entries)


def _check(optimizer: Any, param: Tensor, grad: Tensor) -> None:
    kind = type(optimizer).__name__
    if grad.layout is not torch.strided:
        raise GradientError(
            f"{names_of([param], [optimizer])[0]} has a gradient of layout "
            f"{grad.layout}. {kind} moves every element in every step, and most "
            "elements of this gradient are not there. Give the parameter a dense "
            "gradient, or keep it out of this optimizer.",
            code="GS106",
            replaces=f"{kind} does not support sparse gradients",
        )
    if param.dtype not in WIDE:
        raise GradientError(
            f"{names_of([param], [optimizer])[0]} is {param.dtype}. {kind} computes "
            "in float32 or float64 and knows no way there. Keep the parameter in "
            "f16, bf16, f32, f64 or a complex type.",
            code="GS106",
        )


def _check_sizes(
    optimizer: Any, batch: Batch, grads: Sequence[Tensor], *, seen: bool
) -> None:
    """Refuse tensors that are not as large as their parameters; no pass looks.

    Args:
        optimizer, batch, grads: What is about to be stepped.
        seen: The gradients are as large as the parameters were.

    Raises:
        StateError: One of them is not.
    """
    numels = batch.numels if seen else None
    as_planned = batch.plans.confirm([batch.params, *batch.columns.values()], numels)
    if as_planned and (seen or tensor_list.as_large([batch.params, grads])):
        return
    columns = {name: c for name, c in batch.columns.items() if name != STEP}
    if tensor_list.as_large([batch.params, grads, *columns.values()]):
        return
    for name, column in {"grad": grads, **columns}.items():
        for owner, param, one in zip(batch.owners, batch.params, column, strict=True):
            if one.numel() != param.numel():
                raise _wrong_shape(optimizer, owner, name, one)


def _wrong_shape(optimizer: Any, param: Tensor, name: str, value: Tensor) -> StateError:
    return StateError(
        f"{name} of {names_of([param], [optimizer])[0]} has shape "
        f"{tuple(value.shape)}, the parameter has {tuple(param.shape)}. It was kept "
        "for another parameter, or for this one before it was given another size. Load "
        "the checkpoint of this model, or set the gradient to None and delete the "
        "parameter's entry of optimizer.state.",
        code="GS302",
    )
