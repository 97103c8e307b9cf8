"""All runs of the demo, side by side."""

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

# FP32 once more with each of these, to learn what the seed alone changes.
_OTHER_SEEDS = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run a precision from the same weights over the same batches.

    Attributes:
        settings: What the runs shared.
        parameters: How many weights the model has.
        frequency_loss: The held-out loss of a model that never looks at its input
            and guesses by how often each character occurs.
        runs: In the order of `PRECISIONS`, FP32 first.
        other_seeds: FP32 runs that differ from the first in nothing but the seed.
    """

    settings: Settings
    parameters: int
    frequency_loss: float
    runs: tuple[Run, ...]
    other_seeds: tuple[Run, ...]

    @property
    def exact(self) -> Run:
        """The FP32 run that all others are compared with."""
        return self.runs[0]

    @property
    def seed_noise(self) -> float:
        """The largest difference between final losses of two FP32 runs."""
        finals = [run.final_loss for run in (self.exact, *self.other_seeds)]
        return max(finals) - min(finals)

    def distance(self, run: Run) -> float:
        """Return how far a run ended above FP32; below it, the sign is negative."""
        return run.final_loss - self.exact.final_loss


def chosen_device(name: str) -> str:
    """Return "cuda" or "cpu" for "auto", "cuda" or "cpu".

    Raises:
        ConfigError: If "cuda" is asked for and there is none.
    """
    there = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if there else "cpu"
    if name == "cuda" and not there:
        raise ConfigError(
            "device=cuda was asked for and PyTorch sees no GPU. The demo cannot run "
            "on a device that is not there. Pass cpu or auto, or install a PyTorch "
            "that supports this GPU.",
            code="GS107",
        )
    return name


def planned_runs(settings: Settings) -> list[tuple[Precision, Settings]]:
    """Return what will be run, each with its own settings."""
    reseeded = [replace(settings, seed=settings.seed + k) for k in _OTHER_SEEDS]
    return [
        *((precision, settings) for precision in PRECISIONS),
        *((FP32, other) for other in reseeded),
    ]


def compare(settings: Settings, on_step: Callable[[], None]) -> Comparison:
    """Train once in every precision and return the comparison.

    On a CPU the runs share out the cores, one thread each: the figures do not depend
    on how many there are.

    Args:
        settings: What the runs share.
        on_step: Called after each step of each run, from several threads.
    """
    text, stop = library_text(), threading.Event()

    def step_done() -> None:
        if stop.is_set():
            raise CancelledError
        on_step()

    jobs = [
        (precision, seeded_model(its_settings), its_settings)
        for precision, its_settings in planned_runs(settings)
    ]
    workers = (os.cpu_count() or 1) if settings.device == "cpu" else 1
    with _repeatable(), ThreadPoolExecutor(workers) as pool:
        futures = [
            pool.submit(train, precision, model, text, its_settings, step_done)
            for precision, model, its_settings in jobs
        ]
        try:
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()
        finally:
            # Who is still running was interrupted, or another run failed.
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
def _repeatable() -> Iterator[None]:
    """Make the figures the same every time, on a GPU too, and put all back after."""
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # The matrices are tiny: a second thread gains little, and on a busy machine a run
    # that waits for it took ten times as long.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=only_warns)
