"""The parameters of an optimizer in batches that one pass steps together."""

from collections.abc import Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import GradientError, StateError
from gradscale.torch import tensor_list
from gradscale.torch.kernels.args import CHUNK
from gradscale.torch.kernels.optimizer_pass import kernel_layout
from gradscale.torch.kernels.pointer_table import Layout, PointerTable
from gradscale.torch.names import names_of
from gradscale.torch.optim.masters import DataCheck, LastWrite, Masters
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

_DTYPE, _GRAD, _LAYOUT = map(attrgetter, ("dtype", "grad", "layout"))
_ORDINARY = frozenset((Tensor, torch.nn.Parameter))


class Batch:
    """Parameters of one group, one device and one dtype, with gradients of one dtype.

    Attributes:
        owners: The parameters as they are in their group.
        params: float[...] each, the tensors that a pass steps.
        columns: For each entry of the state, float[...] of each parameter.
        wide: The dtype of the arithmetic.
        device: The device of all tensors.
        masters: The masters of half-precision parameters; None for others.
        table: The pointer table of the kernels.
    """

    def __init__(
        self,
        owners: list[Tensor],
        columns: dict[str, list[Tensor]],
        chosen: list[bool] | None,
        grad: Tensor,
        table: PointerTable,
        writes: dict[int, LastWrite],
        check: DataCheck,
    ) -> None:
        """Hold the tensors; none is read or written.

        Args:
            owners: See the attributes.
            columns: For each entry of the state, the tensors in the state.
            chosen: Which parameters of the group these are; None for all.
            grad: One of their gradients; the others have its dtype and device.
            table: See the attributes.
            writes: The last write of parameters, by their ids.
            check: Looks for writes through `.data`.
        """
        self.owners = owners
        self.params, self.columns = owners, columns
        if not all(map(is_plain, owners)):
            self.params = [plain(param) for param in owners]
            self.columns = {
                name: [plain(entry) for entry in entries]
                for name, entries in columns.items()
            }
        exact = self.columns[MASTER] if MASTER in columns else self.params
        self.wide = exact[0].dtype
        self.device = owners[0].device
        self.table = table
        self._chosen = chosen
        self._grad_dtypes = {grad.dtype}
        self._grad_devices = {grad.get_device()}
        self.masters: Masters | None = None
        if MASTER in columns:
            last = [writes.get(id(param), LastWrite()) for param in owners]
            self.masters = Masters(
                owners, self.params, self.columns[MASTER], last, check
            )

    def accepts(self, snapshot: GradSnapshot) -> bool:
        """Return whether a snapshot of its group has the gradients of this batch."""
        device, dtype = snapshot.kind or (None, None)
        return (
            self._chosen is None
            and device == self.device
            and {dtype} == self._grad_dtypes
        )

    def own_grads(self, grads: list[Any]) -> list[Tensor] | None:
        """Return the gradients of this batch; None if one has another kind.

        Args:
            grads: The gradients of the whole group.
        """
        if self._chosen is not None:
            grads = list(compress(grads, self._chosen))
        fit = (
            set(map(_DTYPE, grads)) == self._grad_dtypes
            and set(map(_LAYOUT, grads)) == {torch.strided}
            and set(map(Tensor.get_device, grads)) == self._grad_devices
            and not any(map(Tensor.is_neg, grads))
        )
        return grads if fit else None

    def update_masters_(
        self, layout: Layout | None, optimizer: Any, check_data: bool
    ) -> None:
        """Copy externally written parameters into their masters. No host sync.

        Args:
            layout: The layout of the step, with the addresses in its first row; None
                if the step has none.
            optimizer: Names the parameters.
            check_data: Compare all parameters: a write through `.data` is kept too.
        """
        if self.masters is not None:
            addresses = None if layout is None else layout.rows[0]
            self.masters.update_(addresses, [optimizer], check_data=check_data)

    def note_own_write(self) -> None:
        """Record the parameters as this optimizer has left them."""
        if self.params is not self.owners:
            # Autograd has seen a write to the local tensor, not to the DTensor.
            torch.autograd.graph.increment_version(self.owners)
        if self.masters is not None:
            self.masters.note_own_write()


class BatchStep(NamedTuple):
    """A batch with its gradients of one step.

    Attributes:
        group: The parameter group.
        batch: The batch.
        lists: All tensors of the pass, as `AdamLists` or `MomentumLists`.
        layout: Their layout where kernels take the step, else None.
    """

    group: dict[str, Any]
    batch: Batch
    lists: Any
    layout: Layout | None


class _Held(NamedTuple):
    """The batches of a group.

    Attributes:
        params: The parameters of the group.
        types: The type of each gradient; NoneType where there is none.
        entries: The names of the entries of the state.
        lasting: The batches hold the tensors themselves, not views of them.
        batches: Those of the parameters with a gradient.
    """

    params: list[Tensor]
    types: list[type]
    entries: tuple[str, ...]
    lasting: bool
    batches: list[Batch]


class Batches:
    """All batches of an optimizer, kept from step to step.

    Parameters, state and gradients may be replaced between two steps. Each step
    compares them by identity in passes over whole lists, and rebuilds the batches of a
    group where they differ. A replaced `.data` changes the layout of the lists.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        # Keys and values of the optimizer's state, when the batches were made.
        self._state: tuple[list[Any], list[Any]] | None = None
        self._writes: dict[int, LastWrite] = {}
        self._tables: dict[Any, PointerTable] = {}
        self._checks: dict[Any, DataCheck] = {}

    def steps(
        self, optimizer: Any, snapshot: GradSnapshot | None = None
    ) -> list[BatchStep]:
        """Return the batches to step, with their gradients. No host sync.

        Only missing state is written, so an error leaves all else unchanged.

        Args:
            optimizer: The optimizer of these batches.
            snapshot: Its gradients, all of one kind; None to inspect `.grad`.
        """
        same_state = self._state is not None and tensor_list.same_state(
            optimizer.state, *self._state
        )
        steps = []
        begin = 0
        for index, group in enumerate(optimizer.param_groups):
            params = group["params"]
            part = None if snapshot is None else _part_of(snapshot, begin, params)
            begin += len(params)
            entries = optimizer.entries(group)
            held = self._held.get(index) if same_state else None
            if held is not None and not _is_current(held, params, entries):
                held = None
            found = None
            if held is not None and part is not None:
                found = _with_snapshot(held, part)
            if found is None:
                part, grads = None, list(map(_GRAD, params))
                found = None if held is None else _with_grads(held, grads)
            if found is None:
                # None until the end: an error in between must not leave stale lists.
                self._state = None
                found = self._make(optimizer, index, group, grads, entries)
            for batch, own in found:
                lists = optimizer.lists(batch, own)
                layout = kernel_layout(lists, optimizer.kernels, part)
                steps.append(BatchStep(group, batch, lists, layout))
        for step in steps:
            _check_sizes(optimizer, step)
        if self._state is None:
            self._state = _keys_and_values(optimizer.state)
        return steps

    def _make(
        self,
        optimizer: Any,
        index: int,
        group: dict[str, Any],
        grads: list[Any],
        entries: tuple[str, ...],
    ) -> list[tuple[Batch, Sequence[Tensor]]]:
        """Make the batches of a group, and the state that is missing."""
        params = group["params"]
        old = self._held.pop(index, None)
        for batch in old.batches if old is not None else ():
            if batch.masters is not None:
                self._writes.update(batch.masters.last_writes())
        kinds: dict[Any, list[int]] = {}
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is not None:
                check_grad(optimizer, param, grad)
                grads[i] = grad = _like_its_parameter(param, grad)
                key = param.device, param.dtype, grad.dtype
                kinds.setdefault(key, []).append(i)
        with_grad = [params[i] for i in chain.from_iterable(kinds.values())]
        _complete(optimizer, with_grad, entries)
        made: list[tuple[Batch, Sequence[Tensor]]] = []
        for key, members in kinds.items():
            owners = [params[i] for i in members]
            names = (*entries, MASTER) if needs_master(owners[0]) else entries
            # Only if there are names: reading a missing entry would create it.
            states = [optimizer.state[param] for param in owners] if names else []
            columns = {name: [state[name] for state in states] for name in names}
            table = self._tables.get((index, key))
            if table is None:
                table = self._tables[index, key] = PointerTable(key[0], CHUNK)
            check = self._checks.setdefault((index, key), DataCheck())
            chosen = None
            if len(members) < len(params):
                inside = set(members)
                chosen = [i in inside for i in range(len(params))]
            own = [grads[i] for i in members]
            batch = Batch(owners, columns, chosen, own[0], table, self._writes, check)
            made.append((batch, [plain(grad) for grad in own]))
        self._held[index] = _Held(
            list(params),
            list(map(type, grads)),
            entries,
            all(map(is_plain, with_grad))
            and all(g is None or is_plain(g) for g in grads),
            [batch for batch, _ in made],
        )
        return made


def _part_of(
    snapshot: GradSnapshot, begin: int, params: list[Tensor]
) -> GradSnapshot | None:
    """Return the snapshot of a group; None if it lacks one of its parameters."""
    end = begin + len(params)
    # Most optimizers have one group.
    if len(snapshot.params) != len(params):
        snapshot = snapshot._replace(
            params=snapshot.params[begin:end],
            tensors=snapshot.tensors[begin:end],
            addresses=snapshot.addresses[begin:end],
            versions=snapshot.versions[begin:end],
            numels=snapshot.numels[begin:end],
            present=end - begin,
        )
    return snapshot if tensor_list.same(snapshot.params, params) else None


def _is_current(held: _Held, params: list[Tensor], entries: tuple[str, ...]) -> bool:
    return (
        held.lasting
        and held.entries == entries
        and tensor_list.same(held.params, params)
    )


def _with_snapshot(
    held: _Held, part: GradSnapshot
) -> list[tuple[Batch, Sequence[Tensor]]] | None:
    """Return the only batch of a group, if the snapshot has its gradients."""
    if len(held.batches) != 1 or not held.batches[0].accepts(part):
        return None
    return [(held.batches[0], part.tensors)]


def _with_grads(
    held: _Held, grads: list[Any]
) -> list[tuple[Batch, Sequence[Tensor]]] | None:
    """Return the batches of a group; None if the gradients are of other kinds."""
    if held.types != list(map(type, grads)):
        return None
    found: list[tuple[Batch, Sequence[Tensor]]] = []
    for batch in held.batches:
        own = batch.own_grads(grads)
        if own is None:
            return None
        found.append((batch, own))
    return found


def _complete(optimizer: Any, params: list[Tensor], entries: tuple[str, ...]) -> None:
    """Make the state that is missing; convert entries of another dtype or device."""
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


def _keys_and_values(state: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the keys of a state, and every entry; None if an entry is no dict."""
    if not all(isinstance(entries, dict) for entries in state.values()):
        return None
    entries = chain.from_iterable(map(dict.values, state.values()))
    return list(state), list(entries)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a pass uses the tensor itself."""
    if tensor.is_complex():
        return False
    # hasattr() for a missing attribute of a Tensor takes a microsecond.
    return type(tensor) in _ORDINARY or not hasattr(tensor, "to_local")


def plain(tensor: Tensor) -> Tensor:
    """Return a real, local tensor that shares the memory."""
    if is_plain(tensor):
        return tensor
    to_local = getattr(tensor, "to_local", None)
    local = tensor if to_local is None else to_local()
    return torch.view_as_real(local) if local.is_complex() else local


def _like_its_parameter(param: Any, grad: Any) -> Any:
    """Return the gradient with resolved values, sharded like the parameter."""
    if grad.is_conj():
        grad = param.grad = grad.resolve_conj()
    if grad.is_neg():
        grad = param.grad = grad.resolve_neg()
    if (
        not is_plain(param)
        and hasattr(param, "placements")
        and grad.placements != param.placements
    ):
        grad = param.grad = grad.redistribute(placements=param.placements)
    return grad


def check_grad(optimizer: Any, param: Tensor, grad: Tensor) -> None:
    """Refuse a gradient that is not dense, or a parameter without a wide dtype."""
    kind = type(optimizer).__name__
    if grad.layout is not torch.strided:
        raise GradientError(
            f"{names_of([param], [optimizer])[0]} has a gradient of layout "
            f"{grad.layout}. {kind} updates every element in every step, and this "
            "gradient stores only some of them. Give the parameter a dense gradient, "
            "or keep it out of this optimizer.",
            code="GS106",
            replaces=f"{kind} does not support sparse gradients",
        )
    if param.dtype not in WIDE:
        raise GradientError(
            f"{names_of([param], [optimizer])[0]} is {param.dtype}. {kind} computes "
            "in float32 or float64 and has no conversion from this dtype. Keep the "
            "parameter in f16, bf16, f32, f64 or a complex type.",
            code="GS106",
        )


def _check_sizes(optimizer: Any, step: BatchStep) -> None:
    """Refuse tensors with another number of elements than their parameter.

    Raises:
        StateError: The numbers of elements differ.
    """
    batch = step.batch
    columns: dict[str, Sequence[Tensor]] = {"grad": step.lists.grads}
    columns |= {name: c for name, c in batch.columns.items() if name != STEP}
    if step.layout is not None:
        same = step.layout.same_sizes
    else:
        numels = list(map(Tensor.numel, batch.params))
        same = all(list(map(Tensor.numel, c)) == numels for c in columns.values())
    if same:
        return
    for name, column in columns.items():
        for owner, param, one in zip(batch.owners, batch.params, column, strict=True):
            if one.numel() != param.numel():
                raise _wrong_shape(optimizer, owner, name, one)


def _wrong_shape(optimizer: Any, param: Tensor, name: str, value: Tensor) -> StateError:
    return StateError(
        f"{name} of {names_of([param], [optimizer])[0]} has shape "
        f"{tuple(value.shape)}, the parameter has {tuple(param.shape)}. It belongs to "
        "another parameter, or to this one before it was resized. Load the checkpoint "
        "of this model, or set the gradient to None and delete the parameter's entry "
        "of optimizer.state.",
        code="GS302",
    )
