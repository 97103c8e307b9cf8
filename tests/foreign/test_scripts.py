"""Scripts without gradscale, run by themselves and under `gradscale run`.

Real libraries, real processes. On a machine with a GPU the same scripts train in FP16:
`python -m pytest tests/foreign -p no:randomly -rs`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradscale.runfile import open_run

HERE = Path(__file__).parent
# Sums differ with the number of threads.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Makes cuBLAS deterministic.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
CUDA = torch.cuda.is_available()
TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--master-port",
    "0",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "localhost:0",
)
ACCELERATE_LAUNCH = (
    "-m",
    "accelerate.commands.launch",
    *("--num_processes", "1", "--num_machines", "1", "--dynamo_backend", "no"),
    *("--mixed_precision", "fp16" if CUDA else "no"),
    *(() if CUDA else ("--cpu",)),
)


def needs(library):
    """Skip where a library is not installed."""
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(
        missing, reason=f"{library} is not installed: pip install {library}"
    )


def ended(folder, *command):
    """Run a Python command to its end in a folder."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRONMENT,
    )


def recorded(folder, *command):
    """Run a command under `gradscale run`; return the process and the files' folder."""
    files = folder / "records"
    files.mkdir()
    prefix = ("-m", "gradscale", "run", "-o", files / "run.gs")
    return ended(folder, *prefix, *command), files


def unchanged(alone, run):
    """Return whether stdout and exit code are the same; stderr has closing lines."""
    *errors, line = run.stderr.splitlines()
    assert line.startswith("gradscale: ")
    # The first finding of a run that has one.
    if "gradscale doctor" in line:
        assert errors.pop().startswith("gradscale GS")
    assert not [error for error in errors if error.startswith("gradscale")]
    return (run.returncode, run.stdout) == (alone.returncode, alone.stdout)


def assert_same_and_recorded(alone, run, files, steps):
    """Assert that a recorded script did what it does alone, and has its steps."""
    assert "0x1." in alone.stdout, alone.stderr
    assert unchanged(alone, run)
    with open_run(files / "run.gs") as record:
        rows = list(record.steps())
        assert record.meta["end"]["state"] == "exit"
    assert [row.step for row in rows] == list(range(1, steps + 1))
    skipped = sum(not row.applied for row in rows)
    # On a GPU the libraries' own first scale may fit.
    assert (0 if CUDA else 1) <= skipped < steps
    skips = f", {skipped} skipped," if skipped else ""
    # A script that uses no float16 has a finding.
    assert run.stderr.splitlines()[-1].replace("doctor", "report") == (
        f"gradscale: {steps} steps{skips} recorded in records/run.gs. "
        "Next: gradscale report records/run.gs"
    )
    # Workers and other ranks write nothing.
    assert [path.name for path in files.iterdir()] == ["run.gs"]


@pytest.fixture(scope="module")
def plain_loop(tmp_path_factory):
    """Return the plain loop alone and recorded, and the folder of its record."""
    folder = tmp_path_factory.mktemp("plain_loop")
    device = ("--device", "cuda" if CUDA else "cpu")
    command = (HERE / "plain_loop.py", "--exit-code", "3", *device)
    return ended(folder, *command), *recorded(folder, *command)


def test_a_plain_loop_is_recorded_and_its_losses_are_the_same_bit_by_bit(plain_loop):
    assert_same_and_recorded(*plain_loop, steps=30)


def test_culprits_have_the_names_of_a_model_that_was_not_passed(plain_loop):
    _, _, files = plain_loop
    with open_run(files / "run.gs") as record:
        parameters = record.meta["parameters"]
        [first, *_] = record.events()
    assert parameters == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert first.where in parameters


@pytest.mark.parametrize(
    ("command", "steps"),
    [
        pytest.param(
            [HERE / "lightning_fit.py"], 30, id="lightning", marks=needs("lightning")
        ),
        pytest.param(
            [HERE / "accelerate_loop.py"],
            50,
            id="accelerate",
            marks=needs("accelerate"),
        ),
        pytest.param(
            [*ACCELERATE_LAUNCH, HERE / "accelerate_loop.py"],
            50,
            id="accelerate launch",
            marks=needs("accelerate"),
        ),
        pytest.param(
            [HERE / "hf_trainer.py"], 40, id="trainer", marks=needs("transformers")
        ),
        pytest.param([*TORCHRUN, HERE / "ddp.py"], 40, id="torchrun"),
    ],
)
def test_a_foreign_script_is_recorded_and_its_losses_are_the_same_bit_by_bit(
    tmp_path, command, steps
):
    alone = ended(tmp_path, *command)
    assert_same_and_recorded(alone, *recorded(tmp_path, *command), steps)


def test_a_scaler_is_recorded_under_every_import_name_and_keeps_its_class(tmp_path):
    alone = ended(tmp_path, HERE / "every_name.py")
    run, files = recorded(tmp_path, HERE / "every_name.py")
    assert alone.returncode == 0
    assert unchanged(alone, run)
    assert [path.name for path in files.iterdir()] == ["run.gs"]
    with open_run(files / "run.gs") as record:
        rows = list(record.steps())
        numbers = [e.data["number"] for e in record.events() if e.code == "GS118"]
    # Amp, module, cpu, two derived ones, one that is copied, two copies.
    assert [row.applied for row in rows] == [True, False, True] * 8
    first_scales = [row.scale for row in rows[::3]]
    assert first_scales == [2.0**n for n in (10, 3, 5, 12, 13, 6, 5, 5)]
    assert numbers == list(range(2, 9))


def test_spawned_processes_are_recorded(tmp_path):
    run, files = recorded(tmp_path, HERE / "plain_spawn.py")
    assert (run.returncode, run.stdout) == (0, "done\n")
    assert sorted(path.name for path in files.iterdir()) == ["run.2.gs", "run.gs"]
    for path in files.iterdir():
        with open_run(path) as record:
            assert [row.scale for row in record.steps()] == [1024.0] * 5
    assert "(and 1 more, one per process or thread)" in run.stderr


@pytest.mark.skipif(CUDA, reason="with CUDA the scaler is not disabled")
def test_a_disabled_scaler_is_distinguished_from_none(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, warnings\nwarnings.simplefilter('ignore')\n"
        "torch.amp.GradScaler('cuda').update()\n"
    )
    run, files = recorded(tmp_path, "train.py")
    assert run.stderr.startswith("gradscale: nothing was recorded, because the scaler")
    assert list(files.iterdir()) == []
