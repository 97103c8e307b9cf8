"""The rank of this process in PyTorch, and the recorder that uses it."""

from typing import Any

import torch
from torch.utils.data import get_worker_info

from gradscale.recording import recorder
from gradscale.recording.process import Process, process_from_environment


def process_here() -> Process:
    """Return rank and world size of torch.distributed, else those of a launcher."""
    worker = get_worker_info() is not None
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Process(distributed.get_rank(), distributed.get_world_size(), worker)
    return process_from_environment()._replace(worker=worker)


class Recorder(recorder.Recorder):
    """Writes a run file; PyTorch gives the rank and identifies data-loader workers.

    `GradScaler(record=Recorder("run.gs", sample_every=10))` samples more often than
    `record="run.gs"`. See `gradscale.recording.recorder.Recorder` for all options.

    Args:
        path: The file; by convention it ends in .gs.
        options: As in the base class.
    """

    def __init__(self, path: Any, **options: Any) -> None:
        super().__init__(path, **{"process": process_here, **options})
