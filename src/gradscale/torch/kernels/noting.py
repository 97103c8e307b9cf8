"""What is to be known of a loss before it is scaled, in one launch."""

import torch
import triton.language as tl
from torch import Tensor

from gradscale.torch.device_state.layout import KEPT, Ledger
from gradscale.torch.kernels import on
from gradscale.torch.kernels.launch import launched

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_LOSS_TRACE = tl.constexpr(KEPT.index("loss_trace"))


def launch_(loss: Tensor, scale: Tensor, ledger: Ledger, first: bool) -> None:
    """Do what `losses.note_plainly_` does for one element, on the ledger's device.

    Args:
        loss: One element of one of `DTYPES`.
        scale: f32[], the scale that is going to multiply it.
        ledger: Written in place.
        first: No loss was noted since the last update.
    """
    with on(scale.device):
        _note(
            1,
            (scale, loss, ledger.kept, ledger.used_scale, ledger.loss),
            (int(first),),
        )


@launched(num_warps=1, enable_fp_fusion=False)
def _note(scale_ptr, loss_ptr, kept_ptr, used_scale_ptr, sum_ptr, first):
    # f64 holds every dtype, and a sum of two f32 rounds from it as in f32.
    loss = tl.load(loss_ptr).to(tl.float64)
    trace_ptr = kept_ptr + _LOSS_TRACE
    trace = tl.load(trace_ptr) + (0.0 * loss).to(tl.float32)
    tl.store(trace_ptr, trace)
    tl.store(used_scale_ptr, tl.load(scale_ptr))
    before = tl.load(sum_ptr).to(tl.float64)
    # Not 0 times what was there: that may be NaN.
    total = tl.where(first > 0, loss, before + loss)
    tl.store(sum_ptr, total.to(tl.float32))
