"""A kernel that stands in for PyTorch's fused Adam and AdamW.

Torch's are launched for every few tensors, and the counts of steps are taken back by
one more launch for every 64 of them, whether the step was skipped or not. What stands
in takes one launch for a group of parameters and one for its counts, and computes the
same bits. All else is left to torch's optimizer: groups, state, hooks. It hands its
lists to its kernel together with the flag, and the flag answers the call.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch import tensor_list
from gradscale.torch.kernels import Kernels, on, usable
from gradscale.torch.kernels.args import AdamHow
from gradscale.torch.kernels.plans import in_step
from gradscale.torch.kernels.pointer_table import (
    Table,
    TableCache,
    capturing,
    keep_for_graphs,
)

# Torch's own classes: of others it is not known what they do with a flag.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
# Whether the weight decay of each is decoupled.
_DECOUPLED: dict[Any, bool] = {torch._fused_adam_: False, torch._fused_adamw_: True}
# How they are called. Called otherwise, they are another torch's.
_LISTS = 6
_NUMBERS = "lr", "beta1", "beta2", "eps", "weight_decay"
_SETTINGS = {*_NUMBERS, "amsgrad", "maximize", "grad_scale", "found_inf"}
# So few tensors and elements are one launch for torch as well, and for the host its
# way is the shorter one.
FEW, LITTLE = 32, 2**22


def stands_in(optimizer: Any, kernels: Kernels, device: torch.device) -> bool:
    """Return whether a kernel of ours is to step this optimizer of torch's."""
    return type(optimizer) in _ADAMS and usable(kernels, device)


class StandIn:
    """Steps one optimizer, with the tables of its groups kept from step to step."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        # By the address of the first parameter: groups of this step, and of the last.
        self._groups: dict[int, _Group] = {}
        self._before: dict[int, _Group] = {}

    def flag(self, optimizer: Any, found_inf: Tensor) -> Tensor:
        """Return what to hand to the optimizer as `found_inf`: this, or a `SkipFlag`.

        Args:
            optimizer: Of torch's fused ones.
            found_inf: f32[], 1 to skip the step, else 0.
        """
        if not stands_in(optimizer, self._kernels, found_inf.device):
            return found_inf
        self._before, self._groups = self._groups, {}
        flag = found_inf.as_subclass(SkipFlag)
        flag.stand_in = self
        flag.stepped = None
        return flag

    def step_(
        self,
        lists: Sequence[list[Tensor]],
        how: AdamHow,
        grad_scale: Tensor | None,
        found_inf: Tensor,
    ) -> Table | None:
        """Step as torch's kernel does; return the table, None if nothing was done.

        Args:
            lists: Parameters, gradients, exp_avg, exp_avg_sq, max_exp_avg_sq or
                nothing, and steps, which are already counted.
            how: The settings.
            grad_scale: f32[], what the gradients are divided by; None to leave them.
            found_inf: f32[], on the device of all lists.
        """
        lists = [one for one in lists if one]
        if _is_little(lists[0]) or not _are_f32(lists, found_inf):
            return None
        params, grads = lists[:2]
        # Here, for Triton may be missing.
        from gradscale.torch.kernels import fused_adam

        with on(found_inf.device):
            group = self._group_of(params[0], fused_adam.CHUNK)
            table = group.table(lists)
            if table is None:
                return None
            powers = group.betas(how).pow(lists[-1][0])
            amsgrad = len(lists) == _LISTS
            fused_adam.adam_(table, how, powers, grad_scale, found_inf, amsgrad=amsgrad)
        # Autograd has not seen the writes.
        tensor_list.note_writes(params if grad_scale is None else params + grads)
        return table

    def take_back_(self, table: Table, found_inf: Tensor) -> None:
        """Subtract the flag from the counts in one launch."""
        from gradscale.torch.kernels.step_counter import take_back_

        with on(found_inf.device):
            take_back_(table, table.cells.shape[0] - 1, found_inf)

    def _group_of(self, first: Tensor, chunk: int) -> "_Group":
        """Return what is kept of the group that begins with this parameter."""
        begin = first.data_ptr()
        group = self._groups.get(begin) or self._before.get(begin)
        if group is None:
            group = _Group(first.device, chunk)
        self._groups[begin] = group
        return group


class _Group:
    """What is kept of a group of parameters: numbers and tables, but no tensor of it.

    Args:
        device: Where all of it is.
        chunk: How many elements a program works on.
    """

    def __init__(self, device: torch.device, chunk: int) -> None:
        self._device = device
        self._cache = TableCache(device, chunk)
        self._rows: list[tensor_list.Numbers] = []
        self._numels = tensor_list.numbers(())
        self._rates: tuple[float, float] | None = None
        self._betas = torch.empty(0)

    def table(self, lists: list[list[Tensor]]) -> Table | None:
        """Return a table with a row for each list; None if it cannot be walked.

        No host sync.

        Args:
            lists: Of f32 tensors; parameters first, gradients second, counts last.
        """
        seen = tensor_list.survey(lists)
        if seen is None:
            return None
        rows, numels, contiguous = seen
        # Gradients may come to lie elsewhere in every step, the others do not.
        known = rows[:1] + rows[2:] == self._rows[:1] + self._rows[2:]
        shaped = lists[:-1]
        if not (known and contiguous and numels == self._numels):
            kinds = [(one[0].dtype, one[0].device) for one in shaped]
            alike = (in_step(one, kinds) for one in zip(*shaped, strict=True))
            # Two programs would count at one place.
            shared = len({*rows[-1]}) < len(rows[-1])
            if 0 in numels or shared or not all(alike):
                return None
        self._rows, self._numels = rows, numels
        return self._cache.of(numels, rows)

    def betas(self, how: AdamHow) -> Tensor:
        """Return f32[2] on the device. No host sync."""
        rates, captured = (how.beta1, how.beta2), capturing(self._device)
        if rates == self._rates:
            if captured:
                keep_for_graphs(self._betas)
            return self._betas
        betas = torch.empty(2, dtype=torch.float32, device=self._device)
        betas[0].fill_(how.beta1)
        betas[1].fill_(how.beta2)
        if not captured:
            # Else only a replay fills it: nobody else may use it.
            self._rates, self._betas = rates, betas
        return betas


class SkipFlag(Tensor):
    """A flag that answers for torch's kernel; in all other calls a plain tensor.

    Attributes:
        stand_in: Does what the kernel would do.
        stepped: The counts of the step that it has just taken, and their table.
    """

    stand_in: StandIn
    stepped: tuple[list[Tensor], Table] | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer a call of the kernel and what follows it; leave the rest to torch."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not torch.compiler.is_compiling():
                if func in _DECOUPLED and _stepped(_DECOUPLED[func], args, kwargs):
                    return None
                if func == torch._foreach_sub_ and _taken_back(args, kwargs):
                    return None
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Return a plain tensor."""
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _stepped(decoupled: bool, lists: Any, settings: dict[str, Any]) -> bool:
    """Step instead of torch's kernel; return whether that was done."""
    if len(lists) != _LISTS or settings.keys() != _SETTINGS:
        return False
    flag, grad_scale = settings["found_inf"], settings["grad_scale"]
    lr, beta1, beta2, eps, weight_decay = (settings[name] for name in _NUMBERS)
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        lr = lr.item()
    scalars = [one for one in (lr, grad_scale) if isinstance(one, Tensor)]
    if type(flag) is not SkipFlag or not all(_fits(one, flag) for one in scalars):
        return False
    maximize = settings["maximize"]
    how = AdamHow(lr, beta1, beta2, eps, weight_decay, decoupled, maximize)
    table = flag.stand_in.step_(lists, how, grad_scale, flag)
    flag.stepped = None if table is None else (lists[-1], table)
    return table is not None


def _taken_back(args: Any, kwargs: Any) -> bool:
    """Take back the counts of the step before, if it was skipped; return whether.

    Called otherwise than after that step, torch does it by itself.
    """
    if kwargs or len(args) != 2 or not isinstance(args[1], list) or not args[1]:
        return False
    steps, flags = args
    flag = flags[0]
    if type(flag) is not SkipFlag or flag.stepped is None:
        return False
    counts, table = flag.stepped
    alike = len(flags) == len(counts) and len({*map(id, flags)}) == 1
    if steps is not counts or not alike:
        return False
    flag.stand_in.take_back_(table, flag)
    return True


def _is_little(params: list[Tensor]) -> bool:
    return len(params) <= FEW and sum(map(Tensor.numel, params)) <= LITTLE


def _are_f32(lists: Sequence[list[Tensor]], flag: Tensor) -> bool:
    """Return whether all are, on the device of the flag.

    Within a list, torch has seen to it that all are of one device and dtype.
    """
    return all(
        one[0].dtype is torch.float32 and one[0].device == flag.device for one in lists
    )


def _fits(scalar: Tensor, flag: Tensor) -> bool:
    """Return whether a kernel beside the flag can read it."""
    return (
        scalar.numel() == 1
        and scalar.dtype is torch.float32
        and scalar.device == flag.device
    )
