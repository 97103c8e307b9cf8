"""Sinks: metrics of each step for TensorBoard, W&B, `logging` or a function.

Each sink is a class with `see(record, judgement)`, called once per step. Importing
this package loads none of the libraries: their objects are passed in.

>>> from gradscale import StepRecord
>>> from gradscale.judge.judge import Judge
>>> judge, sink = Judge(), CallableSink(lambda step, figures: print(step, figures))
>>> record = StepRecord(step=1, scale=1024.0, applied=True, finite=True, amax=2047.0)
>>> sink.see(record, judge.see(record))
1 {'scale_log2': 10.0, 'skipped_total': 0, 'skip_rate_100': 0.0, 'headroom_bits': 5.0}
"""

from gradscale.sinks.callable_sink import CallableSink
from gradscale.sinks.figures import Figures
from gradscale.sinks.logging_sink import LoggingSink
from gradscale.sinks.tensorboard_sink import TensorBoardSink
from gradscale.sinks.wandb_sink import WandbSink

__all__ = ["CallableSink", "Figures", "LoggingSink", "TensorBoardSink", "WandbSink"]
