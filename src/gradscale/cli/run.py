"""`gradscale run`: run an unmodified script and record its scalers."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple

import typer

from gradscale.cli._run_files import reading_progress
from gradscale.core.formatting import printable, run_counts
from gradscale.core.records import Verdict
from gradscale.diagnosis import diagnose_run
from gradscale.errors import StateError
from gradscale.recording.console import is_silenced, print_to_stderr
from gradscale.runfile import open_run

STARTUP = Path(__file__).parents[1] / "torch" / "attach" / "startup"
# Options after the script belong to the script.
CONTEXT = {"allow_interspersed_args": False}
# Signals passed on to the script; some do not exist on every system.
FORWARDED = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")


def run(
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT",
            help="A script, as for `python`; with -m a module; or a launcher such as "
            "torchrun.",
            show_default=False,
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGS",
            help="Arguments of the script.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Run file to write. Default: gradscale-run-DATE-TIME.gs in the "
            "current folder. An existing file is never overwritten.",
            show_default=False,
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", help="Run a module, like `python -m`.")
    ] = False,
    as_apex: Annotated[
        bool,
        typer.Option(
            "--as-apex",
            help="Make `import apex` import gradscale.apex, even if apex is installed.",
        ),
    ] = False,
) -> None:
    """Run an unmodified PyTorch script and record its gradient scalers.

    A `GradScaler` of `torch.amp`, `torch.cuda.amp`, `torch.cpu.amp` or FSDP that the
    script or a library creates is replaced by gradscale's, with the same arguments,
    scales and steps. The run file gets one row per step with its verdict, and the
    names of non-finite tensors. Subclasses of torch's scalers are only recorded.

    Arguments, working directory, output and exit code of the script do not change; at
    the end the first finding, the file and the next command are printed to stderr.
    Python processes that the script starts are recorded too.

    - `gradscale run train.py --lr 0.1` – record a script
    - `gradscale run -o lr01.gs train.py --lr 0.1` – choose the run file
    - `gradscale run -m mypackage.train --lr 0.1` – record a module
    - `gradscale run torchrun --nproc-per-node 8 train.py` – record a launcher's ranks
    - `gradscale run accelerate launch train.py` – the same with Accelerate
    - `gradscale run --as-apex train.py` – run a script written for NVIDIA apex

    With several ranks, rank 0 writes. All scalers of a process are one run; a second
    process or thread writes run.2.gs beside run.gs. Processes started with `python -I`,
    `-E` or `-S` are not recorded.
    """
    file = _target(out)
    command = _command_line(script, arguments or [], module)
    # Read now: the script may remove it.
    here = Path.cwd()
    with tempfile.TemporaryDirectory(
        prefix="gradscale-run-", ignore_cleanup_errors=True
    ) as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        code = _run(command, {**os.environ, **_environment(file, notes, as_apex)})
        recorded = _read(notes, here)
    if not is_silenced():
        print_to_stderr(closing_lines(recorded))
    _exit_like(code)


class Recorded(NamedTuple):
    """Notes of all processes of a run.

    Attributes:
        files: Run files in order of creation.
        made: Number of scalers created.
        enabled: Number of those that are enabled.
        trouble: Why a scaler was not recorded; empty if all were.
        failed: Why a run file is missing or incomplete; empty if none is.
    """

    files: list[str]
    made: int
    enabled: int
    trouble: str
    failed: str = ""


def closing_lines(recorded: Recorded) -> str:
    """Return the closing lines: the first finding, and the next command.

    >>> print(closing_lines(Recorded([], 0, 0, "")))
    gradscale: nothing was recorded, because no PyTorch scaler was created. Scripts \
that train in FP32 or BF16 need none; a JAX script is recorded by \
gradscale.jax.Recorder.
    """
    files = [file for file in recorded.files if Path(file).exists()]
    if files:
        first, *more = files
        runs = {file: _read_run(file) for file in files}
        # The first file that has a finding.
        sick = next((file for file in files if runs[file].finding), None)
        command = f"report {shlex.quote(first)}"
        finding = ""
        if sick is not None:
            command = f"doctor {shlex.quote(sick)}"
            finding = runs[sick].finding
        further = f" (and {len(more)} more, one per process or thread)" if more else ""
        failed = f"gradscale: {printable(recorded.failed)}\n" if recorded.failed else ""
        return (
            f"{failed}{finding}gradscale: {runs[first].counts} recorded in {first}"
            f"{further}. Next: gradscale {command}"
        )
    if recorded.trouble:
        return f"gradscale: nothing was recorded: {recorded.trouble.rstrip('.')}."
    if recorded.files:
        return f"gradscale: the run file {recorded.files[0]} was deleted."
    if not recorded.made:
        return (
            "gradscale: nothing was recorded, because no PyTorch scaler was created. "
            "Scripts that train in FP32 or BF16 need none; a JAX script is recorded by "
            "gradscale.jax.Recorder."
        )
    if not recorded.enabled:
        return (
            "gradscale: nothing was recorded, because the scaler was disabled. Its "
            "device is not available, or enabled=False was passed. A loop under "
            "float16 autocast loses small gradients then: they become 0."
        )
    return (
        "gradscale: nothing was recorded, because update() was never called on the "
        "scaler."
    )


class _Read(NamedTuple):
    """The summary of a run file.

    Attributes:
        counts: Its steps in words.
        finding: The line on its first finding; empty for a healthy run.
    """

    counts: str
    finding: str = ""


def _read_run(file: str) -> _Read:
    """Read and diagnose a run file; an error is part of the result."""
    unread = "the run was"
    try:
        with open_run(file) as run, reading_progress(run) as on_steps:
            diagnosis = diagnose_run(run, on_steps=on_steps)
    except (StateError, KeyboardInterrupt):
        # `doctor` gives the reason; Ctrl-C ends a long wait.
        return _Read(unread)
    except Exception as error:
        # A defect of the diagnosis, which may be any error.
        failed = f"the diagnosis failed with {type(error).__name__}: {error}"
        return _Read(unread, f"gradscale: {printable(failed)}\n")
    idle = diagnosis.verdicts.get(Verdict.NO_GRADIENTS, 0)
    counts = run_counts(diagnosis.steps, diagnosis.skipped, idle)
    first = next(iter(diagnosis.serious), None)
    if first is None:
        return _Read(counts)
    return _Read(counts, f"gradscale {first.text().splitlines()[0]}\n")


def _target(out: Path | None) -> Path:
    file = Path(time.strftime("gradscale-run-%Y%m%d-%H%M%S.gs")) if out is None else out
    if file.exists():
        raise typer.BadParameter(
            f"The file {file} already exists. Writing to it would lose the record of "
            "an earlier run. Choose another name, or delete the file.",
            param_hint="--out",
        )
    if not file.absolute().parent.is_dir():
        raise typer.BadParameter(
            f"The folder {file.parent} does not exist, so the run cannot be recorded "
            "there. Create it, or give another path.",
            param_hint="--out",
        )
    return file


def _command_line(name: str, arguments: list[str], module: bool) -> list[str]:
    """Return the command line: Python with the script, or a launcher."""
    if module:
        return [sys.executable, "-m", name, *arguments]
    program = None if name.endswith(".py") else shutil.which(name)
    if program is not None:
        return [program, *arguments]
    if not Path(name).exists():
        raise typer.BadParameter(
            f"{name} is neither a script nor a command. Nothing was run. Give the path "
            "of a script, or -m and the name of a module.",
            param_hint="SCRIPT",
        )
    return [sys.executable, name, *arguments]


def _environment(file: Path, notes: Path, as_apex: bool) -> dict[str, str]:
    """Return the variables that make every Python process import sitecustomize."""
    before = os.environ.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": f"{STARTUP}{os.pathsep}{before}" if before else str(STARTUP),
        # Absolute: the script may change its working directory.
        "GRADSCALE_RUN_FILE": str(file.absolute()),
        "GRADSCALE_RUN_NOTES": str(notes),
        # The module that takes the place of apex.
        **({"GRADSCALE_AS_APEX": "gradscale.apex.as_apex"} if as_apex else {}),
    }


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run a command to its end; return its exit code, negative for a signal."""
    with subprocess.Popen(command, env=environment) as process:

        def forward(number: int, frame: FrameType | None) -> None:
            with suppress(ProcessLookupError):
                process.send_signal(number)

        def interrupt(number: int, frame: FrameType | None) -> None:
            # The terminal sends Ctrl-C to the script too: it must not arrive twice.
            if not _in_foreground():
                forward(number, frame)

        numbers = [getattr(signal, name, None) for name in FORWARDED]
        handlers: dict[int, Any] = {n: forward for n in numbers if n is not None}
        handlers[signal.SIGINT] = interrupt
        before = {n: signal.signal(n, handler) for n, handler in handlers.items()}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _in_foreground() -> bool:
    """Return whether the terminal sends Ctrl-C to this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _read(notes: Path, here: Path) -> Recorded:
    """Read the notes; those of a script that removed its temporary files are empty.

    Args:
        notes: The file of notes.
        here: The working directory.
    """
    lines = []
    with suppress(OSError):
        for text in notes.read_text(errors="replace").splitlines():
            # The last line is cut off if the disk was full.
            with suppress(ValueError):
                lines.append(json.loads(text))

    def noted(key: str) -> Iterable[Any]:
        return (line[key] for line in lines if key in line)

    failed = next(iter(noted("failed")), "")
    trouble = [failed, *(_not_loaded(line) for line in lines)]
    return Recorded(
        files=[file.removeprefix(f"{here}{os.sep}") for file in noted("file")],
        made=len(list(noted("made"))),
        enabled=sum(noted("enabled")),
        trouble=next((why for why in trouble if why), ""),
        failed=failed,
    )


def _not_loaded(line: dict[str, Any]) -> str:
    if "unreached" not in line:
        return ""
    why = f"{line['by']} could not load gradscale ({line['unreached']})"
    if "No module named 'gradscale'" in line["unreached"]:
        return f"{why}. Install it for that Python: pip install gradscale"
    return f"{why}. The script ran without gradscale"


def _exit_like(code: int) -> None:
    """Exit with the script's exit code, or by the signal that ended it."""
    if code < 0:
        sys.stderr.flush()
        # SIGKILL has no handler to reset.
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    raise typer.Exit(code)
