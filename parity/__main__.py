"""`python -m parity`."""

import sys

from parity import run

# Processes that tests start import the main module again, but never a __main__.py.
sys.modules["__main__"] = run
sys.exit(run.main())
