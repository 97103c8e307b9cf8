"""Damaged and hostile run files: refused with a code, or read; never a hang."""

import faulthandler
import json
import math
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradscale import StateError
from gradscale.cli import app
from gradscale.runfile import RunWriter, open_run, reader
from tests.runfile import damages

# Files of each kind of damage; `python -m tests.runfile.damages` reads 2,000.
FILES = 5


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return the intact files."""
    return damages.Bases.written(tmp_path_factory.mktemp("bases"))


@pytest.fixture(autouse=True)
def watchdog():
    """End the process with all stacks if a call into SQLite does not return."""
    faulthandler.dump_traceback_later(120.0, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def whole(tmp_path):
    """Return a run with rows in all tables."""
    damages.write_whole(tmp_path / "run.gs")
    return tmp_path / "run.gs"


def changed(path, *statements):
    """Change a file as no writer does."""
    with damages.opened(path) as file:
        for statement in statements:
            file.execute(statement).fetchall()


def read_all(path):
    """Read everything that a run file has."""
    with open_run(path) as run:
        return (
            run.meta,
            run.tensors,
            run.last_step,
            list(run.steps()),
            list(run.events()),
            [run.peaks(step) for step in run.peak_steps()],
            list(run.samples()),
        )


def refusal(path):
    """Return the text with which a file is refused."""
    with pytest.raises(StateError, match="GS306") as caught:
        read_all(path)
    return str(caught.value)


@pytest.mark.parametrize("kind", damages.DAMAGES)
def test_commands_end_with_a_code_whatever_the_damage(bases, tmp_path, kind):
    seeds = (f"test {number}" for number in range(FILES))
    read = damages.read_damaged(bases, seeds, tmp_path, damages.run_here, kinds=(kind,))
    outcomes = list(read)
    assert len(outcomes) == FILES * len(damages.COMMANDS)
    assert [each for each in outcomes if each[-1].trouble] == []


@pytest.mark.parametrize("command", damages.COMMANDS)
def test_a_command_on_an_endless_view_takes_little_time_and_memory(
    bases, tmp_path, command
):
    path = tmp_path / "run.gs"
    damages.write_whole(path)
    view = f"CREATE VIEW steps AS {damages.ENDLESS}"
    changed(path, "DROP TABLE steps", view)
    line = damages.arguments_of(command, path, bases.whole, as_json=False)
    outcome = damages.run_apart(line)
    assert (outcome.code, outcome.trouble) == (3, "")


def test_a_command_that_fails_is_found(whole, monkeypatch):
    monkeypatch.setattr("gradscale.cli.report.diagnose_run", lambda *_, **__: 1 / 0)
    outcome = damages.run_here(["report", str(whole)])
    assert "ZeroDivisionError" in outcome.trouble


def test_an_intact_file_is_read(whole):
    meta, tensors, last, steps, events, peaks, samples = read_all(whole)
    assert (meta["end"]["state"], len(tensors), last) == ("closed", 8, 400)
    assert list(map(len, (steps, events, peaks, samples))) == [400, 28, 26, 80]


# --- tables that are none -------------------------------------------------------------


def test_a_view_without_an_end_is_refused(whole):
    changed(whole, "DROP TABLE steps", f"CREATE VIEW steps AS {damages.ENDLESS}")
    assert "the table steps is missing" in refusal(whole)


def test_other_columns_are_refused(whole):
    changed(whole, "ALTER TABLE events ADD COLUMN more")
    assert "the table events has other columns" in refusal(whole)


def test_a_virtual_table_is_refused(whole):
    changed(
        whole,
        "DROP TABLE tensors",
        "CREATE VIRTUAL TABLE tensors USING fts5 (id, name)",
    )
    assert "the table tensors has other columns" in refusal(whole)


def test_tables_and_views_beside_ours_do_not_matter(whole):
    changed(whole, f"CREATE VIEW more AS {damages.ENDLESS}", "CREATE TABLE mine (a)")
    assert len(read_all(whole)[3]) == 400


def test_a_schema_of_zero_is_refused(whole):
    changed(whole, "PRAGMA user_version = 0")
    assert "schema 0" in refusal(whole)


# --- trees without an end -------------------------------------------------------------


def test_steps_out_of_order_are_refused_and_do_not_repeat(whole):
    # Two leaves of `steps` change places: a reader in chunks would go back for ever.
    content = bytearray(whole.read_bytes())
    leaves = [
        at
        for at in range(damages.PAGE, len(content), damages.PAGE)
        if content[at] == 13 and b"GS000" in content[at : at + damages.PAGE]
    ]
    one, two = leaves[0], leaves[-1]
    first, last = (bytes(content[at : at + damages.PAGE]) for at in (one, two))
    content[one : one + damages.PAGE], content[two : two + damages.PAGE] = last, first
    whole.write_bytes(content)
    assert "the table steps has step" in refusal(whole)


def test_a_read_without_an_end_is_ended(whole, monkeypatch):
    def endless(file, table):
        return (row[0] for row in file.execute(damages.ENDLESS))

    monkeypatch.setattr(reader, "steps_in", endless)
    with open_run(whole) as run, pytest.raises(StateError, match="has no end"):
        run.peak_steps()


def test_a_journal_that_names_another_file_does_not_delete_it(whole, tmp_path):
    other = tmp_path / "thesis.txt"
    other.write_bytes(b"precious")
    # A hot journal of no pages: header, then name, page number, sum, length, mark.
    magic = bytes.fromhex("d9d505f920a163d7")
    name = str(other).encode()
    pages = (whole.stat().st_size // damages.PAGE).to_bytes(4, "big")
    header = magic + bytes(4) + b"\1\2\3\4" + pages + (512).to_bytes(4, "big")
    header += damages.PAGE.to_bytes(4, "big")
    lock = (0x40000000 // damages.PAGE + 1).to_bytes(4, "big")
    total = sum(name).to_bytes(4, "big")
    pointer = lock + name + len(name).to_bytes(4, "big") + total + magic
    (tmp_path / "run.gs-journal").write_bytes(header.ljust(512, b"\0") + pointer)
    assert "names another file" in refusal(whole)
    assert other.read_bytes() == b"precious"


# --- values ---------------------------------------------------------------------------

WRONG = {
    "a step beyond all": ("steps", "step", "9223372036854775807 WHERE step = 400"),
    "a scale of text": ("steps", "scale", "'abc'"),
    "a scale of bytes": ("steps", "scale", "x'00'"),
    "a time without an end": ("steps", "time", "9e999"),
    "a time before 1970": ("steps", "time", "-1.0"),
    "applied twice": ("steps", "applied", "2"),
    "a verdict of another program": ("steps", "verdict", "'; rm -rf ~'"),
    "a norm of bytes": ("steps", "norm", "x'00'"),
    "a peak of text": ("peaks", "peak", "'large'"),
    "text that is not UTF-8": ("tensors", "name", "CAST(x'ff' AS TEXT) WHERE id = 1"),
    "a name without an end": ("tensors", "name", "hex(zeroblob(6000)) WHERE id = 1"),
    "a negative count": ("samples", "zeros", "-1"),
    "half a histogram": ("samples", "histogram", "x'01'"),
    "a histogram of no width": ("samples", "histogram", "x'000300'"),
    "a histogram beyond its bins": ("samples", "histogram", "x'27010101'"),
    "a code of another program": ("events", "code", "'X'"),
    "an event that is not JSON": ("events", "data", "'{'"),
    "an event of a megabyte": (
        "events",
        "data",
        "'\"' || hex(zeroblob(600000)) || '\"'",
    ),
    "a number of many digits": (
        "events",
        "data",
        "replace(hex(zeroblob(500)), '0', '1')",
    ),
    "a whole that is deep": (
        "events",
        "data",
        "replace(hex(zeroblob(50000)), '0', '[')",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_value_that_no_writer_writes_is_refused_with_its_place(whole, case):
    table, column, value = WRONG[case]
    changed(whole, f"UPDATE OR IGNORE {table} SET {column} = {value}")
    text = refusal(whole)
    assert f"{table}.{column} in the row of " in text or "UTF-8" in text
    assert len(text) < 800


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("end", "{}"),
        ("end", '{"state": 1}'),
        ("end", '"closed"'),
        ("frameworks", "[]"),
        ("parameters", "{}"),
        ("world_size", '"2"'),
        ("rank", "1.5"),
    ],
)
def test_an_entry_of_meta_of_another_type_is_refused(whole, key, value):
    changed(whole, f"UPDATE meta SET value = '{value}' WHERE key = '{key}'")
    assert f"the entry {key} of meta" in refusal(whole)


def test_a_file_without_an_end_state_is_refused(whole):
    changed(whole, "DELETE FROM meta WHERE key = 'end'")
    assert "the entry end of meta" in refusal(whole)


def test_numbers_that_are_not_finite_are_read(tmp_path):
    path = tmp_path / "run.gs"
    with RunWriter(path) as writer:
        for step, value in enumerate((math.nan, math.inf, 0.0), start=1):
            writer.step(step, value, True, "GS000", value, value, value)
            writer.peaks(step, {"w": value})
    with open_run(path) as run:
        scales = [row.scale for row in run.steps()]
    assert [math.isnan(scales[0]), *scales[1:]] == [True, math.inf, 0.0]
    for command in ("report", "doctor", "tail"):
        assert damages.run_here([command, str(path)]).trouble == ""


@pytest.mark.parametrize(
    "data",
    [
        {"what": "x", "evidence": {"applied": "x", "steps": "y", "times": "z"}},
        {
            "what": "x",
            "evidence": {"signal": 1, "bits": "many", "loss": [], "lost": "a"},
        },
        {"what": ["x"], "evidence": [1], "advice": {"a": 1}},
        {"found": True, "direction": [], "module": {}, "count": "many", "elements": []},
        {"culprits": ["a", "b"], "count": 10**15},
        {"culprits": ["a", "b"], "count": "many"},
    ],
)
def test_an_event_of_any_form_is_reported(tmp_path, data):
    path = tmp_path / "run.gs"
    with RunWriter(
        path, meta={"policy": {"init_scale": "x", "min_scale": []}}
    ) as writer:
        for step in range(1, 30):
            writer.step(step, 4.0, False, "GS201")
        writer.event("GS201", step=2, where="a", data=data)
        writer.event("GS301", step=3, data=data)
        writer.event("GS301", step=4, data=data)
    for command in ("report", "doctor", "tail"):
        outcome = damages.run_here([command, str(path)])
        assert (outcome.trouble, outcome.code in (0, 1, 2)) == ("", True)


def test_a_file_that_may_not_be_read_is_refused(whole, monkeypatch):
    def forbidden(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", forbidden)
    assert "Permission denied" in refusal(whole)


def test_a_verdict_of_a_newer_version_is_compared(whole, tmp_path):
    other = tmp_path / "other.gs"
    damages.write_whole(other)
    changed(other, "UPDATE steps SET verdict = 'GS299' WHERE step = 100")
    done = CliRunner().invoke(app, ["diff", str(whole), str(other)])
    assert (done.exit_code, "GS299" in done.stdout) == (1, True)


# --- text -----------------------------------------------------------------------------

NAMES = (
    "[/]",
    "[bold]b[/bold]",
    "\x1b[2J\x1b]0;t\x07",
    "\x9b2J",
    "a\nb\r\x00",
    "\u202ec",
)


@pytest.fixture
def strange(tmp_path):
    """Return a run whose names and messages hold markup and control characters."""
    path = tmp_path / "run [red].gs"
    bad = "".join(NAMES)
    with RunWriter(path, meta={"policy": {"kind": bad}, "lr": bad, bad: 1}) as writer:
        for step in range(1, 50):
            writer.step(step, 4.0, step < 20, "GS201" if step >= 20 else "GS000")
        writer.peaks(30, dict.fromkeys(NAMES, math.nan))
        writer.event("GS201", step=25, where=bad, data={"culprits": NAMES, "count": 6})
        seen = damages.runs.sample(-20.0, 3.0, 500)
        writer.samples(10, dict.fromkeys(NAMES, seen))
        evidence = {bad: bad, "surrogate": "\ud800"}
        found = {"what": bad, "evidence": evidence, "advice": [bad, "\ud800"]}
        writer.event("GS301", step=7, where=bad, data=found)
        place = {"found": True, "direction": bad, "module": bad, "operation": bad}
        writer.event("GS208", step=21, data=place)
    return path


@pytest.mark.parametrize("command", damages.COMMANDS)
@pytest.mark.parametrize("as_json", [False, True])
def test_text_of_a_file_cannot_control_a_terminal(strange, bases, command, as_json):
    line = damages.arguments_of(command, strange, bases.whole, as_json=as_json)
    outcome = damages.run_here(line)
    assert outcome.trouble == ""
    assert outcome.code in (0, 1, 2)


def test_markup_is_printed_as_it_is(strange):
    shown = CliRunner().invoke(app, ["report", str(strange)], env={"COLUMNS": "120"})
    assert "[bold]b[/bold]" in shown.stdout
    assert "\\x1b[2J" in shown.stdout
    assert "run [red].gs" in shown.stdout


def test_json_keeps_the_names(strange):
    done = CliRunner().invoke(app, ["report", str(strange), "--json"])
    names = {culprit["name"] for culprit in json.loads(done.stdout)["culprits"]}
    assert set(NAMES) <= names
    assert done.stdout.isascii()


def test_a_figure_of_strange_text_is_drawn(strange, tmp_path):
    png = tmp_path / "out.png"
    done = CliRunner().invoke(app, ["report", str(strange), "--png", str(png)])
    assert (done.exit_code, png.stat().st_size > 10_000) == (0, True)


def test_the_name_of_a_file_that_is_refused_is_harmless(tmp_path):
    path = tmp_path / "\x1b[2J.gs"
    path.write_bytes(b"x" * 5000)
    done = CliRunner().invoke(app, ["report", str(path)])
    assert done.exit_code == 3
    assert "\x1b" not in done.stderr


def test_a_message_of_sqlite_is_harmless(whole):
    changed(
        whole,
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = 'x', name = '\x1b[2J' WHERE name = 'steps'",
    )
    done = CliRunner().invoke(app, ["report", str(whole)])
    assert (done.exit_code, "\x1b" in done.stderr) == (3, False)
