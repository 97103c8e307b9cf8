"""Reports the locations that the module hooks found, each module once."""

from gradscale.core.records import Verdict
from gradscale.recording.recorded_run import RecordedRun
from gradscale.torch.locate.result import Location


class LocationReport:
    """Prints and records locations of non-finite values, each module once.

    Args:
        run: Prints and records.
    """

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._reported: set[tuple[str | None, str]] = set()

    def report(self, location: Location, step: int) -> None:
        """Record and print the location in a step, if it is new."""
        key = location.module, location.direction
        if not location.found or key in self._reported:
            return
        self._reported.add(key)
        code = Verdict.OVERFLOW.value if location.loss_finite else "GS203"
        if self._run.recorder is not None:
            fields = location.as_dict()
            self._run.recorder.event(
                code, step=step, where=location.module, data=fields
            )
        text = f"{code} step {step}: first non-finite value\n{location.text()}"
        self._run.report(text)

    def clear(self) -> None:
        """Allow every module to be reported again."""
        self._reported.clear()
