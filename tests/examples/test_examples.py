"""The examples for several processes.

The first run of each is started by torchrun, as a user starts it. The runs that resume
it are forked from a process that has imported torch, which takes most of a run's time.
"""

import math
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
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


EACH = [Example("ddp", 2, 2), Example("fsdp2", 2, 4), Example("tensor_parallel", 2, 2)]


def run(name, ranks, folder, *arguments):
    """Return what an example printed under torchrun; nothing of it outlives the call.

    It is started through `tests/examples/at_once.py`, which ends a rank as soon as the
    example is done: PyTorch may abort a rank while Python shuts down.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(EXAMPLES.parent / "tests/examples/at_once.py"), str(EXAMPLES / name)]
    started = subprocess.Popen(
        [*torchrun, "--nproc-per-node", str(ranks), *script, *arguments],
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


def run_forked(name, ranks, folder, *arguments):
    """Return what an example printed on all ranks, started without torchrun."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as printed:
        place = Path(printed)
        given = (name, str(folder), port, *arguments)
        # Here: it imports Triton, and tests/torch/conftest.py must come before that.
        from tests.torch.parallel.launch import exit_codes

        codes = exit_codes("tests.examples.ranks.main", ranks, place, *given)
        assert codes == [0] * ranks
        texts = [(place / f"{rank}.out").read_text() for rank in range(ranks)]
    return "".join(texts).splitlines()


@pytest.fixture(scope="module", params=EACH, ids=lambda example: example.name)
def example(request):
    return request.param


@pytest.fixture(scope="module")
def folder(example, tmp_path_factory):
    return tmp_path_factory.mktemp(example.name)


@pytest.fixture(scope="module")
def first(example, folder):
    # One file is overwritten at the end; of folders, all are kept.
    end = STOP if example.name == "ddp" else END
    steps = ("--steps", str(end), "--save-every", str(STOP))
    return run(example.name, example.ranks, folder, *steps)


@pytest.fixture(scope="module")
def kept(example, folder, first):
    """Return the state of the scaler where the resumed run begins."""
    shutil.rmtree(folder / f"checkpoints/{example.name}/step-{END:06}", True)
    return scaler_of(example.name, folder)


@pytest.fixture(scope="module")
def later(example, folder, kept):
    steps = ("--steps", str(END), "--resume")
    return run_forked(example.name, example.ranks_later, folder, *steps)


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


def end_of(lines):
    """Return the line of the last step, which rank 0 prints."""
    (line,) = [line for line in lines if line.startswith(f"step {END}:")]
    return line


def test_the_spoilt_step_is_skipped_on_all_ranks(example, first):
    told = [line for line in first if "skipped, the scale" in line]
    assert sorted(told) == [f"rank {rank}: {SKIPPED}" for rank in range(example.ranks)]


def test_rank_0_tells_how_far_it_is(first):
    (step, _, middle), (end, _, last) = progress(first)
    assert (step, middle) == (10, "S=2^15 skipped 1/10")
    assert last == f"S=2^15 skipped 1/{end}"


def test_it_learns(first):
    # Who knows nothing of 256 bytes has a loss of log 256.
    assert progress(first)[-1][1] < 0.85 * math.log(256)


def test_the_checkpoint_has_the_state_of_the_scaler(kept):
    assert (kept["scale"], kept["_growth_tracker"]) == (2.0**15, STOP - 5)
    assert kept["gradscale"]["tallies"] == [[STOP - 1, 1], [STOP - 1, 1]]


def test_a_resumed_run_goes_on_where_the_first_one_stopped(later):
    assert later[0] == f"resumed after step {STOP}, S=2^15 skipped 1/{STOP}"
    assert [(step, tail) for step, _, tail in progress(later)] == [
        (END, f"S=2^15 skipped 1/{END}")
    ]
    assert not any("skipped, the scale" in line for line in later)


def test_every_checkpoint_has_its_final_name(example, folder, later):
    names = sorted(path.name for path in (folder / "checkpoints").glob("*"))
    assert names == [{"ddp": "ddp.pt"}.get(example.name, example.name)]
    steps = sorted(path.name for path in (folder / "checkpoints").glob("*/*"))
    assert steps == ([] if example.name == "ddp" else ["step-000012", "step-000016"])


@pytest.mark.parametrize("example", EACH[2:], indirect=True, ids=lambda e: e.name)
def test_a_resumed_run_under_tensor_parallelism_ends_like_the_first(first, later):
    assert end_of(later) == end_of(first)


@pytest.mark.parametrize("example", EACH[:1], indirect=True, ids=lambda e: e.name)
def test_a_resumed_run_under_ddp_ends_like_one_that_was_not_stopped(
    example, later, tmp_path
):
    whole = run_forked(example.name, example.ranks, tmp_path, "--steps", str(END))
    assert end_of(later) == end_of(whole)


@pytest.mark.parametrize("name", [example.name for example in EACH])
def test_without_torchrun_it_says_how_to_start_it(monkeypatch, name):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit, match="Start it with torchrun; the first lines"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
