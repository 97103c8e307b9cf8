"""Records whether a loss is finite, its value, and the scale that multiplies it."""

import torch
from torch import Tensor

from gradscale.torch.device_state.layout import DeviceState
from gradscale.torch.devices import to_device

# Larger outputs are not checked; their gradients are.
LARGEST_LOSS = 4096


def note_loss_(
    output: Tensor, scale: Tensor, state: DeviceState, *, first: bool
) -> bool:
    """Note an output before it is scaled. No host sync.

    Args:
        output: The loss, or any output that is scaled.
        scale: f32[], the scale that will multiply it.
        state: Written in place. Scalar losses are added up.
        first: No scalar loss was noted since the last update.

    Returns:
        Whether it is a scalar loss.
    """
    fields, loss = state.fields, output.detach()
    if type(loss) is not Tensor and hasattr(loss, "to_local"):
        # A DTensor: each rank notes its local part.
        output = loss = loss.to_local()
    strided, numel = output.layout is torch.strided, output.numel()
    scalar = strided and numel == 1 and output.is_floating_point()
    if scalar:
        if loss.dim() or loss.dtype is not torch.float32 or loss.device != scale.device:
            loss = to_device(loss.reshape(()), scale.device)
        # 0 * x is 0 for finite x, else NaN. Promoted to the loss's dtype: an f64 loss
        # may be finite and above the largest f32.
        fields.loss_trace.add_(loss, alpha=0.0)
    elif strided and numel <= LARGEST_LOSS:
        values = torch.view_as_real(loss) if loss.is_complex() else loss
        fields.loss_trace.add_(to_device((0.0 * values).sum(), scale.device))
    state.used_scale.copy_(scale)
    if scalar and first:
        fields.loss.copy_(loss)
    elif scalar:
        fields.loss.add_(loss)
    return scalar
