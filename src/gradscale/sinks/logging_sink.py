"""A run's figures to the standard library's logging."""

import logging

from gradscale.core.formatting import power
from gradscale.core.records import StepRecord
from gradscale.judge.judge import Judgement
from gradscale.sinks.figures import Figures


class LoggingSink:
    """Logs a line of figures now and then, and every finding.

    Figures are logged at INFO; so is a finding that is normal. Others are warnings,
    and errors if no scale can help. The figures are also the attribute `figures` of
    the log record, for formatters that write JSON.

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
        logger: Where to; the logger named gradscale if None.
        every: The distance of steps that are logged.
    """

    def __init__(
        self, logger: logging.Logger | None = None, *, every: int = 100
    ) -> None:
        self._logger = logger or logging.getLogger("gradscale")
        self._every = every
        self._figures = Figures(every)

    def see(self, record: StepRecord, judgement: Judgement) -> None:
        """Log one step, if it is due, and what there is to say of it."""
        figures = self._figures.see(record, judgement)
        # Not one line a skip: what skips mean is said by the findings.
        if figures is not None and record.step % self._every == 0:
            words = [f"S={power(record.scale)}"]
            words += [f"{k}={v:.4g}" for k, v in figures.items() if k != "scale_log2"]
            text = f"step {record.step} {judgement.verdict} {' '.join(words)}"
            self._logger.info("%s", text, extra={"figures": figures})
        for finding in judgement.findings:
            level = logging.ERROR if finding.hopeless else logging.WARNING
            level = logging.INFO if finding.normal else level
            self._logger.log(level, "%s", finding.text())
