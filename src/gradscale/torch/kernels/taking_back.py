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
from gradscale.torch.kernels.tables import capturing, keep_for_graphs

# Torch's own classes: of others it is not known what they do with a flag.
_COUNTING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
# Up to so many, torch needs one launch too.
ONE_LAUNCH = 64
# Lists that are kept; more than any optimizer has groups of so many parameters.
KEPT = 64

_DTYPE = attrgetter("dtype")


class StepCounts:
    """Takes back the counts of one optimizer's steps, whose addresses are kept."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        # By the first of the counts: each group of parameters has a list of its own.
        self._kept: dict[int, tuple[looks.Numbers, Tensor]] = {}

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
                pointers = self._pointers(steps, device)
                if pointers is None:
                    return False
                counting.take_back_(pointers, found_inf)
        except Exception as error:
            # Nothing is written yet: a kernel that was started does not raise.
            fall_back(error, self._kernels)
            return False
        return True

    def _pointers(self, steps: list[Tensor], device: torch.device) -> Tensor | None:
        """Return i64[n], the addresses; None where they cannot be sent. No host sync.

        What was sent is never written again, for a graph may read it.
        """
        begins, captured = looks.addresses(steps), capturing(device)
        known, pointers = self._kept.get(begins[0], (None, None))
        if pointers is None or known != begins:
            if captured:
                return None
            if len(self._kept) >= KEPT:
                # Of a state that was loaded anew, again and again.
                self._kept.clear()
            pointers = torch.tensor(begins, dtype=torch.int64, device="cpu")
            if device.type == "cuda":
                pointers = pointers.pin_memory().to(device, non_blocking=True)
            self._kept[begins[0]] = begins, pointers
        if captured:
            keep_for_graphs(pointers)
        return pointers


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
