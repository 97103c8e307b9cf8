"""Runs the same cases in the same order on real ranks, over gloo.

A module of cases has a table `CASES` from names to functions of the rank. `seen_by`
starts the ranks and returns their results.

Importing torch takes longer than most cases. So a server imports it, once for all tests
of a pytest process; for each call it forks a launcher, which forks the ranks.
"""

import atexit
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
from functools import cache
from pathlib import Path

import torch

# The first optimizer of a rank would import it, in 2 s.
import torch._dynamo
import torch.distributed as dist

# Imported by most cases.
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import gradscale.torch  # noqa: F401

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


def seen_by(module, ranks, folder):
    """Run a module's cases on several ranks; return the results of each, by case."""
    codes = exit_codes(f"{__name__}.run_cases", ranks, folder, module)
    silent = [rank for rank in range(ranks) if not (folder / f"{rank}.json").exists()]
    assert not silent, f"ranks {silent} wrote no results; exit codes: {codes}"
    return written_in(folder, module, ranks)


def exit_codes(function, ranks, folder, *arguments, timeout=280):
    """Call a function on several ranks; return their exit codes.

    Args:
        function: Its name, with that of its module. Called with the rank, the number of
            ranks, the folder and the arguments.
        ranks: How many.
        folder: Where the exit codes are written.
        arguments: Strings.
        timeout: Seconds after which the ranks are killed.
    """
    server = started_server()
    job = [function, ranks, str(folder), arguments, timeout, without_gpu()]
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    code = server.stdout.readline()
    assert code == "0\n", f"the launcher of {function} ended with {code!r}"
    return json.loads((folder / "exits.json").read_text())


@cache
def started_server():
    """Return the process that forks launchers; it ends with this one."""
    server = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env=without_gpu(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


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


def serve() -> None:
    """Fork a launcher for each line of stdin; print its exit code."""
    # Before any operation: a forked thread pool would hang.
    torch.set_num_threads(1)
    # Not `for line in sys.stdin`: it reads ahead, and forks would read the rest again.
    while line := sys.stdin.readline():
        launcher = os.fork()
        if not launcher:
            # Standard output is for exit codes.
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
            launch(*json.loads(line))
            return
        code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
        # Ranks that are left are in the launcher's process group.
        with suppress(ProcessLookupError):
            os.killpg(launcher, signal.SIGKILL)
        print(code, flush=True)


def launch(function, ranks, folder, arguments, timeout, environment) -> None:
    """Import the function, fork the ranks, and write their exit codes."""
    os.setsid()
    signal.alarm(timeout)
    os.environ.clear()
    os.environ.update(environment)
    folder = Path(folder)
    module, name = function.rsplit(".", 1)
    call = getattr(importlib.import_module(module), name)
    # Ranks collect, and search for their models, among their own objects only.
    gc.freeze()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            call(rank, ranks, folder, *arguments)
            gc.unfreeze()
            return
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / "exits.json").write_text(json.dumps(codes))
    leave()


def leave() -> None:
    """End a forked process at once: Python's own end takes 1.5 s for all modules."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_cases(rank: int, ranks: int, folder: Path, module: str) -> None:
    """Run every case of a module and write the results of this rank."""
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
    leave()


if __name__ == "__main__":
    serve()
