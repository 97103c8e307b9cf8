"""The metrics of a step, under the names that all sinks use."""

from collections import deque

from gradscale.core.records import StepRecord, Verdict
from gradscale.errors import ConfigError
from gradscale.judge.judge import Judgement
from gradscale.judge.trend import TOP, exponent
from gradscale.judge.verdict_table import BY_VERDICT

# Window of the skip rate, in steps.
WINDOW = 100


class Figures:
    """Computes the metrics of a step, and selects the steps that are sent.

    | metric | meaning |
    |---|---|
    | `scale_log2` | log2 of the scale that multiplied the loss |
    | `skipped_total` | steps skipped since the sink was created |
    | `skip_rate_100` | share of the last 100 steps that were skipped |
    | `headroom_bits` | bits between the largest scaled gradient and 65504 |
    | `grad_norm` | norm of the unscaled gradients |
    | `underflow_frac` | share of elements too small for float16, if sampled |

    The last three are absent if unknown. Steps without gradients count as neither
    applied nor skipped.

    Args:
        every: Interval in steps; a step with a verdict other than ok is always sent.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ConfigError(
                f"every={every} is not a valid interval. Every every-th step is sent, "
                "so it must be at least 1. Pass 1 to send all steps.",
                code="GS101",
            )
        self._every = every
        self._skipped = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW)

    def see(
        self, record: StepRecord, judgement: Judgement
    ) -> dict[str, float | int] | None:
        """Count one step; return its metrics, or None if the step is not sent."""
        verdict = judgement.verdict
        if verdict is not Verdict.NO_GRADIENTS:
            # A step with a non-finite loss and finite gradients is applied.
            skipped = not record.applied and BY_VERDICT[verdict].skipped
            self._skipped += skipped
            self._recent.append(skipped)
        if verdict is Verdict.OK and record.step % self._every:
            return None
        return self._metrics(record)

    def _metrics(self, record: StepRecord) -> dict[str, float | int]:
        recent = self._recent
        figures: dict[str, float | int] = {
            "scale_log2": exponent(record.scale),
            "skipped_total": self._skipped,
            "skip_rate_100": sum(recent) / len(recent) if recent else 0.0,
        }
        if record.finite and record.amax > 0.0:
            figures["headroom_bits"] = round(TOP - exponent(record.amax), 2)
        if record.grad_norm is not None:
            figures["grad_norm"] = record.grad_norm
        if record.lost is not None:
            figures["underflow_frac"] = record.lost
        return figures
