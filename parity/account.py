"""What became of every test of the inventory, and whether that is enough."""

import shutil
from collections import defaultdict
from collections.abc import Iterator
from enum import IntEnum

import torch

from parity.inventory import INVENTORY, Entry, Needs, Uses


class Outcome(IntEnum):
    """How an instance ended; of several reports on one, the highest counts."""

    PASSED = 0
    SKIPPED = 1
    FAILED = 2


def lacking(needs: Needs) -> bool:
    """Return True if this machine cannot run a test that needs `needs`."""
    if needs is Needs.COMPILER:
        return not any(map(shutil.which, ("g++", "clang++", "c++", "cl")))
    if needs is Needs.MPS:
        return not torch.backends.mps.is_available()
    if needs is Needs.XPU:
        return not torch.xpu.is_available()
    gpus = {Needs.CUDA: 1, Needs.GPUS_2: 2, Needs.GPUS_4: 4}.get(needs, 0)
    return torch.cuda.device_count() < gpus


def wanted(entry: Entry, name: str) -> bool:
    """Return True if the instance `name` of `entry` can run here and says something."""
    # PyTorch makes a CPU copy of every generic test; a CUDA test's copy only skips.
    idle = not entry.needs.cpu and "_cpu" in name.removeprefix(entry.test)
    return not idle and not lacking(entry.needs)


class Account:
    """Outcomes by entry and instance; `lines()` tells them, `good` judges them."""

    def __init__(self) -> None:
        self.outcomes: dict[Entry, dict[str, Outcome]] = defaultdict(dict)
        self.reasons: dict[str, str] = {}
        self.broken: dict[str, str] = {}

    def add(self, entry: Entry, name: str, outcome: Outcome, reason: str = "") -> None:
        """Note a report on the instance `name`."""
        before = self.outcomes[entry].get(name, Outcome.PASSED)
        self.outcomes[entry][name] = max(before, outcome)
        if reason:
            self.reasons[name] = reason

    def shortfall(self, entry: Entry) -> int:
        """Return how many expected instances did not pass; extra ones do not count.

        The CUDA copies of a test that also runs on CPU are extra: they may be skipped.
        """
        if lacking(entry.needs):
            return 0
        passed = [
            name
            for name, outcome in self.outcomes[entry].items()
            if outcome is Outcome.PASSED and not self._extra(entry, name)
        ]
        return max(0, entry.instances - len(passed))

    @staticmethod
    def _extra(entry: Entry, name: str) -> bool:
        return entry.needs.cpu and "_cuda" in name.removeprefix(entry.test)

    @property
    def good(self) -> bool:
        """True if nothing failed and every expected instance passed."""
        ended = (o for outcomes in self.outcomes.values() for o in outcomes.values())
        return Outcome.FAILED not in ended and not any(map(self.shortfall, INVENTORY))

    def lines(self) -> Iterator[str]:
        """Yield the account, name by name, then the sum."""
        file = ""
        for entry in INVENTORY:
            if entry.file != file:
                file = entry.file
                yield file
            yield f"  {self._line(entry)}"
            for name, outcome in sorted(self.outcomes[entry].items()):
                if outcome is not Outcome.PASSED:
                    reason = self.reasons.get(name, "")
                    yield f"    {outcome.name.lower()}: {name}: {reason}"
        yield self._sum()

    def _line(self, entry: Entry) -> str:
        if lacking(entry.needs):
            return f"{entry.test}: not run, needs {entry.needs.value}"
        ended = self.outcomes[entry]
        passed = sum(outcome is Outcome.PASSED for outcome in ended.values())
        line = f"{entry.test}: {passed} of {max(entry.instances, len(ended))} passed"
        if len(ended) < entry.instances:
            why = self.broken.get(entry.file, "no test of that name")
            line += f", {entry.instances - len(ended)} not found ({why})"
        if entry.uses is not Uses.SCALER:
            line += f" [{entry.uses.value}]"
        return line

    def _sum(self) -> str:
        runnable = [entry for entry in INVENTORY if not lacking(entry.needs)]
        expected = sum(entry.instances for entry in runnable)
        missed = sum(map(self.shortfall, runnable))
        failed = sum(
            outcome is Outcome.FAILED
            for outcomes in self.outcomes.values()
            for outcome in outcomes.values()
        )
        return (
            f"parity: {expected - missed} of {expected} expected instances passed, "
            f"{failed} failed, {len(INVENTORY) - len(runnable)} tests of "
            f"{len(INVENTORY)} cannot run on this machine"
        )
