"""Damages run files at random and reads them with the commands.

    python -m tests.runfile.damages --files 2000 --seed 0

Every file is read by `report`, `doctor`, `tail` and `diff`. A command must end with
exit code 0 to 3, without an exception, within `SECONDS` of processor time, and print
nothing that controls a terminal. A sample is read in processes of its own, where memory
is measured too. Prints counts, and each failure with the seed of its file.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from typer.testing import CliRunner

from gradscale.cli import app
from gradscale.runfile import RunWriter
from tests.diagnosis import runs

COMMANDS = ("report", "doctor", "tail", "diff")
SECONDS = 2.0
MEGABYTES = 200
# Wall clock after which a command counts as hanging.
HANGS = 20.0
PAGE = 4096

ENDLESS = (
    "WITH RECURSIVE endless (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM endless) "
    "SELECT n AS step, 0.0 AS time, 1.0 AS scale, 1 AS applied, 'GS000' AS verdict, "
    "1.0 AS norm, 1.0 AS amax, 1.0 AS loss FROM endless"
)
# Runs a command and saves its memory. The peak of getrusage is no measure: a process
# inherits that of the one that started it.
MEASURED = """
import atexit, shutil, sys
target = sys.argv.pop(1)
atexit.register(shutil.copyfile, "/proc/self/status", target)
from gradscale.cli import main
main()
"""
TEXTS = (
    "",
    "NaN",
    "nan",
    "running",
    "GS999",
    "GS20",
    "[/]",
    "[bold red]x[/bold]",
    "\x1b[2J\x1b]0;title\x07",
    "\x9b31m",
    "a\rb\x08\x00c",
    "\u202eabc",
    "line\nline\x85line",
    "x" * 5000,
    "x" * 200_000,
    "[" * 100_000,
    '{"a":' * 60 + "1" + "}" * 60,
    '{"a":' * 500 + "1" + "}" * 500,
    "9" * 5000,
    "{}",
    "[]",
    "null",
    "{",
    '"\\ud800"',
    "1e999",
)
NUMBERS = (
    0,
    -1,
    1,
    2,
    2**31,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    0.5,
    -0.0,
    5e-324,
    1e-40,
    65504.0,
    1e38,
    1e308,
    -1e308,
    math.inf,
    -math.inf,
)
BLOBS = (b"", b"\x00", b"\x27\x08", b"\xff" * 400, b"\x00\x03abc", b"\x28\x01\x01")
JSON = (None, True, -1, 10**200, 1e308, math.nan, "", "x" * 3000, [], {}, [[[1]]])


# --- files that a writer writes -------------------------------------------------------


def write_whole(path: Path) -> None:
    """Write a run that has rows in all tables. The same bytes each time."""
    with RunWriter(path, meta={"policy": runs.POLICY, "parameters": runs.TENSORS}) as w:
        for step in range(1, 401):
            bad = step % 50 == 0 or step > 380
            code = "GS208" if step > 380 else "GS201" if bad else "GS000"
            peak = math.nan if bad else 900.0
            w.step(step, 2.0 ** (15 - step // 60), not bad, code, 1.5, peak, 5.0 / step)
            if bad and step < 400:
                names = {"culprits": list(runs.SICK), "count": 2}
                w.event(code, step=step, where=runs.SICK[0], data=names)
                w.peaks(step, dict.fromkeys(runs.TENSORS, math.inf))
            if step % 40 == 0:
                samples = (runs.sample(-10.0 - n, 3.0, 500, n) for n in range(8))
                w.samples(step, dict(zip(runs.TENSORS, samples, strict=True)))
        place = {
            "found": True,
            "direction": "forward",
            "module": "decoder.3",
            "count": 3,
        }
        w.event("GS208", step=385, where="decoder.3", data={**place, "elements": 9})
        found = {"what": "a message", "evidence": {"steps": 3, "of": 9, "amax": 1.5}}
        w.event("GS301", data={**found, "advice": ["one", "two"]})
    file = sqlite3.connect(path, isolation_level=None)
    file.execute("PRAGMA journal_mode = truncate").fetchall()
    file.execute("UPDATE steps SET time = step")
    file.execute("UPDATE events SET time = id")
    told = {"state": "closed", "time": 500.0}
    fixed = {"start": 1.0, "pid": 1, "host": "h", "command": ["train.py"], "end": told}
    fixed |= {"python": "3", "sqlite": "3", "gradscale": "0", "frameworks": {}}
    for key, value in fixed.items():
        entry = json.dumps(value), key
        file.execute("UPDATE meta SET value = ? WHERE key = ?", entry)
    file.execute("VACUUM")
    file.close()


def write_with_log(path: Path) -> None:
    """Write a run whose last rows are in a log beside it, without the log's index."""
    with tempfile.TemporaryDirectory() as folder:
        live = Path(folder) / "live.gs"
        write_whole(live)
        file = sqlite3.connect(live, isolation_level=None)
        file.execute("PRAGMA journal_mode = wal").fetchall()
        file.execute("UPDATE steps SET loss = loss + 1.0")
        shutil.copy(live, path)
        shutil.copy(f"{live}-wal", f"{path}-wal")
        file.close()


# --- damages --------------------------------------------------------------------------


def flip_bits(path: Path, rng: random.Random) -> None:
    """Flip up to 64 bits, anywhere or within one page."""
    content = bytearray(path.read_bytes())
    page = rng.randrange(len(content) // PAGE or 1) * PAGE
    within = rng.random() < 0.5
    for _ in range(rng.choice((1, 2, 8, 64))):
        place = page + rng.randrange(PAGE) if within else rng.randrange(len(content))
        content[place % len(content)] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def overwrite(path: Path, rng: random.Random) -> None:
    """Overwrite a stretch with zeros, ones or noise."""
    content = bytearray(path.read_bytes())
    length = rng.choice((1, 4, 16, 100, 1000, PAGE))
    begin = rng.randrange(len(content))
    noise = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
    content[begin : begin + length] = noise
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    """Cut the end off, often within the last page; sometimes append bytes."""
    size = path.stat().st_size
    kind = rng.randrange(4)
    if kind == 0:
        os.truncate(path, rng.randrange(size))
    elif kind == 1:
        os.truncate(path, size - rng.randrange(1, PAGE))
    elif kind == 2:
        os.truncate(path, rng.randrange(size // PAGE) * PAGE)
    else:
        with path.open("ab") as file:
            file.write(rng.randbytes(rng.randrange(1, 3 * PAGE)))


def swap_pages(path: Path, rng: random.Random) -> None:
    """Exchange, repeat or shuffle pages."""
    content = path.read_bytes()
    pages = [content[at : at + PAGE] for at in range(0, len(content), PAGE)]
    for _ in range(rng.choice((1, 1, 2, 8))):
        one, two = rng.randrange(len(pages)), rng.randrange(len(pages))
        if rng.random() < 0.3:
            pages[one] = pages[two]
        else:
            pages[one], pages[two] = pages[two], pages[one]
    path.write_bytes(b"".join(pages))


def bend_pointers(path: Path, rng: random.Random) -> None:
    """Let pages of a tree point to others, and shuffle the cells of a page."""
    content = bytearray(path.read_bytes())
    pages = len(content) // PAGE
    for _ in range(rng.choice((1, 2, 5))):
        page = rng.randrange(1, pages) * PAGE
        inner = content[page] in (2, 5)
        cells = page + (12 if inner else 8)
        count = int.from_bytes(content[page + 3 : page + 5], "big")
        if inner and rng.random() < 0.7:
            target = rng.randrange(1, pages + 1).to_bytes(4, "big")
            at = page + 8
            if count and rng.random() < 0.7:
                pointer = cells + 2 * rng.randrange(min(count, 100))
                at = page + int.from_bytes(content[pointer : pointer + 2], "big") % PAGE
            content[at : at + 4] = target
        elif rng.random() < 0.5 and count > 1:
            order = [content[cells + 2 * n : cells + 2 * n + 2] for n in range(count)]
            rng.shuffle(order)
            joined = b"".join(order)
            content[cells : cells + len(joined)] = joined
        else:
            # An inner page where a leaf was, and the reverse.
            content[page] = rng.choice((2, 5, 10, 13))
    path.write_bytes(bytes(content)[: pages * PAGE])


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    file = sqlite3.connect(path, isolation_level=None)
    try:
        yield file
    finally:
        file.close()


def change_schema(path: Path, rng: random.Random) -> None:
    """Replace tables by others, by views without an end, or by other columns."""
    tables = ("meta", "steps", "tensors", "peaks", "samples", "events")
    table = rng.choice(tables)
    number = rng.choice((-1, 0, 2, 2**31 - 1))
    changes = (
        (f"DROP TABLE {table}",),
        ("DROP TABLE steps", f"CREATE VIEW steps AS {ENDLESS}"),
        (f"ALTER TABLE {table} ADD COLUMN more DEFAULT 1",),
        (f"ALTER TABLE {table} RENAME TO {table}2",),
        (f"DROP TABLE {table}", f"CREATE TABLE {table} (a, b, c)"),
        (
            "DROP TABLE tensors",
            "CREATE TABLE tensors (id INTEGER PRIMARY KEY, "
            "name TEXT AS (hex(zeroblob(1000000))) VIRTUAL)",
            "INSERT INTO tensors (id) VALUES (1), (2), (3)",
        ),
        (
            f"DROP TABLE {table}",
            f"CREATE VIRTUAL TABLE {table} USING fts5 (step, time, scale)",
        ),
        (f"CREATE VIEW more AS {ENDLESS}",),
        (f"CREATE INDEX more ON {table} (1)",),
        (
            "PRAGMA writable_schema = ON",
            "UPDATE sqlite_master SET rootpage = (SELECT rootpage FROM sqlite_master "
            f"WHERE name = '{rng.choice(tables)}') WHERE name = '{table}'",
        ),
        (
            "PRAGMA writable_schema = ON",
            f"UPDATE sqlite_master SET rootpage = {rng.randrange(-1, 40)} "
            f"WHERE name = '{table}'",
        ),
        (
            "PRAGMA writable_schema = ON",
            "UPDATE sqlite_master SET sql = replace(sql, 'INTEGER', '\x1b[2J') "
            f"WHERE name = '{table}'",
        ),
        (f"PRAGMA user_version = {number}",),
        (f"PRAGMA application_id = {number}",),
        (f"DELETE FROM {table}",),
        (
            "PRAGMA writable_schema = ON",
            "INSERT INTO sqlite_master VALUES ('view', '[/]', '[/]', 0, 'x')",
        ),
    )
    with opened(path) as file:
        for statement in rng.choice(changes):
            file.execute(statement).fetchall()


def hostile_values(path: Path, rng: random.Random) -> None:
    """Set columns of some rows to values that no writer writes."""
    columns = {
        "meta": ("key", "value"),
        "steps": (
            "step",
            "time",
            "scale",
            "applied",
            "verdict",
            "norm",
            "amax",
            "loss",
        ),
        "tensors": ("id", "name"),
        "peaks": ("step", "tensor", "peak"),
        "samples": ("step", "tensor", "total", "zeros", "subnormals", "below", "above"),
        "events": ("id", "step", "time", "code", '"where"', "data"),
    }
    columns["samples"] += ("nonfinite", "histogram")
    with opened(path) as file:
        file.create_function("chance", 0, rng.random)
        for _ in range(rng.choice((1, 1, 3))):
            table = rng.choice(list(columns))
            column = rng.choice(columns[table])
            value = rng.choice(rng.choice((TEXTS, NUMBERS, BLOBS)))
            stored = rng.choice(("?", "?", "?", "CAST(x'ff' AS TEXT)", "? || x'1b'"))
            chosen = rng.choice(("1", "chance() < 0.1", "chance() < 0.02"))
            values = (value,) * stored.count("?")
            update = f"UPDATE OR IGNORE {table} SET {column} = {stored} WHERE {chosen}"
            # SQLite itself keeps the keys of rows integers.
            with suppress(sqlite3.IntegrityError):
                file.execute(update, values)


def hostile_json(path: Path, rng: random.Random) -> None:
    """Exchange parts of the JSON in `meta` and `events`."""
    table, column = rng.choice((("meta", "value"), ("events", "data")))
    key = "key" if table == "meta" else "id"
    with opened(path) as file:
        rows = file.execute(f"SELECT {key}, {column} FROM {table}").fetchall()
        for chosen, text in rng.sample(rows, rng.choice((1, 3))):
            changed = json.dumps(_exchanged(json.loads(text), rng))
            if rng.random() < 0.1:
                changed = changed.replace("1", "1" * rng.choice((2, 400)))
            entry = changed, chosen
            file.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", entry)


def _exchanged(value, rng: random.Random):
    """Return a JSON value with one part replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: _exchanged(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.5:
        place = rng.randrange(len(value))
        return [*value[:place], _exchanged(value[place], rng), *value[place + 1 :]]
    return rng.choice((*JSON, *TEXTS[:14]))


def damage_log(path: Path, rng: random.Random) -> None:
    """Damage the log of a run, or put a file of noise beside it."""
    log = Path(f"{path}-wal")
    if log.exists():
        rng.choice((flip_bits, overwrite, truncate))(log, rng)
    name = rng.choice(("-wal", "-shm", "-journal", ""))
    if name and rng.random() < 0.5:
        magic = bytes.fromhex("d9d505f920a163d7")
        noise = rng.choice(
            (b"", magic, magic + rng.randbytes(600), rng.randbytes(40_000))
        )
        Path(f"{path}{name}").write_bytes(noise + rng.choice((b"", magic)))


def several(path: Path, rng: random.Random) -> None:
    """Apply a damage of the content, then one of the bytes."""
    rng.choice((hostile_values, hostile_json))(path, rng)
    rng.choice((flip_bits, overwrite, truncate, swap_pages, bend_pointers))(path, rng)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "bits": flip_bits,
    "bytes": overwrite,
    "truncation": truncate,
    "pages": swap_pages,
    "pointers": bend_pointers,
    "schema": change_schema,
    "values": hostile_values,
    "json": hostile_json,
    "log": damage_log,
    "several": several,
}


class Bases(NamedTuple):
    """Intact files that are copied and damaged."""

    whole: Path
    with_log: Path

    @classmethod
    def written(cls, folder: Path) -> "Bases":
        """Write the intact files into a folder."""
        bases = cls(folder / "whole.gs", folder / "with_log.gs")
        write_whole(bases.whole)
        write_with_log(bases.with_log)
        return bases

    def damaged(self, seed: str, kind: str, path: Path) -> None:
        """Write a damaged copy; the seed decides how it is damaged."""
        rng = random.Random(f"{seed} {kind}")
        for name in ("", "-wal", "-shm", "-journal"):
            Path(f"{path}{name}").unlink(missing_ok=True)
        logged = kind == "log" or rng.random() < 0.1
        source = self.with_log if logged and kind in ("log", "bits") else self.whole
        for name in ("", "-wal"):
            if Path(f"{source}{name}").exists():
                shutil.copy(f"{source}{name}", f"{path}{name}")
        DAMAGES[kind](path, rng)


# --- reading --------------------------------------------------------------------------


class Hangs(BaseException):
    """A command did not end."""


class Outcome(NamedTuple):
    """The end of a command.

    Attributes:
        code: Its exit code.
        trouble: What is wrong with it; empty if nothing is.
        seconds: Processor time.
        megabytes: Peak of memory; 0.0 if it was not measured.
    """

    code: int
    trouble: str
    seconds: float
    megabytes: float = 0.0


def arguments_of(command: str, path: Path, whole: Path, *, as_json: bool) -> list[str]:
    """Return a command line."""
    files = [str(path), str(whole)] if command == "diff" else [str(path)]
    return [command, *files, *(["--json"] if as_json else [])]


def run_here(arguments: list[str]) -> Outcome:
    """Run a command in this process. `tail` of a run without an end is interrupted."""

    def hang(*_: object) -> None:
        raise Hangs

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    tail = import_module("gradscale.cli.tail")
    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, HANGS)
    begin = time.process_time()
    try:
        with mock.patch.object(tail, "time", mock.Mock(sleep=interrupt)):
            done = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
    except Hangs:
        return Outcome(-1, "hangs", HANGS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    seconds = time.process_time() - begin
    error = done.exception
    trouble = _trouble(done.exit_code, done.stdout + done.stderr, seconds)
    if error is not None and not isinstance(error, SystemExit):
        trouble = "".join(traceback.format_exception(error)[-3:])
    return Outcome(done.exit_code, trouble, seconds)


def run_apart(arguments: list[str]) -> Outcome:
    """Run a command in a process of its own, and measure its memory."""
    with tempfile.TemporaryFile() as output, tempfile.NamedTemporaryFile() as status:
        command = [sys.executable, "-c", MEASURED, status.name, *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        until = time.monotonic() + HANGS
        used = None
        while time.monotonic() < until:
            pid, ended, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if arguments[0] == "tail" and time.monotonic() > until - HANGS / 2:
                # The run has no end: a user stops following it.
                process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        else:
            process.kill()
            process.wait()
            return Outcome(-1, "hangs", HANGS)
        process.returncode = code = os.waitstatus_to_exitcode(ended)
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
        [peak] = re.findall(r"VmHWM:\s+(\d+) kB", status.read().decode())
    seconds, megabytes = used.ru_utime + used.ru_stime, int(peak) / 1024
    trouble = _trouble(code, text, seconds)
    if megabytes > MEGABYTES:
        trouble = f"{megabytes:.0f} MB"
    return Outcome(code, trouble, seconds, megabytes)


def _trouble(code: int, text: str, seconds: float) -> str:
    if code not in (0, 1, 2, 3):
        return f"exit code {code}"
    if "Traceback" in text:
        return text[-2000:]
    if code == 3 and not ("GS306" in text or "GS307" in text):
        return f"no code: {text[-300:]}"
    wild = sorted({each for each in text if not each.isprintable()} - {"\n"})
    if wild:
        return f"prints {wild}"
    return f"{seconds:.1f} s" if seconds > SECONDS else ""


# --- all of it ------------------------------------------------------------------------


def read_damaged(
    bases: Bases,
    seeds: Iterator[str],
    folder: Path,
    run: Callable[[list[str]], Outcome],
    *,
    kinds: tuple[str, ...] = tuple(DAMAGES),
) -> Iterator[tuple[str, str, str, Outcome]]:
    """Yield seed, kind, command and outcome, for each file and command.

    The kinds of damage take turns.
    """
    path = folder / "damaged.gs"
    for number, seed in enumerate(seeds):
        kind = kinds[number % len(kinds)]
        bases.damaged(seed, kind, path)
        as_json = random.Random(seed).random() < 0.3
        for command in COMMANDS:
            arguments = arguments_of(command, path, bases.whole, as_json=as_json)
            yield seed, kind, command, run(arguments)


def main() -> int:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=2000, help="damaged files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first file")
    parser.add_argument("--apart", type=int, default=40, help="files in processes")
    given = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bases = Bases.written(folder)
        for title, run, files in (
            ("in this process", run_here, given.files),
            ("in processes of their own", run_apart, given.apart),
        ):
            codes: Counter[tuple[str, int]] = Counter()
            slowest = largest = 0.0
            seeds = map(str, range(given.seed, given.seed + files))
            for seed, kind, command, outcome in read_damaged(bases, seeds, folder, run):
                codes[kind, outcome.code] += 1
                slowest = max(slowest, outcome.seconds)
                largest = max(largest, outcome.megabytes)
                if outcome.trouble:
                    failures += 1
                    print(f"seed {seed} {kind} {command}: {outcome.trouble}")
            _print_counts(title, files, codes)
            memory = f", {largest:.0f} MB" if largest else ""
            print(f"longest {slowest:.2f} s{memory}; failures so far: {failures}\n")
    return 1 if failures else 0


def _print_counts(title: str, files: int, codes: Counter[tuple[str, int]]) -> None:
    print(f"{files} damaged files, {sum(codes.values())} commands {title}")
    print(f"{'damage':12}" + "".join(f"exit {code:<4}" for code in range(4)))
    for kind in DAMAGES:
        row = "".join(f"{codes[kind, code]:<9}" for code in range(4))
        print(f"{kind:12}{row}")


if __name__ == "__main__":
    sys.exit(main())
