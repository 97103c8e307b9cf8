"""This process as PyTorch knows it: its rank, or a data-loader worker."""

import torch
from torch.utils.data import get_worker_info

from gradscale.recording.process import Process, process_from_environment


def process_here() -> Process:
    """Return torch's own rank and world size, else what a launcher has set."""
    worker = get_worker_info() is not None
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Process(distributed.get_rank(), distributed.get_world_size(), worker)
    return process_from_environment()._replace(worker=worker)
