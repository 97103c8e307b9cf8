"""The parity harness, on a made-up test folder that holds every name PyTorch has.

The harness runs in its own process: the swap is for good.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from parity import plugin
from parity.account import Account, Outcome, lacking
from parity.inventory import INVENTORY, Entry, Needs

ROOT = Path(__file__).parents[2]
PICKLE = "test_pickle_gradscaler"
UNSCALE = "test_grad_scaling_unscale"
STATE_DICT = "test_grad_scaling_state_dict"
PENALTY = "test_grad_scaling_penalty"
FUSED = "test_grad_scaling_autocast_fused_optimizers"
SHARDED = "test_inf_gradients_skip_optim_step"

HEAD = """
import multiprocessing
import unittest

import torch
import torch.distributed.fsdp.sharded_grad_scaler as sharded
from torch.testing._internal.common_device_type import onlyCUDA


def tell(queue):
    queue.put(torch.amp.GradScaler.__module__)


@unittest.skipIf(not torch.cuda.is_available(), "CUDA not available")
class Guarded(unittest.TestCase):
    device_type = "cpu"


class Free(unittest.TestCase):
    def test_not_of_the_inventory(self):
        self.fail("chosen by mistake")
"""

IN_A_CHILD = """
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        child = context.Process(target=tell, args=(queue,))
        child.start()
        child.join()
        self.assertTrue(queue.get().startswith("gradscale.torch"))
"""

EXPORTS = (
    "torch",
    "torch.amp",
    "torch.amp.grad_scaler",
    "torch.cuda.amp",
    "torch.cuda.amp.grad_scaler",
    "torch.cpu.amp",
    "torch.cpu.amp.grad_scaler",
)

SWAPPED = "".join(
    f"""
        self.assertTrue({place}.GradScaler.__module__.startswith("gradscale.torch"))
        self.assertTrue(issubclass({place}.GradScaler, torch.amp.GradScaler))
"""
    for place in EXPORTS
)

KEPT = """
        base = sharded.ShardedGradScaler.__mro__[1]
        self.assertEqual(base.__module__, "torch.amp.grad_scaler")
"""

ON_CPU = """
        scaler = sharded.ShardedGradScaler(process_group=None)
        self.assertTrue(scaler.is_enabled())
"""


def write_test(entry: Entry, body: str) -> str:
    """Return the source of an entry's instances, guarded as PyTorch guards them."""
    text = ""
    for number in range(entry.instances):
        device = "cpu" if entry.needs.cpu else "cuda"
        name = f"{entry.test}_{number}_{device}"
        if entry.needs is Needs.LIFT:
            # PyTorch decorates first and makes the instances afterwards.
            text += f"""
    @onlyCUDA
    @unittest.skipIf(not torch.cuda.is_available(), "no device (cuda, xla) found")
    def {entry.test}(self):{body}
    {name} = {entry.test}
    del {entry.test}
"""
        else:
            text += f"""
    def {name}(self):{body}
"""
    return text


def write_folder(folder: Path, bodies: dict[str, str], without: str = "") -> Path:
    """Write a test folder with the inventory's names; a body is `pass` by default."""
    for file in {entry.file for entry in INVENTORY}:
        text = HEAD
        for entry in INVENTORY:
            if entry.file == file and entry.test != without:
                base = "Guarded" if entry.needs is Needs.LIFT else "Free"
                body = bodies.get(entry.test, " pass")
                text += f"\n\nclass {entry.test.title()}({base}):\n"
                text += write_test(entry, body)
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


GOOD = {
    UNSCALE: SWAPPED,
    PICKLE: IN_A_CHILD,
    STATE_DICT: KEPT,
    SHARDED: ON_CPU,
}


def write_bad(folder: Path) -> Path:
    """Write a folder in which everything that can go wrong does."""
    bodies = {
        UNSCALE: ' self.fail("no inf was found")',
        STATE_DICT: ' self.skipTest("a day off")',
    }
    write_folder(folder, bodies, without=PENALTY)
    (folder / "test_optim.py").write_text("import a_module_that_is_missing\n")
    (folder / "dynamo/test_repros.py").unlink()
    return folder


class Ended(NamedTuple):
    """How a run of the harness ended."""

    code: int
    said: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The runs, side by side: most of their time goes into importing torch."""
    folders = {
        "good": write_folder(tmp_path_factory.mktemp("good"), GOOD),
        "bad": write_bad(tmp_path_factory.mktemp("bad")),
    }
    runs = {
        name: subprocess.Popen(
            [sys.executable, "-m", "parity", str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, folder in folders.items()
    }
    said = {name: process.communicate()[0] for name, process in runs.items()}
    return {name: Ended(runs[name].returncode, said[name]) for name in runs}


@pytest.fixture
def good(ended):
    return ended["good"]


@pytest.fixture
def bad(ended):
    return ended["bad"]


def test_a_run_in_which_all_pass_ends_with_zero(good):
    assert good.code == 0, good.said
    assert " 0 failed" in good.said


def test_the_class_is_swapped_in_every_place(good):
    assert "torch.amp.GradScaler is gradscale.torch" in good.said
    assert f"{UNSCALE}: 2 of 2 passed" in good.said


def test_the_class_is_swapped_in_processes_that_a_test_starts(good):
    assert f"{PICKLE}: 1 of 1 passed" in good.said


def test_sharded_grad_scaler_keeps_its_base(good):
    assert f"{STATE_DICT}: 1 of 1 passed" in good.said


def test_guards_are_lifted_from_tests_that_need_no_cuda(good):
    assert f"{FUSED}: 4 of 4 passed" in good.said


def test_a_sharded_scaler_is_on_without_cuda(good):
    assert f"{SHARDED}: 1 of 1 passed" in good.said


def test_only_the_inventory_is_run(good):
    assert "test_not_of_the_inventory" not in good.said


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is not run without")
def test_what_cannot_run_here_is_named_with_what_it_needs(good):
    assert "test_graph_grad_scaling: not run, needs a CUDA GPU" in good.said


def test_a_failing_test_fails_the_run_and_is_named(bad):
    assert bad.code == 1
    assert f"{UNSCALE}: 0 of 2 passed" in bad.said
    assert f"failed: {UNSCALE}_0_cpu: AssertionError: no inf was found" in bad.said


def test_a_missing_test_is_named(bad):
    line = f"{PENALTY}: 0 of 1 passed, 1 not found (no test of that name)"
    assert line in bad.said


def test_a_skipped_test_is_named_with_its_reason(bad):
    assert f"skipped: {STATE_DICT}_0_cpu: a day off" in bad.said


def test_a_file_that_cannot_be_imported_is_named_with_the_error(bad):
    assert "4 not found (the file cannot be imported: " in bad.said
    assert "No module named 'a_module_that_is_missing')" in bad.said


def test_a_file_that_is_not_there_is_named(bad):
    line = "test_amp_foreach_fake_impl: 0 of 1 passed, 1 not found (no such file)"
    assert line in bad.said


def test_the_sum_counts_all_that_did_not_pass(bad):
    expected = sum(e.instances for e in INVENTORY if not lacking(e.needs))
    # 2 failed, 1 was skipped, 1 + 4 + 1 were not found.
    line = f"{expected - 9} of {expected} expected instances passed, 2 failed"
    assert line in bad.said


@pytest.fixture
def full():
    """An account in which every test of the inventory passed."""
    account = Account()
    for entry in INVENTORY:
        for number in range(entry.instances):
            account.add(entry, f"{entry.test}_{number}", Outcome.PASSED)
    return account


def finish(account, monkeypatch):
    """Return the exit code of a run that pytest itself is content with."""
    session = SimpleNamespace(exitstatus=0)
    monkeypatch.setattr(plugin, "_account", account)
    plugin.pytest_sessionfinish(session)
    return session.exitstatus


def test_a_full_account_ends_with_zero(full, monkeypatch):
    assert finish(full, monkeypatch) == 0


def test_a_missing_instance_fails_the_run(full, monkeypatch):
    full.outcomes[INVENTORY[1]].popitem()
    assert finish(full, monkeypatch) == 1


def test_a_skipped_instance_fails_the_run(full, monkeypatch):
    full.add(INVENTORY[0], f"{INVENTORY[0].test}_0", Outcome.SKIPPED)
    assert finish(full, monkeypatch) == 1


def test_a_skipped_copy_on_cuda_does_not_fail_the_run(full, monkeypatch):
    full.add(INVENTORY[0], f"{INVENTORY[0].test}_cuda", Outcome.SKIPPED)
    assert finish(full, monkeypatch) == 0


def test_a_failing_copy_on_cuda_fails_the_run(full, monkeypatch):
    full.add(INVENTORY[0], f"{INVENTORY[0].test}_cuda", Outcome.FAILED)
    assert finish(full, monkeypatch) == 1
