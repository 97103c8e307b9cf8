"""Metrics for any function."""

from collections.abc import Callable, Mapping

from gradscale.core.records import StepRecord
from gradscale.judge.judge import Judgement
from gradscale.sinks.figures import Figures


class CallableSink:
    """Calls a function with the step and its metrics, named as in `Figures`.

    Args:
        function: Called as `function(step, figures)`.
        every: Interval in steps; a step with a verdict other than ok is always sent.
    """

    def __init__(
        self,
        function: Callable[[int, Mapping[str, float | int]], object],
        *,
        every: int = 1,
    ) -> None:
        self._function = function
        self._figures = Figures(every)

    def see(self, record: StepRecord, judgement: Judgement) -> None:
        """Send one step."""
        figures = self._figures.see(record, judgement)
        if figures is not None:
            self._function(record.step, figures)
