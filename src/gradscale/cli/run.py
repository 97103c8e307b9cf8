"""`gradscale run`: a script as it is, its scalers recorded."""

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

from gradscale.core.records import Verdict
from gradscale.diagnosis.records import is_skipped
from gradscale.errors import StateError
from gradscale.runfile import open_run

STARTUP = Path(__file__).parents[1] / "torch" / "attach" / "startup"
# What follows the script is the script's, whatever it looks like.
CONTEXT = {"allow_interspersed_args": False}
# Sent to this process alone, and meant for the script. Not all systems have all.
FORWARDED = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")


def run(
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT",
            help="The script, as after `python`; with -m the name of a module. A "
            "launcher such as torchrun may stand here too.",
            show_default=False,
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGS",
            help="The script's own, passed on as they are.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Where to record the run. By default gradscale-run-DATE-TIME.gs in "
            "the present folder. A file that is there is never written over.",
            show_default=False,
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", help="Run a module, as `python -m` does.")
    ] = False,
) -> None:
    """Run an unmodified PyTorch script and record what its scaler does.

    Wherever the script, or a library it uses, makes a `GradScaler` of `torch.amp`,
    `torch.cuda.amp`, `torch.cpu.amp` or FSDP, it gets gradscale's: the same
    arguments, the same scales, the same steps. Each step goes into FILE with its
    verdict, and what was not finite with its name. Scalers that a library has
    derived from torch's are only watched.

    The script sees its own arguments, folder and output, and the exit code is its
    own. Only one line is added at the end, on stderr: the file, and what to do next.
    Processes that the script starts are reached too, if they are Python.

    - `gradscale run train.py --lr 0.1` records a script
    - `gradscale run -o lr01.gs train.py --lr 0.1` into a file of this name
    - `gradscale run -m mypackage.train --lr 0.1` records a module
    - `gradscale run torchrun --nproc-per-node 8 train.py` records all ranks as one
    - `gradscale run accelerate launch train.py` the same for Accelerate

    With several ranks rank 0 writes. A second scaler beside run.gs gets run.2.gs. Not
    reached are processes started with `python -I`, `-E` or `-S`.
    """
    file = _target(out)
    started = _started_by(script, arguments or [], module)
    with tempfile.TemporaryDirectory(prefix="gradscale-run-") as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        code = _run(started, {**os.environ, **_reaching(file, notes)})
        seen = _read(notes)
    # Nobody may be reading any more; the exit code is the script's all the same.
    with suppress(OSError):
        typer.echo(closing_line(seen), err=True)
    _leave(code)


class Seen(NamedTuple):
    """What the processes of a run have noted.

    Attributes:
        files: The run files, in the order in which they were made.
        made: How many scalers were made.
        enabled: How many of them do anything.
        trouble: Why something was not recorded, if so.
    """

    files: list[str]
    made: int
    enabled: int
    trouble: str


def closing_line(seen: Seen) -> str:
    """Return what is said at the end.

    >>> print(closing_line(Seen([], 0, 0, "")))
    gradscale: no scaler was made, so nothing was recorded. Was there to be one? \
Scripts that train in FP32 or BF16 need none.
    """
    if seen.files:
        first, *more = seen.files
        further = f" (and {len(more)} more: one file a scaler)" if more else ""
        return (
            f"gradscale: {_counted(first)} recorded in {first}{further}. "
            f"Next: gradscale report {shlex.quote(first)}"
        )
    if seen.trouble:
        return f"gradscale: nothing was recorded: {seen.trouble}."
    if not seen.made:
        return (
            "gradscale: no scaler was made, so nothing was recorded. Was there to be "
            "one? Scripts that train in FP32 or BF16 need none."
        )
    if not seen.enabled:
        return (
            "gradscale: the scaler was disabled, so nothing was recorded. Its device "
            "was missing, or enabled=False was passed."
        )
    return (
        "gradscale: a scaler was made and update() was never called on it, so nothing "
        "was recorded."
    )


def _counted(file: str) -> str:
    try:
        with open_run(file) as run:
            steps = [(row.verdict, is_skipped(row)) for row in run.steps()]
    except StateError:
        return "the run was"
    skipped = sum(skip for _, skip in steps)
    idle = sum(code == Verdict.NO_GRADIENTS.code for code, _ in steps)
    words = [f"{len(steps)} step{'s' if len(steps) != 1 else ''}"]
    words += [f"{skipped} skipped"] if skipped else []
    words += [f"{idle} without gradients"] if idle else []
    return ", ".join(words) + ("," if len(words) > 1 else "")


def _target(out: Path | None) -> Path:
    file = Path(time.strftime("gradscale-run-%Y%m%d-%H%M%S.gs")) if out is None else out
    if file.exists():
        raise typer.BadParameter(
            f"There is a file {file} already. Writing to it would lose the record of "
            "an earlier run. Choose another name, or delete it.",
            param_hint="--out",
        )
    if not file.absolute().parent.is_dir():
        raise typer.BadParameter(
            f"The folder {file.parent} does not exist, so the run cannot be recorded "
            "there. Make it first, or give another path.",
            param_hint="--out",
        )
    return file


def _started_by(name: str, arguments: list[str], module: bool) -> list[str]:
    """Return what to start: Python with the script, or a launcher by itself."""
    if module:
        return [sys.executable, "-m", name, *arguments]
    program = None if name.endswith(".py") else shutil.which(name)
    if program is not None:
        return [program, *arguments]
    if not Path(name).exists():
        raise typer.BadParameter(
            f"There is no script and no command {name}. Nothing was run. Give the "
            "path of a script, or -m and the name of a module.",
            param_hint="SCRIPT",
        )
    return [sys.executable, name, *arguments]


def _reaching(file: Path, notes: Path) -> dict[str, str]:
    """Return the variables by which every Python process finds us when it starts."""
    before = os.environ.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": f"{STARTUP}{os.pathsep}{before}" if before else str(STARTUP),
        # The script may change its folder.
        "GRADSCALE_RUN_FILE": str(file.absolute()),
        "GRADSCALE_RUN_NOTES": str(notes),
    }


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run it to its end; return its code, negative for the signal that ended it."""
    with subprocess.Popen(command, env=environment) as process:

        def forward(number: int, frame: FrameType | None) -> None:
            with suppress(ProcessLookupError):
                process.send_signal(number)

        def interrupt(number: int, frame: FrameType | None) -> None:
            # Ctrl-C reaches the script by itself: twice would be a second one.
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
    """Return whether Ctrl-C goes to this process and to those it has started."""
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


def _read(notes: Path) -> Seen:
    lines = [json.loads(line) for line in notes.read_text().splitlines()]

    def noted(key: str) -> Iterable[Any]:
        return (line[key] for line in lines if key in line)

    trouble = [*noted("failed"), *(_unreached(line) for line in lines)]
    return Seen(
        files=[_short(file) for file in noted("file")],
        made=len(list(noted("made"))),
        enabled=sum(noted("enabled")),
        trouble=next((why for why in trouble if why), ""),
    )


def _unreached(line: dict[str, Any]) -> str:
    if "unreached" not in line:
        return ""
    why = f"{line['by']} could not load gradscale ({line['unreached']})"
    if "No module named 'gradscale'" in line["unreached"]:
        return f"{why}. Install it for that Python: pip install gradscale"
    return f"{why}. The script ran as it does without gradscale"


def _short(file: str) -> str:
    """Return the path as a user here would type it."""
    here = f"{Path.cwd()}{os.sep}"
    return file.removeprefix(here)


def _leave(code: int) -> None:
    """End as the script has ended: by the same code or by the same signal."""
    if code < 0:
        sys.stderr.flush()
        # SIGKILL has no handler to set back.
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    raise typer.Exit(code)
