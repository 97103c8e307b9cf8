"""apex.optimizers: Adam, SGD on gradscale's kernels, and LAMB."""

from gradscale.apex.optimizers.fused_adam import FusedAdam
from gradscale.apex.optimizers.fused_lamb import FusedLAMB
from gradscale.apex.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]
