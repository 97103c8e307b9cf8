"""Step records for sinks."""

import math

from gradscale import StepRecord
from gradscale.judge.judge import Judge


def feed(*sinks, steps=30):
    """Feed sinks a run that skips four steps, then is healthy; step 20 is sampled."""
    judge = Judge()
    for step in range(1, steps + 1):
        healthy = step > 4
        record = StepRecord(
            step=step,
            scale=2.0 ** max(12, 17 - step),
            applied=healthy,
            finite=healthy,
            calibrated=step > 5,
            amax=2047.0 if healthy else math.inf,
            grad_norm=0.5 if healthy else None,
            lost=0.125 if step == 20 else None,
        )
        judgement = judge.see(record)
        for sink in sinks:
            sink.see(record, judgement)
