"""apex.parallel: torch's DistributedDataParallel and SyncBatchNorm, and LARC."""

from torch.nn import SyncBatchNorm

from gradscale.apex.parallel.distributed import (
    DistributedDataParallel,
    Reducer,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from gradscale.apex.parallel.LARC import LARC

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
