"""The record of a run: one SQLite file, written during the run.

`RunWriter` writes it; `open_run` reads it, also at the same time and from another
process. docs/runfile.md describes the format.

>>> import tempfile
>>> from gradscale.runfile import RunWriter, open_run
>>> folder = tempfile.TemporaryDirectory()
>>> with RunWriter(folder.name + "/run.gs") as writer:
...     writer.step(1, 65536.0, False, "GS201", amax=float("inf"))
...     writer.peaks(1, {"head.weight": float("inf"), "head.bias": 12.0})
...     writer.event("GS201", step=1, where="head.weight", data={"nonfinite": 3})
>>> with open_run(folder.name + "/run.gs") as run:
...     [row] = run.steps()
...     print(row.verdict, row.amax, row.loss, run.peaks(1))
...     print([(event.code, event.where, event.data) for event in run.events()])
...     print(run.meta["end"]["state"])
GS201 inf None {'head.weight': inf, 'head.bias': 12.0}
[('GS201', 'head.weight', {'nonfinite': 3})]
closed
>>> folder.cleanup()
"""

from gradscale.runfile.creation import journal_for, path_for_rank
from gradscale.runfile.reader import Run, open_run
from gradscale.runfile.rows import (
    BINS,
    LOWEST_EXPONENT,
    EventRow,
    SampleRow,
    StepRow,
    TensorSample,
)
from gradscale.runfile.schema import SCHEMA
from gradscale.runfile.writer import RunWriter

__all__ = [
    "BINS",
    "LOWEST_EXPONENT",
    "SCHEMA",
    "EventRow",
    "Run",
    "RunWriter",
    "SampleRow",
    "StepRow",
    "TensorSample",
    "journal_for",
    "open_run",
    "path_for_rank",
]
