"""Trains all precisions of the demo and compares them with FP32."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import (
    FIRST_EXCEPTION,
    CancelledError,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from gradscale.demo.model import seeded_model
from gradscale.demo.precisions import FP32, PRECISIONS, Precision
from gradscale.demo.settings import Settings
from gradscale.demo.text import frequency_loss, library_text
from gradscale.demo.training import Run, held_out_windows, train
from gradscale.errors import ConfigError

# Offsets of further FP32 seeds, to measure the effect of the seed alone.
_OTHER_SEEDS = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run per precision, from the same weights, over the same batches.

    Attributes:
        settings: Shared by the runs.
        parameters: Number of weights of the model.
        frequency_loss: Held-out loss of guessing by character frequency, without
            input.
        runs: In the order of `PRECISIONS`, FP32 first.
        other_seeds: FP32 runs that differ from the first in the seed only.
    """

    settings: Settings
    parameters: int
    frequency_loss: float
    runs: tuple[Run, ...]
    other_seeds: tuple[Run, ...]

    @property
    def exact(self) -> Run:
        """The FP32 run, the reference."""
        return self.runs[0]

    @property
    def seed_noise(self) -> float:
        """The largest difference between final losses of two FP32 runs."""
        finals = [run.final_loss for run in (self.exact, *self.other_seeds)]
        return max(finals) - min(finals)

    def distance(self, run: Run) -> float:
        """Return the final loss of a run minus that of FP32."""
        return run.final_loss - self.exact.final_loss


def chosen_device(name: str) -> str:
    """Return "cuda" or "cpu" for "auto", "cuda" or "cpu".

    Raises:
        ConfigError: If "cuda" is requested and not available.
    """
    available = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if available else "cpu"
    if name == "cuda" and not available:
        raise ConfigError(
            "device=cuda was requested, but PyTorch finds no GPU. The demo cannot run "
            "on a missing device. Pass cpu or auto, or install a PyTorch build that "
            "supports this GPU.",
            code="GS107",
        )
    return name


def planned_runs(settings: Settings) -> list[tuple[Precision, Settings]]:
    """Return the runs to make: precision and settings of each."""
    reseeded = [replace(settings, seed=settings.seed + k) for k in _OTHER_SEEDS]
    return [
        *((precision, settings) for precision in PRECISIONS),
        *((FP32, other) for other in reseeded),
    ]


def compare(settings: Settings, on_step: Callable[[], None]) -> Comparison:
    """Train once in every precision and return the comparison.

    On a CPU the runs execute in parallel, one thread each, so that results do not
    depend on the number of cores.

    Args:
        settings: Shared by the runs.
        on_step: Called after each step of each run, from several threads.
    """
    text, stop = library_text(), threading.Event()

    def step_done() -> None:
        if stop.is_set():
            raise CancelledError
        on_step()

    jobs = [
        (precision, seeded_model(run_settings), run_settings)
        for precision, run_settings in planned_runs(settings)
    ]
    workers = (os.cpu_count() or 1) if settings.device == "cpu" else 1
    with _deterministic(), ThreadPoolExecutor(workers) as pool:
        futures = [
            pool.submit(train, precision, model, text, run_settings, step_done)
            for precision, model, run_settings in jobs
        ]
        try:
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()
        finally:
            # Ends the other runs after an interrupt or a failure.
            stop.set()
    runs = [future.result() for future in futures]
    targets = held_out_windows(text, settings)[:, -1]
    return Comparison(
        settings=settings,
        parameters=sum(param.numel() for param in jobs[0][1].parameters()),
        frequency_loss=frequency_loss(text.training, targets),
        runs=tuple(runs[: len(PRECISIONS)]),
        other_seeds=tuple(runs[len(PRECISIONS) :]),
    )


@contextmanager
def _deterministic() -> Iterator[None]:
    """Make results reproducible, on a GPU too; restore torch's settings at the end."""
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # The matrices are tiny: a second thread gains little, and on a busy machine waiting
    # for it made a run ten times slower.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=only_warns)
