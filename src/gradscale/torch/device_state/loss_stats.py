"""What is to be known of a loss before it is scaled: is it finite, and what is it?"""

import torch
from torch import Tensor

from gradscale.torch.device_state.layout import Ledger
from gradscale.torch.devices import moved
from gradscale.torch.kernels import Kernels, usable
from gradscale.torch.scaling import trace_of


def is_a_loss(output: Tensor) -> bool:
    """Return whether an output is a number that can be noted."""
    strided = output.layout is torch.strided
    return strided and output.numel() == 1 and output.is_floating_point()


def note_(
    output: Tensor, scale: Tensor, ledger: Ledger, *, first: bool, kernels: Kernels
) -> None:
    """Note whether an output is finite, its scale and its value. No host sync.

    Args:
        output: Before it is scaled.
        scale: f32[], the scale that is going to multiply it.
        ledger: Written in place. Losses of one element are added up.
        first: None was noted since the last update.
        kernels: Whether one kernel may do all of it; it can for a loss.
    """
    # In this order: what is compiled asks no more than the first of them.
    if usable(kernels, scale.device) and is_a_loss(output) and _is_plain(output, scale):
        # Here, for Triton may be missing.
        from gradscale.torch.kernels.noting import DTYPES, launch_

        if output.dtype in DTYPES:
            launch_(output, scale, ledger, first)
            return
    note_plainly_(output, scale, ledger, first=first)


def _is_plain(output: Tensor, scale: Tensor) -> bool:
    """Return whether what lies at its address is the loss, and a kernel gets there."""
    same_device = output.device == scale.device
    return type(output) is Tensor and same_device and not output.is_neg()


def note_plainly_(
    output: Tensor, scale: Tensor, ledger: Ledger, *, first: bool
) -> None:
    """Note the same by plain operations."""
    here = output.device == scale.device and output.layout is torch.strided
    if here and output.dim() == 0 and output.dtype is torch.float32:
        loss = output.detach()
        # 0 for what is finite, else NaN.
        ledger.fields.loss_trace.addcmul_(loss, ledger.zero)
        if first:
            # One launch, where each copy by itself would be one.
            torch._foreach_copy_([ledger.used_scale, ledger.loss], [scale, loss])
        else:
            ledger.used_scale.copy_(scale)
            ledger.loss.add_(loss)
        return
    trace = trace_of(output)
    if trace is not None:
        ledger.fields.loss_trace.add_(moved(trace, scale.device))
    ledger.used_scale.copy_(scale)
    if is_a_loss(output):
        loss = moved(output.detach().reshape(()), ledger.loss.device)
        if first:
            ledger.loss.copy_(loss)
        else:
            ledger.loss.add_(loss)
