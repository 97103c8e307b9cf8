"""Records the locations that the module hooks found, each module once."""

from gradscale.core.records import Verdict
from gradscale.recording.recorded_run import RecordedRun
from gradscale.torch.locate.result import Location


class LocationReport:
    """Passes locations of non-finite values to the judge, each module once.

    Args:
        run: Judges and records. The finding that the location belongs to is printed.
    """

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._reported: set[tuple[str | None, str]] = set()

    def report(self, location: Location, step: int) -> None:
        """Record the location in a step, if it is new."""
        key = location.module, location.direction
        if not location.found or key in self._reported:
            return
        self._reported.add(key)
        code = Verdict.OVERFLOW if location.loss_finite else Verdict.FORWARD_NONFINITE
        fields = location.as_dict()
        self._run.observe(step, fields, code=code.code, where=location.module)

    def clear(self) -> None:
        """Allow every module to be reported again."""
        self._reported.clear()
