"""A run file in, findings out. Pure: nothing is written, printed or drawn.

`diagnose_run` reads one run, `compare_runs` two.
"""

from gradscale.diagnosis.diagnosis import Diagnosis, diagnose_run

__all__ = ["Diagnosis", "diagnose_run"]
