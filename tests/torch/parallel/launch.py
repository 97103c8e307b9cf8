"""Real processes that run the same cases in the same order, over gloo.

A module of cases has a table `CASES` from names to functions of the rank. `seen_by`
starts the processes and returns what each of them saw.
"""

import datetime
import importlib
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[3]
# A rank that waits for another in vain is an error, and soon.
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
    """Run a module's cases in so many processes; return what they saw, by case."""
    command = [sys.executable, "-m", __name__, module, str(ranks), str(folder)]
    running = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=without_gpu())
        for rank in range(ranks)
    ]
    try:
        for process in running:
            process.wait(timeout=timeout)
    finally:
        for process in running:
            process.kill()
            process.wait()
    silent = {
        rank: process.returncode
        for rank, process in enumerate(running)
        if not (folder / f"{rank}.json").exists()
    }
    assert not silent, f"ranks that ended before they wrote, and how: {silent}"
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


def main(module: str, ranks: int, folder: Path, rank: int) -> None:
    """Run every case and write down what this rank saw."""
    torch.set_num_threads(1)
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
            # The ranks no longer stand at the same call: the rest means nothing.
            break
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
