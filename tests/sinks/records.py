"""Steps for sinks to see."""

import math

from gradscale import StepRecord
from gradscale.judge.judge import Judge


def feed(*sinks, steps=30):
    """Show sinks a run that skips four steps, and then is well; step 20 is sampled."""
    judge = Judge()
    for step in range(1, steps + 1):
        well = step > 4
        record = StepRecord(
            step=step,
            scale=2.0 ** max(12, 17 - step),
            applied=well,
            finite=well,
            calibrated=step > 5,
            amax=2047.0 if well else math.inf,
            grad_norm=0.5 if well else None,
            lost=0.125 if step == 20 else None,
        )
        judgement = judge.see(record)
        for sink in sinks:
            sink.see(record, judgement)
