"""apex.optimizers: Adam and SGD on gradscale's kernels, LAMB, and FP16_Optimizer."""

# Where scripts of 2018 and 2019 import it from.
from gradscale.apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from gradscale.apex.optimizers.fused_adam import FusedAdam
from gradscale.apex.optimizers.fused_lamb import FusedLAMB
from gradscale.apex.optimizers.fused_sgd import FusedSGD

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]
