"""The figures of a step, under the names that every sink uses."""

from collections import deque

from gradscale.core.records import StepRecord, Verdict
from gradscale.errors import ConfigError
from gradscale.judge.judge import Judgement
from gradscale.judge.trend import TOP, exponent
from gradscale.judge.verdict_table import BY_VERDICT

# Steps over which the rate of skips is taken.
WINDOW = 100


class Figures:
    """Turns steps into figures, and says which steps are worth it.

    | figure | meaning |
    |---|---|
    | `scale_log2` | log2 of the scale that multiplied the loss |
    | `skipped_total` | steps skipped since the sink was made |
    | `skip_rate_100` | the share of the last 100 steps that were skipped |
    | `headroom_bits` | bits between the largest scaled gradient and 65504 |
    | `grad_norm` | the norm of the unscaled gradients |
    | `underflow_frac` | the share of elements too small for float16, where sampled |

    The last three are absent where they are not known. Steps without a gradient count
    as neither taken nor skipped.

    Args:
        every: The distance of steps that are told; a step that was not ok always is.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ConfigError(
                f"every={every} is no distance between steps. Every every-th step is "
                "told, so it must be 1 or more. Pass 1 to have all of them.",
                code="GS101",
            )
        self._every = every
        self._skipped = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW)

    def see(
        self, record: StepRecord, judgement: Judgement
    ) -> dict[str, float | int] | None:
        """Take in one step; return its figures, None if it is not told."""
        verdict = judgement.verdict
        if verdict is not Verdict.NO_GRADIENTS:
            # A loss may be infinite beside gradients that are not, and a step taken.
            skipped = not record.applied and BY_VERDICT[verdict].skipped
            self._skipped += skipped
            self._recent.append(skipped)
        if verdict is Verdict.OK and record.step % self._every:
            return None
        return self._of(record)

    def _of(self, record: StepRecord) -> dict[str, float | int]:
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
