"""Runs the same cases in the same order on real ranks, over gloo.

A module of cases has a table `CASES` from names to functions of the rank. `seen_by`
starts the ranks and returns their results. The module is imported once, in a launcher
process that forks the ranks: importing torch takes longer than most cases.
"""

import datetime
import gc
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch

# The first optimizer of a rank would import it, in 2 s.
import torch._dynamo
import torch.distributed as dist

ROOT = Path(__file__).parents[3]
# A rank that waits longer for another one fails.
PATIENCE = datetime.timedelta(seconds=60)


class Cases(dict):
    """A table of cases, filled by decorating functions."""

    def case(self, name):
        """Enter a function of the rank under a name."""

        def enter(function):
            assert name not in self, name
            self[name] = function
            return function

        return enter


def without_gpu():
    """Return the environment of a rank that sees no GPU.

    Where it sees one, FSDP2 over gloo crashes in PyTorch 2.11, with any scaler.
    """
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def seen_by(module, ranks, folder, timeout=280):
    """Run a module's cases on several ranks; return the results of each, by case."""
    command = [sys.executable, "-m", __name__, module, str(ranks), str(folder)]
    launcher = subprocess.Popen(
        command, cwd=ROOT, env=without_gpu(), start_new_session=True
    )
    try:
        launcher.wait(timeout=timeout)
    finally:
        # The ranks are in the launcher's process group.
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    silent = [rank for rank in range(ranks) if not (folder / f"{rank}.json").exists()]
    exits = folder / "exits.json"
    codes = json.loads(exits.read_text()) if exits.exists() else launcher.returncode
    assert not silent, f"ranks {silent} wrote no results; exit codes: {codes}"
    return written_in(folder, module, ranks)


def written_in(folder, module, ranks):
    """Return what the processes saw that have run in this folder, by case."""
    seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    cases = importlib.import_module(module).CASES
    return {name: [one.get(name) for one in seen] for name in cases}


def all_saw(seen, name):
    """Return what the ranks saw of a case that went through on all of them."""
    for rank, one in enumerate(seen[name]):
        assert one is not None, f"rank {rank} failed in an earlier case"
        failed = isinstance(one, dict) and "failed" in one
        assert not failed, f"rank {rank}: {one['failed']}"
    return seen[name]


def plain(value):
    """Return `value` as JSON has it: inf and NaN as text."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def launch(module: str, ranks: int, folder: Path) -> None:
    """Import the cases, fork the ranks, and write their exit codes."""
    # Before any operation: a forked thread pool would hang.
    torch.set_num_threads(1)
    importlib.import_module(module)
    # Ranks collect, and search for their models, among their own objects only.
    gc.freeze()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            run_cases(module, ranks, folder, rank)
            gc.unfreeze()
            return
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / "exits.json").write_text(json.dumps(codes))
    gc.unfreeze()


def run_cases(module: str, ranks: int, folder: Path, rank: int) -> None:
    """Run every case and write the results of this rank."""
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=ranks,
        timeout=PATIENCE,
    )
    seen = {}
    for name, run in importlib.import_module(module).CASES.items():
        try:
            seen[name] = plain(run(rank))
        except Exception as error:
            seen[name] = {"failed": f"{type(error).__name__}: {error}"}
            # The ranks are out of step: further cases would hang.
            break
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    launch(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
