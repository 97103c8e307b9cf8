"""Only in the environment of `make test-mxnet`: MXNet cannot share one with JAX."""

import importlib.util
import warnings

INSTALLED = importlib.util.find_spec("mxnet") is not None

if INSTALLED:
    with warnings.catch_warnings():
        # MXNet's own code, at its import.
        warnings.simplefilter("ignore")
        import mxnet  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_terminal_summary(terminalreporter) -> None:
    """Name the reason if nothing was collected here."""
    if not INSTALLED:
        terminalreporter.write_line(
            "tests/mxnet was not collected: MXNet is not installed in this "
            "environment. make test-mxnet runs it in one of its own."
        )
