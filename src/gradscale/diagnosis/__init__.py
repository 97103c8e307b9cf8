"""Reads run files and returns findings. Pure: writes, prints and draws nothing.

`diagnose_run` reads one run, `compare_runs` two.
"""

from gradscale.diagnosis.comparison import Comparison, compare_runs
from gradscale.diagnosis.diagnosis import Diagnosis, diagnose_run

__all__ = ["Comparison", "Diagnosis", "compare_runs", "diagnose_run"]
