"""Replaces the kernel of torch's fused Adam and AdamW by one that gives the same bits.

Torch launches a kernel for every few tensors, and after each step one more for every 64
step counts, to take them back if the step was skipped. Here a group of parameters takes
one launch, and its counts another. Groups, state and hooks stay those of torch's
optimizer: the scaler passes `found_inf` as a `SkipFlag`, a tensor subclass whose
`__torch_function__` intercepts torch's call of its kernel.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch import tensor_list
from gradscale.torch.kernels import Kernels, capturing, on, usable
from gradscale.torch.kernels.args import CHUNK, AdamConfig, AmpArgs
from gradscale.torch.kernels.pointer_table import (
    PointerTable,
    Table,
    keep_for_graphs,
    layout_of,
)

# Exactly torch's classes: a subclass may use the flag in other ways.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_ORDINARY = frozenset((Tensor, torch.nn.Parameter))
# Torch's kernels: whether their weight decay is decoupled.
_DECOUPLED: dict[Any, bool] = {torch._fused_adam_: False, torch._fused_adamw_: True}
# The signature of both. Another signature is that of another release of torch.
_LISTS = 6
_NUMBERS = "lr", "beta1", "beta2", "eps", "weight_decay"
_SETTINGS = {*_NUMBERS, "amsgrad", "maximize", "grad_scale", "found_inf"}
# Up to these sizes torch needs one launch too, and less time on the host.
FEW, LITTLE = 32, 2**22


def stands_in(optimizer: Any, kernels: Kernels, device: torch.device) -> bool:
    """Return whether the kernel of this file replaces that of the optimizer."""
    return type(optimizer) in _ADAMS and usable(kernels, device)


class StandIn:
    """Steps one optimizer, with the tables of its groups kept from step to step."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        # By the address of the first parameter: groups of this step, and of the last.
        self._groups: dict[int, _Group] = {}
        self._before: dict[int, _Group] = {}

    def flag(self, optimizer: Any, found_inf: Tensor) -> Tensor:
        """Return the `found_inf` for the optimizer: unchanged, or as a `SkipFlag`.

        Args:
            optimizer: One of torch's fused optimizers.
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
        config: AdamConfig,
        grad_scale: Tensor | None,
        found_inf: Tensor,
    ) -> Table | None:
        """Step as torch's kernel does; return the table, None if nothing was done.

        Args:
            lists: Parameters, gradients, exp_avg, exp_avg_sq, max_exp_avg_sq or an
                empty list, and step counts, already incremented.
            config: The settings.
            grad_scale: f32[], the divisor of the gradients; None to leave them.
            found_inf: f32[], on the device of all lists.
        """
        *shaped, steps = every = [one for one in lists if one]
        params, grads = shaped[:2]
        if _is_small(params) or not _are_f32(every, found_inf):
            return None
        ordinary = all(_ORDINARY.issuperset(map(type, one)) for one in every)
        if not ordinary or any(map(Tensor.is_neg, grads)):
            return None
        layout = layout_of(shaped, steps)
        # Two programs would write to one count.
        if len(set(layout.rows[-1])) < len(steps):
            return None
        # Imported here: Triton may be missing.
        from gradscale.torch.kernels.adam import launch_

        with on(found_inf.device):
            group = self._group_of(params[0])
            table, rest = group.table.of_lists(shaped, layout)
            if table is None or rest:
                return None
            powers = group.betas(config).pow(steps[0])
            launch_(
                table,
                torch.float32,
                torch.float32,
                config,
                AmpArgs(grad_scale, found_inf, write_back=True),
                masters=False,
                amsgrad=len(every) == _LISTS,
                powers=powers,
            )
        # Autograd has not seen the writes.
        tensor_list.note_writes(params if grad_scale is None else params + grads)
        return table

    def take_back_(self, table: Table, found_inf: Tensor) -> None:
        """Subtract the flag from the step counts in one launch."""
        from gradscale.torch.kernels.step_counter import take_back_

        with on(found_inf.device):
            take_back_(table, table.cells.shape[0] - 1, found_inf)

    def _group_of(self, first: Tensor) -> "_Group":
        """Return the group whose first parameter this is."""
        address = first.data_ptr()
        group = self._groups.get(address) or self._before.get(address)
        if group is None:
            group = _Group(first.device)
        self._groups[address] = group
        return group


class _Group:
    """The pointer table and the betas of a parameter group; holds no tensor of it."""

    def __init__(self, device: torch.device) -> None:
        self.table = PointerTable(device, CHUNK)
        self._device = device
        self._values: tuple[float, float] | None = None
        self._betas = torch.empty(0)

    def betas(self, config: AdamConfig) -> Tensor:
        """Return the betas as f32[2] on the device. No host sync."""
        values, captured = (config.beta1, config.beta2), capturing(self._device)
        if values == self._values:
            if captured:
                keep_for_graphs(self._betas)
            return self._betas
        betas = torch.empty(2, dtype=torch.float32, device=self._device)
        betas[0].fill_(config.beta1)
        betas[1].fill_(config.beta2)
        if not captured:
            # Under capture it is filled by a replay only.
            self._values, self._betas = values, betas
        return betas


class SkipFlag(Tensor):
    """A `found_inf` that intercepts torch's fused kernel; else a plain tensor.

    Attributes:
        stand_in: Takes the step instead of the kernel.
        stepped: The step counts of the step just taken, and their table.
    """

    stand_in: StandIn
    stepped: tuple[list[Tensor], Table] | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Replace the kernel and the call that takes counts back; forward the rest."""
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
    config = AdamConfig(lr, beta1, beta2, eps, weight_decay, decoupled, maximize)
    table = flag.stand_in.step_(lists, config, grad_scale, flag)
    flag.stepped = None if table is None else (lists[-1], table)
    return table is not None


def _taken_back(args: Any, kwargs: Any) -> bool:
    """Take back the step counts of a skipped step; return whether that was done.

    A call that does not follow the step of the flag is left to torch.
    """
    if kwargs or len(args) != 2 or not isinstance(args[1], list) or not args[1]:
        return False
    steps, flags = args
    flag = flags[0]
    if type(flag) is not SkipFlag or flag.stepped is None:
        return False
    counts, table = flag.stepped
    one_flag = len(flags) == len(counts) and len({*map(id, flags)}) == 1
    if steps is not counts or not one_flag:
        return False
    flag.stand_in.take_back_(table, flag)
    return True


def _is_small(params: list[Tensor]) -> bool:
    return len(params) <= FEW and sum(map(Tensor.numel, params)) <= LITTLE


def _are_f32(lists: Sequence[list[Tensor]], flag: Tensor) -> bool:
    """Return whether all tensors are f32 and on the device of the flag.

    Torch passes lists of one device and dtype each.
    """
    return all(
        one[0].dtype is torch.float32 and one[0].device == flag.device for one in lists
    )


def _fits(scalar: Tensor, flag: Tensor) -> bool:
    """Return whether a kernel on the device of the flag can read the scalar."""
    return (
        scalar.numel() == 1
        and scalar.dtype is torch.float32
        and scalar.device == flag.device
    )
