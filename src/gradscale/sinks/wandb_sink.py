"""Metrics for W&B."""

from collections.abc import Mapping
from typing import Any, Protocol

from gradscale.core.records import StepRecord
from gradscale.judge.judge import Judgement
from gradscale.sinks.figures import Figures


class WandbRun(Protocol):
    """The methods used of the object that `wandb.init` returns."""

    def log(self, data: dict[str, Any], *, commit: bool | None = None) -> Any: ...

    def define_metric(self, name: str, step_metric: str | None = None) -> Any: ...


class WandbSink:
    """Logs metrics under `gradscale/`, against their own step axis.

    W&B rejects rows with a lower step than a previous row, and records arrive a few
    steps late. So W&B's own step counter is neither used nor advanced: metrics are
    added to the rows that the training logs, and plotted against `gradscale/step`. If
    several steps fall into one row, the last one is kept.

    Args:
        run: Returned by `wandb.init`; the caller finishes it.
        every: Interval in steps; a step with a verdict other than ok is always sent.
        commit: End the row with every call. For runs that log nothing else, or never
            pass `step`.
    """

    def __init__(self, run: WandbRun, *, every: int = 1, commit: bool = False) -> None:
        self._run = run
        self._commit = commit
        self._figures = Figures(every)
        run.define_metric("gradscale/step")
        run.define_metric("gradscale/*", step_metric="gradscale/step")

    @classmethod
    def start(cls, *, every: int = 1, **settings: Any) -> "WandbSink":
        """Start a W&B run for these metrics only, with the arguments of `wandb.init`.

        Raises:
            ModuleNotFoundError: wandb is not installed.
        """
        try:
            import wandb  # type: ignore[import-not-found,unused-ignore]  # an extra
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "wandb is not installed. It is needed to start a W&B run. "
                "Run: pip install wandb",
                name="wandb",
            ) from error
        return cls(wandb.init(**settings), every=every, commit=True)

    def see(self, record: StepRecord, judgement: Judgement) -> None:
        """Log one step."""
        figures = self._figures.see(record, judgement)
        if figures is None:
            return
        row = {"gradscale/step": record.step, **_prefixed(figures)}
        if judgement.findings:
            row["gradscale/finding"] = judgement.findings[-1].text()
        self._run.log(row, commit=self._commit)

    def finish(self) -> None:
        """Finish the run that `start` created."""
        finish = getattr(self._run, "finish", None)
        if finish is not None:
            finish()


def _prefixed(figures: Mapping[str, float | int]) -> dict[str, Any]:
    return {f"gradscale/{name}": value for name, value in figures.items()}
