"""A run's figures to W&B."""

from collections.abc import Mapping
from typing import Any, Protocol

from gradscale.core.records import StepRecord
from gradscale.judge.judge import Judgement
from gradscale.sinks.figures import Figures


class WandbRun(Protocol):
    """What is used of the object that `wandb.init` returns."""

    def log(self, data: dict[str, Any], *, commit: bool | None = None) -> Any: ...

    def define_metric(self, name: str, step_metric: str | None = None) -> Any: ...


class WandbSink:
    """Logs figures under `gradscale/`, against a step of their own.

    W&B refuses rows whose step is lower than one it has seen, and the facts of a step
    arrive a little later than the step itself. So W&B's own counter is neither used
    nor moved: figures ride on the rows that the training logs, and are drawn against
    `gradscale/step`. Of several steps within one row the last one stays.

    Args:
        run: What `wandb.init` returned. Finishing it is the caller's affair.
        every: The distance of steps that are logged; one that was not ok always is.
        commit: End a row with every call. For runs that log nothing else, or that
            never pass a step of their own.
    """

    def __init__(self, run: WandbRun, *, every: int = 1, commit: bool = False) -> None:
        self._run = run
        self._commit = commit
        self._figures = Figures(every)
        run.define_metric("gradscale/step")
        run.define_metric("gradscale/*", step_metric="gradscale/step")

    @classmethod
    def start(cls, *, every: int = 1, **settings: Any) -> "WandbSink":
        """Start a run for these figures alone, with the arguments of `wandb.init`.

        Raises:
            ModuleNotFoundError: wandb is not installed.
        """
        try:
            import wandb  # type: ignore[import-not-found,unused-ignore]  # an extra
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "wandb is not installed. A run of W&B is made with it. Run: pip "
                "install wandb",
                name="wandb",
            ) from error
        return cls(wandb.init(**settings), every=every, commit=True)

    def see(self, record: StepRecord, judgement: Judgement) -> None:
        """Log one step."""
        figures = self._figures.see(record, judgement)
        if figures is None:
            return
        row = {"gradscale/step": record.step, **_named(figures)}
        if judgement.findings:
            row["gradscale/finding"] = judgement.findings[-1].text()
        self._run.log(row, commit=self._commit)

    def finish(self) -> None:
        """End the run that `start` has made."""
        finish = getattr(self._run, "finish", None)
        if finish is not None:
            finish()


def _named(figures: Mapping[str, float | int]) -> dict[str, Any]:
    return {f"gradscale/{name}": value for name, value in figures.items()}
