"""Hypothesis: the same examples in every run, others on request.

`HYPOTHESIS_PROFILE=explore make test` draws new examples, and more of them.
"""

import os

from hypothesis import settings

settings.register_profile("steady", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
