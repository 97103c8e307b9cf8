"""A process that records at full rate until it is killed: `killed.py FILE WAY PACE`.

It tells on stdout, in pairs of doubles, which step it has handed over and when. Every
figure of a row follows from its step, so that a torn row shows.
"""

import os
import struct
import sys
import time

from gradscale.runfile import RunWriter, StepRow, TensorSample
from gradscale.runfile import committer as thread

TENSORS = [f"layer.{number}.weight" for number in range(20)]
# What is told at once; each step is told before the next one is handed over.
TOLD = struct.Struct("dd")
EVERY = 10


def expected(row: StepRow) -> StepRow:
    """Return what the row of this step must be, but for its time."""
    step = row.step
    verdict = "GS201" if step % 50 == 0 else "GS000"
    norm, loss = step * 0.5, None if step % 3 == 0 else 1.0 / step
    return StepRow(step, row.time, 1024.0, step % 50 != 0, verdict, norm, norm, loss)


def peaks(step: int) -> dict[str, float]:
    return {name: step + place / 64 for place, name in enumerate(TENSORS)}


def samples(step: int) -> dict[str, TensorSample]:
    histogram = [step] * 40
    return dict.fromkeys(TENSORS, TensorSample(40 * step, 0, 10 * step, histogram))


def main(path: str, journal: str, pace: float) -> None:
    thread.COMMIT_EVERY = pace
    writer = RunWriter(path, journal=journal, sample_every=100)
    for step in range(1, 10**9):
        row = expected(StepRow(step, 0.0, 0.0, True, "", None, None, None))
        writer.step(step, *row[2:])
        if step % EVERY == 0:
            os.write(1, TOLD.pack(step, time.time()))
            # Leaves the other thread its turn: about 10,000 steps a second.
            time.sleep(0.0005)
        if step % 50 == 0:
            writer.peaks(step, peaks(step))
            writer.event("GS201", step=step, where="layer.0", data={"step": step})
        if writer.due(step):
            writer.samples(step, samples(step))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
