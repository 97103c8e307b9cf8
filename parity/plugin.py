"""The pytest plugin: swap the class, lift the guards, choose the tests, give account.

`python -m parity` loads it, with PyTorch's test folder as pytest's root.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from parity.account import Account, Outcome, wanted
from parity.guards import lift_guards, sharded_on_cpu
from parity.inventory import INVENTORY, Entry, Needs, Uses, find
from parity.swap import swap

_entries: dict[str, tuple[Entry, str]] = {}
_account = Account()


def pytest_configure(config: pytest.Config) -> None:
    swap()
    lift_guards(entry for entry in INVENTORY if entry.needs is Needs.LIFT)
    for entry in INVENTORY:
        if not (config.rootpath / entry.file).is_file():
            _account.broken[entry.file] = "no such file"


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Keep the tests of the inventory that can run here."""
    kept, dropped = [], []
    for item in items:
        entry = find(item.path.as_posix(), item.name)
        if entry is not None and wanted(entry, item.name):
            _entries[item.nodeid] = entry, item.name
            kept.append(item)
        else:
            dropped.append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Remember why a file could not be read: its tests will be missing."""
    if report.failed:
        for entry in INVENTORY:
            if f"/{report.nodeid}".endswith(f"/{entry.file}"):
                error = str(report.longrepr).strip().splitlines()[-1]
                _account.broken[entry.file] = f"the file cannot be imported: {error}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    entry, _ = _entries[item.nodeid]
    lifted = entry.needs is Needs.LIFT and not torch.cuda.is_available()
    sharded = lifted and entry.uses is Uses.SHARDED
    with sharded_on_cpu() if sharded else nullcontext():
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.passed and report.when != "call":
        return
    entry, name = _entries[report.nodeid]
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        error = str(crash.message if crash else report.longrepr).splitlines()[0]
        _account.add(entry, name, Outcome.FAILED, error)
    elif report.skipped:
        reason = report.longrepr
        text = reason[2] if isinstance(reason, tuple) else str(reason)
        _account.add(entry, name, Outcome.SKIPPED, text.removeprefix("Skipped: "))
    else:
        _account.add(entry, name, Outcome.PASSED)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run for a test that is missing or skipped, which pytest lets pass."""
    if not _account.good:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    kind = torch.amp.GradScaler
    terminalreporter.section("parity with PyTorch's own tests")
    terminalreporter.line(
        f"torch.amp.GradScaler is {kind.__module__}.{kind.__qualname__}"
    )
    for line in _account.lines():
        terminalreporter.line(line)
