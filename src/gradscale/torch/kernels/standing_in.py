"""A kernel that stands in for PyTorch's fused Adam and AdamW.

Torch's are launched for every few tensors, and the counts of steps are taken back by
one more launch for every 64 of them, whether the step was skipped or not. What stands
in computes the same bits in one launch. All else is left to torch's optimizer: groups,
state, hooks. It hands its lists to its kernel together with the flag, and the flag
answers the call.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.torch import looks
from gradscale.torch.kernels import Kernels, fall_back, on, usable
from gradscale.torch.kernels.lists import AdamHow
from gradscale.torch.kernels.plans import Plans
from gradscale.torch.kernels.tables import capturing, keep_for_graphs

# Torch's own classes: of others it is not known what they do with a flag.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
# Whether the weight decay of each is decoupled.
_DECOUPLED: dict[Any, bool] = {torch._fused_adam_: False, torch._fused_adamw_: True}
# How they are called. Called otherwise, they are another torch's.
_LISTS = 6
_NUMBERS = "lr", "beta1", "beta2", "eps", "weight_decay"
_SETTINGS = {*_NUMBERS, "amsgrad", "maximize", "grad_scale", "found_inf"}
_PLAIN = {Tensor, torch.nn.Parameter}
# Plans that are kept; more than most optimizers have groups.
KEPT = 64


def stands_in(optimizer: Any, kernels: Kernels, device: torch.device) -> bool:
    """Return whether a kernel of ours is to step this optimizer of torch's."""
    return type(optimizer) in _ADAMS and usable(kernels, device)


class StandIn:
    """Steps one optimizer, with the tables of its groups kept from step to step."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        # By the address of a group's first parameter.
        self._groups: dict[int, _Group] = {}
        self._betas: dict[tuple[float, float, torch.device], Tensor] = {}

    def flag(self, optimizer: Any, found_inf: Tensor) -> Tensor:
        """Return what to hand to the optimizer as `found_inf`: this, or a `SkipFlag`.

        Args:
            optimizer: Of torch's fused ones.
            found_inf: f32[], 1 to skip the step, else 0.
        """
        if not stands_in(optimizer, self._kernels, found_inf.device):
            return found_inf
        flag = found_inf.as_subclass(SkipFlag)
        flag.stand_in = self
        flag.counted = None
        return flag

    def step_(
        self,
        lists: tuple[list[Tensor], ...],
        how: AdamHow,
        grad_scale: Tensor | None,
        found_inf: Tensor,
    ) -> bool:
        """Step as torch's kernel does, or take back the counts; return whether it did.

        Args:
            lists: Parameters, gradients, exp_avg, exp_avg_sq, max_exp_avg_sq or
                nothing, and steps, which are already counted.
            how: The settings.
            grad_scale: f32[], what the gradients are divided by; None to leave them.
            found_inf: f32[], on the device of all lists.
        """
        *shaped, steps = (one for one in lists if one)
        if not _are_plain(shaped, steps, found_inf):
            return False
        try:
            # Here, for Triton may be missing.
            from gradscale.torch.kernels import fused_adam

            with on(found_inf.device):
                plans, (params, *states, steps) = self._group_of([*shaped, steps])
                shaped = [params, shaped[1], *states]
                table, rest = plans.of(shaped, steps, fused_adam.CHUNK)
                if table is None or rest:
                    return False
                amsgrad = len(shaped) == _LISTS - 1
                powers = self._betas_of(how, found_inf.device).pow(steps[0])
                fused_adam.adam_(
                    table, how, powers, grad_scale, found_inf, amsgrad=amsgrad
                )
        except Exception as error:
            # A launch that failed has written nothing.
            fall_back(error, self._kernels)
            return False
        # Autograd has not seen the writes.
        looks.note_writes(shaped[0] if grad_scale is None else shaped[0] + shaped[1])
        return True

    def _group_of(self, lists: list[list[Tensor]]) -> "_Group":
        """Return what is kept of a group, with lists that hold what these hold.

        Torch makes its lists anew in each step, and plans know a list by itself.
        """
        # Gradients come and go: they are not kept alive.
        lists = [*lists[:1], *lists[2:]]
        begin = lists[0][0].data_ptr()
        old = self._groups.get(begin)
        if old is not None and len(old.lists) == len(lists):
            pairs = zip(lists, old.lists, strict=True)
            lists = [was if looks.same(now, was) else now for now, was in pairs]
        elif len(self._groups) >= KEPT:
            self._groups.clear()
        self._groups[begin] = _Group(Plans() if old is None else old.plans, lists)
        return self._groups[begin]

    def _betas_of(self, how: AdamHow, device: torch.device) -> Tensor:
        """Return f32[2] on the device. No host sync."""
        key = how.beta1, how.beta2, device
        betas = self._betas.get(key)
        if betas is None:
            betas = torch.empty(2, dtype=torch.float32, device=device)
            betas[0].fill_(how.beta1)
            betas[1].fill_(how.beta2)
            if capturing(device):
                # Only a replay fills it: nobody else may use it.
                return betas
            if len(self._betas) >= KEPT:
                self._betas.clear()
            self._betas[key] = betas
        elif capturing(device):
            keep_for_graphs(betas)
        return betas


class _Group(NamedTuple):
    """What is kept of a group of parameters.

    Attributes:
        plans: Of its tables.
        lists: Parameters, states and steps.
    """

    plans: Plans
    lists: list[list[Tensor]]


class SkipFlag(Tensor):
    """A flag that answers for torch's kernel; in all other calls a plain tensor.

    Attributes:
        stand_in: Does what the kernel would do.
        counted: The counts of the step that it has just taken, or taken back.
    """

    stand_in: StandIn
    counted: list[Tensor] | None

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
                if func == torch._foreach_sub_ and _taken_back(*args):
                    return None
            return func(*args, **kwargs)


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
    if not flag.stand_in.step_(lists, how, grad_scale, flag):
        return False
    flag.counted = lists[-1]
    return True


def _taken_back(steps: Any = None, flags: Any = None, *others: Any) -> bool:
    """Return whether torch is about to take back counts that are right already."""
    if others or not isinstance(flags, list) or not flags:
        return False
    flag = flags[0]
    if type(flag) is not SkipFlag or flag.counted is None or steps is not flag.counted:
        return False
    return len(flags) == len(steps) and all(one is flag for one in flags)


def _are_plain(shaped: list[list[Tensor]], steps: list[Tensor], flag: Tensor) -> bool:
    """Return whether these can be walked by their addresses, all of them f32.

    Within a list, torch has seen to it that all are of one device and dtype.
    """
    device = flag.device
    firsts = [one[0] for one in [*shaped, steps]]
    return {*map(type, shaped[0])} <= _PLAIN and all(
        one.dtype is torch.float32 and one.device == device for one in firsts
    )


def _fits(scalar: Tensor, flag: Tensor) -> bool:
    """Return whether a kernel beside the flag can read it."""
    return (
        scalar.numel() == 1
        and scalar.dtype is torch.float32
        and scalar.device == flag.device
    )
