"""This process as PyTorch knows it, and the recorder that asks for it."""

from typing import Any

import torch
from torch.utils.data import get_worker_info

from gradscale.recording import recorder
from gradscale.recording.process import Process, process_from_environment


def process_here() -> Process:
    """Return torch's own rank and world size, else what a launcher has set."""
    worker = get_worker_info() is not None
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Process(distributed.get_rank(), distributed.get_world_size(), worker)
    return process_from_environment()._replace(worker=worker)


class Recorder(recorder.Recorder):
    """Writes a run file; asks PyTorch for the rank and for data-loader workers.

    `GradScaler(record=Recorder("run.gs", sample_every=10))` samples more often than
    `record="run.gs"`. See `gradscale.recording.recorder.Recorder` for all options.

    Args:
        path: The file; by convention it ends in .gs.
        options: As in the base class.
    """

    def __init__(self, path: Any, **options: Any) -> None:
        super().__init__(path, **{"process": process_here, **options})
