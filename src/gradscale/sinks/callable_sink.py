"""A run's figures to any function."""

from collections.abc import Callable, Mapping

from gradscale.core.records import StepRecord
from gradscale.judge.judge import Judgement
from gradscale.sinks.figures import Figures


class CallableSink:
    """Calls a function with the step and its figures, as `Figures` names them.

    Args:
        function: Called as `function(step, figures)`.
        every: The distance of steps that are told; a step that was not ok always is.
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
        """Tell one step."""
        figures = self._figures.see(record, judgement)
        if figures is not None:
            self._function(record.step, figures)
