"""Metrics for the standard library's logging."""

import logging
from typing import ClassVar

from gradscale.core.formatting import power
from gradscale.core.records import StepRecord
from gradscale.judge.judge import Judgement
from gradscale.sinks.figures import Figures


class LoggingSink:
    """Logs one line of metrics every `every` steps, and every finding.

    Findings are then not reported on the console as well.

    Metrics and normal findings have level INFO, other findings WARNING, and ERROR if no
    scale can help. The metrics are also the attribute `figures` of the log record, for
    JSON formatters.

    >>> import sys
    >>> from gradscale.judge.judge import Judge
    >>> log = logging.Logger("training")
    >>> log.addHandler(logging.StreamHandler(sys.stdout))
    >>> judge, sink = Judge(), LoggingSink(log, every=2)
    >>> for step in (1, 2):
    ...     record = StepRecord(step=step, scale=1024.0, applied=True, finite=True)
    ...     sink.see(record, judge.see(record))
    step 2 ok S=2^10 skipped_total=0 skip_rate_100=0

    Args:
        logger: The logger named gradscale if None.
        every: Interval in steps.
    """

    logs_findings: ClassVar[bool] = True

    def __init__(
        self, logger: logging.Logger | None = None, *, every: int = 100
    ) -> None:
        self._logger = logger or logging.getLogger("gradscale")
        self._every = every
        self._figures = Figures(every)

    def see(self, record: StepRecord, judgement: Judgement) -> None:
        """Log the metrics of one step, if due, and its findings."""
        figures = self._figures.see(record, judgement)
        # No line per skip: findings report skips.
        if figures is not None and record.step % self._every == 0:
            words = [f"S={power(record.scale)}"]
            words += [f"{k}={v:.4g}" for k, v in figures.items() if k != "scale_log2"]
            text = f"step {record.step} {judgement.verdict} {' '.join(words)}"
            self._logger.info("%s", text, extra={"figures": figures})
        for finding in judgement.findings:
            level = logging.ERROR if finding.hopeless else logging.WARNING
            level = logging.INFO if finding.normal else level
            self._logger.log(level, "%s", finding.text())
