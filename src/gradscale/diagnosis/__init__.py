"""A run file in, findings out. Pure: nothing is written, printed or drawn.

`diagnose_run` reads one run, `compare_runs` two.
"""

from gradscale.diagnosis.comparison import Comparison, compare_runs
from gradscale.diagnosis.diagnosis import Diagnosis, diagnose_run

__all__ = ["Comparison", "Diagnosis", "compare_runs", "diagnose_run"]
