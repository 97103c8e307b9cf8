"""Keras' own tests that use its `LossScaleOptimizer`, run with gradscale's class.

`KERAS_BACKEND=jax python -m parity.keras_tests` prints the result as JSON. The tests
are part of Keras' wheel.

    --baseline  leave Keras' class in place
    --lift      run the tests that Keras skips on JAX: those of the stateful `apply`
    --unbound   swap nothing, and still count our class, as if a place were forgotten
"""

import argparse
import importlib
import json
import os
import sys
from collections import Counter
from pathlib import Path

import keras
import pytest

# Files of the wheel, and which of their tests make the class; None for all.
TESTS = {
    "optimizers/loss_scale_optimizer_test.py": None,
    "optimizers/optimizer_sparse_test.py": ("loss_scale_optimizer_sgd",),
    "optimizers/multi_optimizer_test.py": ("wrapped_in", "blocks_nested"),
    "callbacks/swap_ema_weights_test.py": ("with_loss_scale_optimizer",),
    "trainers/trainer_test.py": ("adds_loss_scaling", "prevents_underflow"),
}
# All that binds the class by name.
PLACES = (
    "keras.optimizers",
    "keras.mixed_precision",
    "keras.src.optimizers",
    "keras.src.optimizers.loss_scale_optimizer",
    "keras.src.optimizers.multi_optimizer",
    "keras.src.trainers.trainer",
)
NAME = "LossScaleOptimizer"


def swap() -> type:
    """Replace Keras' class everywhere before a test file imports it; return ours."""
    from gradscale.keras import LossScaleOptimizer

    for place in PLACES:
        setattr(importlib.import_module(place), NAME, LossScaleOptimizer)
    bound = [
        name
        for name, module in sorted(sys.modules.items())
        if name.startswith("keras") and getattr(module, NAME, None) is not None
        if getattr(module, NAME) is not LossScaleOptimizer
    ]
    assert not bound, f"Keras binds its class in {bound} too: add them to PLACES"
    return LossScaleOptimizer


class Account:
    """A pytest plugin: chooses the tests, counts them and the optimizers they make."""

    def __init__(self, lift: bool) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failed: list[str] = []
        self.makers: set[str] = set()
        self._lift = lift
        self._running = ""

    def made(self) -> None:
        self.makers.add(self._running)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if _chosen(item)]
        for item in items if self._lift else ():
            item.cls._skip_test_for_stateless = lambda self, stateless: None

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._running = item.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.skipped or report.failed:
            self.outcomes[report.outcome] += 1
            if report.failed:
                self.failed.append(report.nodeid.split("::")[-1])


def _chosen(item: pytest.Item) -> bool:
    for file, words in TESTS.items():
        if item.path.as_posix().endswith(file):
            return words is None or any(word in item.name for word in words)
    return False


def count_instances(kind: type, account: Account) -> None:
    """Report every instance of the class to the account."""
    original = kind.__init__

    def __init__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        account.made()
        original(self, *args, **kwargs)

    kind.__init__ = __init__  # type: ignore[misc]


def main(argv: list[str] | None = None) -> int:
    """Run the tests, print the account, return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--lift", action="store_true")
    parser.add_argument("--unbound", action="store_true")
    options = parser.parse_args(argv)
    account = Account(options.lift)
    kind = keras.optimizers.LossScaleOptimizer
    if options.unbound:
        kind = importlib.import_module("gradscale.keras").LossScaleOptimizer
    elif not options.baseline:
        kind = swap()
    count_instances(kind, account)
    folder = Path(keras.__file__).parent / "src"
    settings = [
        *("-c", os.devnull, "--rootdir", str(folder), "--noconftest", "-q"),
        *("--disable-plugin-autoload", "-p", "no:cacheprovider", "--disable-warnings"),
    ]
    code = pytest.main([*settings, *(str(folder / f) for f in TESTS)], [account])
    result = {
        "backend": keras.backend.backend(),
        "class": f"{kind.__module__}.{kind.__qualname__}",
        **account.outcomes,
        "tests that made it": len(account.makers),
        "names of failed tests": account.failed,
    }
    print(json.dumps(result))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
