"""Scripts that end, move, fork, thread or configure in unusual ways.

Each runs under `python` and under `gradscale run`: output, exit code and losses must be
the same. The whole list, of which the tests run a part:

    python -m tests.cli.odd_scripts [--alone] [NAME ...]

Scripts with torch are forked from two processes that have imported it: this file is
their script, see `_launch`. With `--alone` each has a process of its own.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

CLOSING = "gradscale: "
# The line before it, if the run has one.
FINDING = "gradscale GS"
# A neighbour that every script may import.
LOOP = """\
import torch

def train(scaler, steps=6, bad=(), before=lambda step: None):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        loss = net(torch.randn(3, 4)).square().mean()
        scaler.scale(loss).backward()
        if step in bad:
            net.weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        print(repr(loss.item()), scaler.get_scale(), flush=True)
    print(net.weight.tolist(), flush=True)
"""


class Odd(NamedTuple):
    """One script, and how it is started.

    Attributes:
        text: The script, train.py.
        files: Files beside it: name and content.
        arguments: Of the script.
        typed: Its stdin.
        environment: Variables that are set.
        command: Run instead of train.py; `-m` and a module, or a folder.
        torch: It trains; recorded under `gradscale run`.
        rows: The steps in each run file; None if the number is not determined.
        closed: File descriptors that are closed before it starts.
        own_process: It cannot be forked: it depends on how Python is started.
    """

    text: str
    files: dict[str, str] = {}  # noqa: RUF012  # never changed
    arguments: tuple[str, ...] = ()
    typed: str = ""
    environment: dict[str, str] = {}  # noqa: RUF012  # never changed
    command: tuple[str, ...] = ("train.py",)
    torch: bool = False
    rows: tuple[int, ...] | None = ()
    closed: tuple[int, ...] = ()
    own_process: bool = False


def _training(text, rows, **more):
    """Return a script that trains with the names torch, train and GradScaler."""
    names = "import torch\nfrom loop import train\nfrom torch.amp import GradScaler\n"
    return Odd(names + dedent(text), torch=True, rows=rows, **more)


SCRIPTS = {
    # --- how it ends ------------------------------------------------------------------
    "exit_code": Odd("""
            import sys
            print('out')
            sys.exit(3)
        """),
    "exit_text": Odd("""
            import sys
            print('out')
            sys.exit('gone: ä')
        """),
    "exit_none": Odd("""
            import sys
            sys.exit(None)
        """),
    "exit_large": Odd("""
            import sys
            sys.exit(256 + 7)
        """),
    "exception": Odd("""
            def f(x):
                return 1 / x

            f(0)
        """),
    "exception_chain": Odd("""
            try:
                {}['a']
            except KeyError as e:
                raise OSError(5) from e
        """),
    "syntax_error": Odd("""
            print('never')
            def f(:
        """),
    "system_exit_in_thread": Odd("""
            import sys, threading
            t = threading.Thread(target=lambda: sys.exit(5))
            t.start(); t.join(); print('main goes on')
        """),
    "exception_in_thread": Odd("""
            import threading
            t = threading.Thread(target=lambda: 1 / 0, name='t')
            t.start(); t.join(); print('main goes on')
        """),
    "underscore_exit": Odd("""
            import os
            print('lost')
            os._exit(4)
        """),
    "keyboard_interrupt": Odd("""
            print('out', flush=True)
            raise KeyboardInterrupt
        """),
    "terminated": Odd("""
            import os
            print('o', flush=True)
            os.kill(os.getpid(), 15)
        """),
    "killed": Odd("""
            import os
            print('o', flush=True)
            os.kill(os.getpid(), 9)
        """),
    "aborted": Odd("""
            import os
            print('o', flush=True)
            os.abort()
        """),
    "segmentation_fault": Odd("""
            import os
            os.kill(os.getpid(), 11)
        """),
    "atexit_order": Odd("""
            import atexit
            for n in range(3):
                atexit.register(print, n)
            print('end')
        """),
    "excepthook": Odd("""
            import sys
            sys.excepthook = lambda *e: print('hook', e[1])
            raise ValueError(1)
        """),
    "recursion": Odd("""
            def f(n):
                return f(n + 1)

            try:
                f(0)
            except RecursionError as e:
                print(e)
        """),
    "deep_recursion": Odd("""
            import sys
            sys.setrecursionlimit(20000)
            def f(n):
                return n and f(n - 1)
            print(f(15000))
        """),
    # --- how it is started ------------------------------------------------------------
    "stdin": Odd("print(sum(map(int, open(0))))", typed="1\n2\n3\n"),
    "stdin_closed": Odd(
        """
            import sys
            print(sys.stdin)
        """,
        closed=(0,),
    ),
    "stdout_closed": Odd(
        """
            import sys
            print(sys.stdout, file=sys.stderr)
        """,
        closed=(1,),
    ),
    "arguments": Odd(
        """
            import sys
            print(sys.argv)
        """,
        arguments=("a b", "", "'q\"", "-o", "x.gs", "--", "-m", "--help", "ä\n", "$H"),
    ),
    "module": Odd(
        "",
        files={
            "app/__init__.py": "print('init')",
            "app/sub/__init__.py": "",
            "app/sub/run.py": """
            from ..other import x
            from . import __name__ as n
            import sys
            print(x, n, __package__, sys.argv[1:])
        """,
            "app/other.py": "x = 3",
        },
        arguments=("--flag",),
        command=("-m", "app.sub.run"),
    ),
    "folder": Odd(
        "",
        files={
            "app/__main__.py": """
            import sys, near
            print(sys.argv, near.x)
        """,
            "app/near.py": "x = 1",
        },
        command=("app",),
    ),
    "runpy": Odd(
        """
            import runpy
            print(runpy.run_path('other.py', run_name='__main__')['x'])
        """,
        files={"other.py": "x = __name__"},
    ),
    "relative_import_fails": Odd("from . import other"),
    "main_is_pickled": Odd("""
            import pickle, sys
            class A:
                x = 1
            print(pickle.loads(pickle.dumps(A())).x, sys.modules['__main__'].A is A)
        """),
    "pythonpath": Odd(
        """
            import elsewhere
            print(elsewhere.x)
        """,
        files={"lib/elsewhere.py": "x = 7"},
        environment={"PYTHONPATH": "lib"},
    ),
    "warnings_are_errors": Odd(
        """
            import warnings
            print('out')
            warnings.warn('now an error')
        """,
        environment={"PYTHONWARNINGS": "error"},
    ),
    "hash_seed": Odd("print(hash('a'))", environment={"PYTHONHASHSEED": "3"}),
    "unbuffered": Odd(
        """
            import os
            print('x')
            os._exit(0)
        """,
        environment={"PYTHONUNBUFFERED": "1"},
    ),
    "narrow_encoding": Odd("print('ä')", environment={"PYTHONIOENCODING": "ascii"}),
    # --- what it does -----------------------------------------------------------------
    "large_output": Odd("""
            for n in range(60_000):
                print(n, 'x' * 80)
        """),
    "closes_stdout": Odd("""
            import sys
            print('out')
            sys.stdout.close()
        """),
    "chdir": Odd("""
            import os
            os.mkdir('in')
            os.chdir('in')
            print(os.getcwd())
        """),
    "removes_its_folder": Odd("""
            import os, shutil
            shutil.rmtree(os.getcwd())
            print('gone')
        """),
    "removes_temporary_files": Odd("""
            import glob, os, shutil
            for name in ('GRADSCALE_RUN_NOTES',):
                if name in os.environ:
                    shutil.rmtree(os.path.dirname(os.environ[name]))
            print('gone')
        """),
    "clears_the_environment": Odd("""
            import os, subprocess, sys
            os.environ.clear()
            sys.exit(subprocess.call([sys.executable, '-c', 'print(1); exit(6)']))
        """),
    "subprocess": Odd("""
            import subprocess, sys
            child = subprocess.run([sys.executable, '-c', 'print(input()); exit(6)'],
                                   input=b'typed', capture_output=True)
            print(child)
            sys.exit(child.returncode)
        """),
    "fork": Odd("""
            import os, sys
            child = os.fork()
            if child:
                print(os.waitpid(child, 0)[1])
            else:
                print('in the child', flush=True)
                sys.exit(9)
        """),
    "daemon_thread": Odd("""
            import threading, time
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            print('end')
        """),
    "pool": Odd("""
            from multiprocessing import get_context
            def square(n):
                return n * n
            if __name__ == '__main__':
                with get_context('spawn').Pool(1) as pool:
                    print(pool.map(square, range(5)))
        """),
    "asyncio": Odd("""
            import asyncio
            async def main():
                await asyncio.sleep(0)
                print('ran')
            asyncio.run(main())
        """),
    # --- training ---------------------------------------------------------------------
    "train": _training("train(GradScaler('cpu'), bad=(2,))", (6,)),
    "growth_interval_0": _training("train(GradScaler('cpu', growth_interval=0))", (6,)),
    "growth_interval_large": _training(
        """
            s = GradScaler('cpu', growth_interval=10**10)
            train(s, bad=(1,))
            print(s.state_dict(), s.get_growth_interval())
        """,
        (6,),
    ),
    "tensor_as_init_scale": _training(
        """
            s = GradScaler('cpu', init_scale=torch.tensor(8.0))
            print(s.get_scale())
            train(s)
            print(s.get_scale())
        """,
        (6,),
    ),
    "settings_changed_later": _training(
        """
            s = GradScaler('cpu', growth_interval=2)
            def change(step):
                if step == 2:
                    s.set_growth_factor(1.0)
                if step == 4:
                    s.set_backoff_factor(1.0)
                if step == 6:
                    s.set_growth_factor(4.0)
                if step == 8:
                    s.set_growth_interval(0)
                if step == 10:
                    s.set_growth_interval(10**10)
            train(s, steps=12, bad=(5, 9), before=change)
            print(s.get_growth_factor(), s.get_backoff_factor())
            print(s.get_growth_interval())
        """,
        (12,),
    ),
    "odd_state_loaded": _training(
        """
            s = GradScaler('cpu')
            s.load_state_dict({'scale': 32.0, 'growth_factor': 1.0,
                'backoff_factor': 0.25, 'growth_interval': 0, '_growth_tracker': 5})
            train(s, bad=(3,))
            print(s.get_growth_interval(), s.get_growth_factor())
        """,
        (6,),
    ),
    "odd_scaler_copied": _training(
        """
            import copy, pickle
            s = GradScaler('cpu', growth_interval=0)
            train(copy.deepcopy(s))
            train(pickle.loads(pickle.dumps(s)))
        """,
        (12,),
    ),
    "scaler_pickled": _training(
        """
            import copy, pickle
            s = GradScaler('cpu')
            train(s, bad=(1,))
            again = pickle.loads(pickle.dumps(s))
            train(again)
            train(copy.deepcopy(again))
            print(type(again), repr(again.get_scale()))
        """,
        (18,),
    ),
    "chdir_before_training": _training(
        """
            import os
            s = GradScaler('cpu')
            os.mkdir('in')
            os.chdir('in')
            train(s)
            print(os.listdir())
        """,
        (6,),
    ),
    "folder_removed_before_training": _training(
        """
            import os, shutil
            s = GradScaler('cpu')
            here = os.getcwd()
            shutil.rmtree(here)
            train(s)
            print(os.path.exists(here))
        """,
        (),
    ),
    "folder_removed_in_training": _training(
        """
            import os, shutil
            def remove(step):
                if step == 3:
                    shutil.rmtree(os.getcwd())
            train(GradScaler('cpu'), before=remove)
        """,
        (),
    ),
    "run_file_removed": _training(
        """
            import glob, os
            def remove(step):
                for name in glob.glob('*.gs*'):
                    os.remove(name)
            train(GradScaler('cpu'), steps=8, before=remove)
        """,
        (),
    ),
    "threads": _training(
        """
            import io, threading
            from contextlib import redirect_stdout
            start = threading.Barrier(4)
            def work():
                start.wait()
                s = GradScaler('cpu')
                net = torch.nn.Linear(2, 1)
                o = torch.optim.SGD(net.parameters(), lr=0.1)
                for _ in range(5):
                    o.zero_grad()
                    s.scale(net(torch.ones(1, 2)).sum()).backward()
                    s.step(o)
                    s.update()
                done.append(s.get_scale())
            done = []
            threads = [threading.Thread(target=work) for _ in range(4)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            print(done)
        """,
        (5, 5, 5, 5),
    ),
    "spawned": _training(
        """
            import multiprocessing as mp
            def work():
                train(GradScaler('cpu'))
            if __name__ == '__main__':
                p = mp.get_context('spawn').Process(target=work)
                p.start(); p.join(); print(p.exitcode)
        """,
        (6,),
        own_process=True,
    ),
    "trained_in_a_fork": _training(
        """
            import os
            child = os.fork()
            if child == 0:
                train(GradScaler('cpu'))
            else:
                print(os.waitpid(child, 0)[1])
        """,
        (6,),
    ),
    "scaler_inherited_by_a_fork": _training(
        """
            import os
            s = GradScaler('cpu')
            train(s)
            child = os.fork()
            if child == 0:
                train(s, steps=2)
                os._exit(3)
            print(os.waitpid(child, 0)[1])
            train(s, steps=2)
        """,
        (8,),
    ),
    "exception_in_training": _training(
        """
            def stop(step):
                if step == 3:
                    raise LookupError('no batch')
            train(GradScaler('cpu'), before=stop)
        """,
        (3,),
    ),
    "interrupted_in_training": _training(
        """
            def stop(step):
                if step == 3:
                    raise KeyboardInterrupt
            train(GradScaler('cpu'), before=stop)
        """,
        (3,),
    ),
    "killed_in_training": _training(
        """
            import os
            def stop(step):
                if step == 3:
                    os.kill(os.getpid(), 9)
            train(GradScaler('cpu'), before=stop)
        """,
        None,
    ),
    "underscore_exit_in_training": _training(
        """
            import os
            def stop(step):
                if step == 3:
                    os._exit(2)
            train(GradScaler('cpu'), before=stop)
        """,
        None,
    ),
    "trained_at_exit": _training(
        """
            import atexit
            s = GradScaler('cpu')
            atexit.register(train, s)
            print('end')
        """,
        (6,),
    ),
    "warnings_are_errors_in_training": _training(
        """
            import warnings
            warnings.simplefilter('error')
            p = torch.nn.Parameter(torch.ones(2))
            o = torch.optim.AdamW([p])
            p.grad = torch.ones(2)
            o.step()
            s = GradScaler('cpu')
            for n in range(3):
                o.zero_grad()
                s.scale(p.sum()).backward()
                s.step(o)
                s.update()
                print(p.tolist())
        """,
        (3,),
    ),
    "scale_at_its_floor": _training(
        """
            import sys
            p = torch.nn.Parameter(torch.ones(2))
            o = torch.optim.SGD([p], lr=0.1)
            s = GradScaler('cpu', init_scale=2.0**-20)
            for n in range(30):
                o.zero_grad()
                s.scale((p * torch.inf).sum()).backward()
                s.step(o)
                s.update()
            print(p.tolist())
            sys.exit(7)
        """,
        (30,),
    ),
    "two_scalers": _training(
        """
            train(GradScaler('cpu'))
            train(GradScaler('cpu', init_scale=4.0), bad=(0,))
        """,
        (12,),
    ),
    "disabled": _training("train(GradScaler('cpu', enabled=False))", ()),
    "subclass": _training(
        """
            class Mine(GradScaler):
                def step(self, *a, **k):
                    print('mine')
                    return super().step(*a, **k)
            train(Mine('cpu'), bad=(1,))
            print(type(Mine('cpu')).__mro__[1].__module__)
        """,
        (6,),
    ),
    "step_without_gradients": _training(
        """
            s = GradScaler('cpu')
            p = torch.nn.Parameter(torch.ones(1))
            s.scale(torch.ones(1))
            try:
                s.step(torch.optim.SGD([p], lr=0.1))
            except AssertionError as e:
                print(e)
            try:
                s.update()
            except AssertionError:
                print('no update')
        """,
        (0,),
    ),
    "types_and_names": _training(
        """
            s = GradScaler('cpu')
            print(type(s), isinstance(s, GradScaler), s.is_enabled())
            import inspect
            print(inspect.signature(GradScaler))
            train(s, steps=1)
        """,
        (1,),
    ),
    "scaler_is_collected": _training(
        """
            import gc, weakref
            s = GradScaler('cpu')
            train(s, steps=3)
            r = weakref.ref(s)
            del s
            gc.collect()
            print(r())
        """,
        (3,),
    ),
    "data_loader_workers": _training(
        """
            from torch.utils.data import DataLoader
            s = GradScaler('cpu')
            train(s, steps=2)
            for b in DataLoader(range(4), num_workers=1):
                print(b)
            train(s, steps=2)
        """,
        (4,),
    ),
    "stdout_closed_in_training": _training(
        """
            import sys
            s = GradScaler('cpu')
            train(s)
            sys.stdout.close()
            sys.stderr.write('end\\n')
        """,
        (6,),
    ),
    "trained_as_a_module": Odd(
        "",
        files={
            "app/__init__.py": "",
            "app/run.py": """
            from torch.amp import GradScaler
            from loop import train
            train(GradScaler('cpu'))
        """,
        },
        command=("-m", "app.run"),
        own_process=True,
        torch=True,
        rows=(6,),
    ),
}


# A fork of a launcher ended so once in several whole runs of the tests; the cause was
# not found. The script then runs in processes of its own, where it must be the same.
ABORTED = "terminate called without an active exception"


class Ended(NamedTuple):
    """The end of a script: what a user sees of it."""

    code: int
    out: str
    errors: str


def prepare(odd, folder):
    """Create the folder of a script anew."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in {"train.py": odd.text, "loop.py": LOOP, **odd.files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text).lstrip("\n"), encoding="utf-8")


def run_alone(odd, folder, record=None):
    """Run a script in a process of its own.

    Args:
        odd: The script.
        folder: Its folder, created anew.
        record: The run file for `gradscale run`; None to run it by python.
    """
    prepare(odd, folder)
    command = [sys.executable]
    if record is not None:
        command += ["-m", "gradscale", "run", "-o", str(record)]

    def close():
        for number in odd.closed:
            os.close(number)

    done = subprocess.run(
        [*command, *odd.command, *odd.arguments],
        cwd=folder,
        env=_environment(odd),
        input=None if 0 in odd.closed else odd.typed,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=300,
        preexec_fn=close,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def _environment(odd):
    # No bytecode: the second run must not find that of the first.
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": ""}
    environment = {**os.environ, **quiet, **odd.environment}
    if "PYTHONPATH" in odd.environment and "PYTHONPATH" in os.environ:
        paths = (odd.environment["PYTHONPATH"], os.environ["PYTHONPATH"])
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def differences(odd, alone, recorded, run_files):
    """Return in what a recorded script differs from itself under python.

    Args:
        odd: The script.
        alone: Its end under python.
        recorded: Its end under `gradscale run`, without the closing line.
        run_files: The run files, in order.
    """
    found = []
    for name, expected, got in zip(Ended._fields, alone, recorded, strict=True):
        if expected != got:
            ends = [repr(each)[-1500:] for each in (expected, got)]
            found.append(f"{name}: python {ends[0]}, recorded {ends[1]}")
    rows = tuple(sorted(_rows(file) for file in run_files))
    if odd.rows is not None and rows != tuple(sorted(odd.rows)):
        found.append(f"rows recorded: {rows} instead of {odd.rows}")
    return found


def _rows(file):
    # Not at the top: a launcher must not import gradscale.
    from gradscale.runfile import open_run

    with open_run(file) as run:
        return len(list(run.steps()))


def compare_alone(name, parent):
    """Run a script both ways, in processes of its own; return the differences."""
    odd = SCRIPTS[name]
    folder, records = parent / name, parent / f"{name}-records"
    records.mkdir()
    alone = run_alone(odd, folder)
    # In the folder of the script where it removes that or its run file.
    inside = odd.torch and odd.rows == () and "remove" in name
    record = (folder if inside else records) / "run.gs"
    recorded = run_alone(odd, folder, record)
    lines = recorded.errors.splitlines(keepends=True)
    closing = lines.pop() if lines and lines[-1].startswith(CLOSING) else ""
    if lines and lines[-1].startswith(FINDING):
        lines.pop()
    recorded = recorded._replace(errors="".join(lines))
    found = differences(odd, alone, recorded, sorted(records.glob("*.gs")))
    return found if closing else [*found, "no closing line"]


def _launch():
    """Run scripts in forks of this process, which has imported torch.

    Reads lines of JSON from stdin: the folder of a script, its arguments, variables,
    run file, and the files for stdout and stderr. Prints the exit code of each.
    """
    import gc
    import runpy

    # With Dynamo: the first optimizer of a process imports it, in 2 s.
    import torch._dynamo  # noqa: F401

    # A fork searches for its model among its own objects only.
    gc.freeze()
    while line := sys.stdin.readline():
        job = json.loads(line)
        child = os.fork()
        if child:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(code, flush=True)
            continue
        os.chdir(job["folder"])
        os.environ.update(job["environment"])
        if "GRADSCALE_RUN_FILE" in os.environ:
            os.environ["GRADSCALE_RUN_FILE"] = job["record"]
        write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(job["out"], write, 0o600), 1)
        os.dup2(os.open(job["errors"], write, 0o600), 2)
        sys.argv = ["train.py"]
        sys.path[0] = job["folder"]
        runpy.run_path("train.py", run_name="__main__")
        raise SystemExit


class Launcher:
    """A process that runs scripts in forks, by python or under `gradscale run`."""

    def __init__(self, parent, *, recorded):
        command = [sys.executable]
        if recorded:
            command += ["-m", "gradscale", "run", "-o", str(parent / "launcher.gs")]
        self._process = subprocess.Popen(
            [*command, __file__, "--launch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=parent,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def run(self, odd, folder, record):
        """Run a script; return its end."""
        prepare(odd, folder)
        out, errors = (folder.parent / f"{folder.name}.{n}" for n in ("out", "err"))
        job = {
            "folder": str(folder),
            "environment": odd.environment,
            "record": str(record),
            "out": str(out),
            "errors": str(errors),
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        # A frozen heap is not freed at the end, which triton's bindings report.
        printed = errors.read_text().partition("nanobind: leaked")[0]
        return Ended(code, out.read_text(), printed)

    def close(self):
        """End the process; return what it printed to stderr."""
        return self._process.communicate(timeout=60)[1]


def compare_forked(name, parent, alone, recorded):
    """Run a script in a fork of each launcher; return the differences."""
    odd = SCRIPTS[name]
    folder, records = parent / name, parent / f"{name}-records"
    records.mkdir()
    inside = odd.rows == () and "remove" in name
    record = (folder if inside else records) / "run.gs"
    ends = [each.run(odd, folder, record) for each in (alone, recorded)]
    if any(end.code == -signal.SIGABRT and ABORTED in end.errors for end in ends):
        shutil.rmtree(records)
        return compare_alone(name, parent)
    return differences(odd, *ends, sorted(records.glob("*.gs")))


def main(names, *, alone):
    """Run scripts, print the result of each and return the exit code.

    Args:
        names: Of the scripts; all if empty.
        alone: Fork none.
    """
    failed, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        both = [Launcher(parent, recorded=recorded) for recorded in (False, True)]
        for name in names or SCRIPTS:
            odd = SCRIPTS[name]
            if alone or odd.own_process or not odd.torch:
                found = compare_alone(name, parent)
            else:
                found = compare_forked(name, parent, *both)
            failed += bool(found)
            print(f"{'differs' if found else 'same':<8}{name}", *found, sep="\n    ")
            sys.stdout.flush()
        for launcher in both:
            launcher.close()
    seconds = time.monotonic() - began
    print(f"{len(names or SCRIPTS)} scripts, {failed} differ, {seconds:.0f} s")
    return failed > 0


if __name__ == "__main__":
    # Ctrl-C ends the scripts too; the default of the tests' parent may ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1:] == ["--launch"]:
        _launch()
    else:
        names = [name for name in sys.argv[1:] if name != "--alone"]
        sys.exit(main(names, alone="--alone" in sys.argv))
