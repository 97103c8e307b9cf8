"""One launch for what PyTorch's fused optimizers do after a step that was skipped.

Adam, AdamW and Adagrad count the step of each parameter before their kernel runs, and
take it back with `_foreach_sub_(steps, [found_inf] * len(steps))`, skipped or not: a
launch for every 64 parameters. The flag they are handed here answers that call itself.
"""

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gradscale.torch import looks
from gradscale.torch.kernels import Kernels, fall_back, on, usable
from gradscale.torch.kernels.tables import Table, TableCache

# Torch's own classes: of others it is not known what they do with a flag.
_COUNTING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
# Up to so many, torch needs one launch too.
ONE_LAUNCH = 64
# Tables that are kept; more than any optimizer has groups of so many parameters.
TABLES = 64

_DTYPE = attrgetter("dtype")


class StepCounts:
    """Takes back the counts of one optimizer's steps, with tables kept for them."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        # By the first of the counts: each group of parameters has a list of its own.
        self._caches: dict[int, TableCache] = {}

    def flag(self, optimizer: Any, found_inf: Tensor) -> Tensor:
        """Return what to hand to the optimizer as `found_inf`: this, or a `SkipFlag`.

        Args:
            optimizer: Of torch's fused ones.
            found_inf: f32[], 1 to skip the step, else 0.
        """
        known = type(optimizer) in _COUNTING and usable(self._kernels, found_inf.device)
        if not known:
            return found_inf
        flag = found_inf.as_subclass(SkipFlag)
        flag.counts = self
        return flag

    def take_back_(self, steps: list[Tensor], found_inf: Tensor) -> bool:
        """Subtract the flag from each count in one launch; return whether it was done.

        Args:
            steps: f32[] each, on the flag's device. Others are refused.
            found_inf: f32[].
        """
        device = found_inf.device
        if len(steps) <= ONE_LAUNCH or {*map(_DTYPE, steps)} != {torch.float32}:
            return False
        try:
            # Here, for Triton may be missing.
            from gradscale.torch.kernels import counting

            with on(device):
                counting.take_back_(self._table(steps, device), found_inf)
        except Exception as error:
            # Nothing is written yet: a kernel that was started does not raise.
            fall_back(error, self._kernels)
            return False
        return True

    def _table(self, steps: list[Tensor], device: torch.device) -> Table:
        begins = looks.addresses(steps)
        if begins[0] not in self._caches:
            if len(self._caches) >= TABLES:
                # Of a state that was loaded anew, again and again.
                self._caches.clear()
            self._caches[begins[0]] = TableCache(device, 1)
        return self._caches[begins[0]].of([1] * len(steps), [begins])


class SkipFlag(Tensor):
    """A flag that takes back the counts of skipped steps when it is subtracted.

    In every other call it is the plain tensor that it was made of.

    Attributes:
        counts: Does it.
    """

    counts: StepCounts

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer `_foreach_sub_(steps, [flag] * n)`; leave the rest to torch."""
        with torch._C.DisableTorchFunctionSubclass():
            if func == torch._foreach_sub_ and not kwargs and _taken_back(*args):
                return None
            return func(*args, **(kwargs or {}))


def _taken_back(steps: Any, flags: Any) -> bool:
    if not isinstance(flags, list) or len(flags) != len(steps):
        return False
    flag = flags[0]
    alike = type(flag) is SkipFlag and all(one is flag for one in flags)
    return alike and flag.counts.take_back_(steps, flag)
