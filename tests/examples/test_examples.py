"""The examples for several processes, started by torchrun as a user starts them."""

import math
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

from gradscale.torch import GradScaler

EXAMPLES = Path(__file__).parents[2] / "examples"
SKIPPED = "step 5 skipped, the scale is now 2^15"
# The first run stops here, the resumed one there.
STOP, END = 12, 16
PATIENCE = 150


class Example(NamedTuple):
    """An example, how many processes start it, and how many resume."""

    name: str
    ranks: int
    ranks_later: int


EACH = [Example("ddp", 2, 2), Example("fsdp2", 4, 2), Example("tensor_parallel", 2, 2)]


def run(name, ranks, folder, *arguments):
    """Return what an example printed; nothing of it outlives the call."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    example = ["--nproc-per-node", str(ranks), str(EXAMPLES / f"{name}.py")]
    started = subprocess.Popen(
        [*torchrun, *example, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Torchrun and its processes as one group, which can be ended as one.
        start_new_session=True,
    )
    try:
        printed, complaints = started.communicate(timeout=PATIENCE)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    assert started.returncode == 0, complaints
    return printed.splitlines()


@pytest.fixture(scope="module", params=EACH, ids=lambda example: example.name)
def example(request):
    return request.param


@pytest.fixture(scope="module")
def folder(example, tmp_path_factory):
    return tmp_path_factory.mktemp(example.name)


@pytest.fixture(scope="module")
def first(example, folder):
    steps = ("--steps", str(STOP), "--save-every", "8")
    return run(example.name, example.ranks, folder, *steps)


@pytest.fixture(scope="module")
def later(example, folder, first):
    # Read before the resumed run writes its own.
    kept = scaler_of(example.name, folder)
    steps = ("--steps", str(END), "--resume")
    return kept, run(example.name, example.ranks_later, folder, *steps)


def scaler_of(name, folder):
    """Return the state of the scaler in the last checkpoint."""
    if name == "ddp":
        path = folder / "checkpoints" / "ddp.pt"
        return torch.load(path, weights_only=True)["scaler"]
    last = max((folder / "checkpoints" / name).glob("step-*"))
    scaler = GradScaler("cpu")
    with warnings.catch_warnings():
        # Torch says that it reads in one process, which is what is asked for.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load({"scaler": scaler}, checkpoint_id=last)
    return scaler.state_dict()


def progress(lines):
    """Return (step, loss, postfix) of each line that tells of a step."""
    found = (re.fullmatch(r"step (\d+): loss (\S+), norm \S+, (.*)", x) for x in lines)
    return [(int(m[1]), float(m[2]), m[3]) for m in found if m]


def test_the_spoilt_step_is_skipped_on_all_ranks(example, first):
    told = [line for line in first if "skipped, the scale" in line]
    assert sorted(told) == [f"rank {rank}: {SKIPPED}" for rank in range(example.ranks)]


def test_rank_0_tells_how_far_it_is(first):
    assert [(step, tail) for step, _, tail in progress(first)] == [
        (10, "S=2^15 skipped 1/10"),
        (STOP, f"S=2^15 skipped 1/{STOP}"),
    ]


def test_it_learns(first):
    # Who knows nothing of 256 bytes has a loss of log 256.
    assert progress(first)[-1][1] < 0.85 * math.log(256)


def test_the_checkpoint_has_the_state_of_the_scaler(later):
    kept, _ = later
    assert (kept["scale"], kept["_growth_tracker"]) == (2.0**15, STOP - 5)
    assert kept["gradscale"]["tallies"] == [[STOP - 1, 1], [STOP - 1, 1]]


def test_a_resumed_run_goes_on_where_the_first_one_stopped(later):
    _, lines = later
    assert lines[0] == f"resumed after step {STOP}, S=2^15 skipped 1/{STOP}"
    assert [(step, tail) for step, _, tail in progress(lines)] == [
        (END, f"S=2^15 skipped 1/{END}")
    ]
    assert not any("skipped, the scale" in line for line in lines)


def test_no_unfinished_checkpoint_is_left(example, folder, later):
    names = {path.name for path in (folder / "checkpoints").rglob("*unfinished*")}
    assert names == set()
    if example.name != "ddp":
        kept = {path.name for path in (folder / "checkpoints" / example.name).iterdir()}
        assert kept == {"step-000008", "step-000012", "step-000016"}


@pytest.mark.parametrize(
    "example", [EACH[0], EACH[2]], indirect=True, ids=lambda e: e.name
)
def test_a_resumed_run_ends_like_one_that_was_not_stopped(example, later, tmp_path):
    whole = run(example.name, example.ranks, tmp_path, "--steps", str(END))
    assert whole[-1] == later[1][-1]


def test_without_torchrun_it_says_how_to_start_it(example):
    path = EXAMPLES / f"{example.name}.py"
    alone = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, env=alone, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "Start it with torchrun; the first lines of the file say how."
    )
