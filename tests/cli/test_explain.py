"""`gradscale explain`: pages, JSON, and suggestions for typos."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gradscale
from gradscale import cli
from gradscale.cli import app
from gradscale.judge.catalogue import BY_CODE, CATALOGUE, GIVEN

COMMANDS = sorted(path.stem for path in Path(cli.__file__).parent.glob("[!_]*.py"))


def call(*arguments, columns=80):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


def words(text):
    """Return the text with all white space and box drawing folded into spaces."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.code)
def test_a_page_holds_all_of_an_entry(entry):
    done = call("explain", entry.code, columns=200)
    shown = words(done.stdout)
    texts = [entry.summary, entry.meaning, entry.why, entry.example, entry.instead]
    texts += [*entry.advice, *entry.references, GIVEN]
    assert done.exit_code == 0
    assert [text for text in texts if words(text).strip() not in shown] == []


def test_a_page_has_the_parts_of_a_rule_page():
    lines = call("explain", "GS105").stdout.splitlines()
    heads = [line.strip() for line in lines if line and not line.startswith(" ")]
    wanted = ["What it means", "Why it matters", "Example", "Use instead", "What to do"]
    assert heads[0] == "GS105 fp16-gradients"
    assert [head for head in heads if head in wanted] == wanted


def test_a_page_without_an_alternative_has_no_section_for_it():
    assert "Use instead" not in call("explain", "GS202").stdout


@pytest.mark.parametrize("typed", ["gs201", "Gs201", " GS201 "])
def test_a_code_may_be_typed_in_any_case(typed):
    assert call("explain", typed).stdout == call("explain", "GS201").stdout


@pytest.mark.parametrize("columns", [80, 46])
@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.code)
def test_a_page_fits_the_terminal(entry, columns):
    lines = call("explain", entry.code, columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize("columns", [80, 46])
def test_the_list_fits_the_terminal(columns):
    lines = call("explain", "--all", columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns


def test_the_list_has_every_code_with_its_summary():
    shown = words(call("explain", "--all").stdout)
    lines = [f"{entry.code} {entry.name} – {entry.summary}" for entry in CATALOGUE]
    assert [line for line in lines if line not in shown] == []


def test_json_of_one_code_is_its_entry():
    done = call("explain", "gs203", "--json")
    entry = asdict(BY_CODE["GS203"])
    assert json.loads(done.stdout) == json.loads(json.dumps(entry))


def test_json_of_all_codes_is_the_catalogue():
    done = call("explain", "--all", "--json")
    assert [entry["code"] for entry in json.loads(done.stdout)] == list(BY_CODE)


def test_output_that_is_not_a_terminal_has_no_colour():
    assert "\x1b" not in call("explain", "GS201").stdout


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("GS21", "GS201 (overflow)"),
        ("201", "GS201 (overflow)"),
        ("overflow", "GS201 (overflow)"),
        ("colapse", "GS202 (collapse)"),
        ("G202", "GS202 (collapse)"),
    ],
)
def test_an_unknown_code_is_refused_with_the_nearest_ones(typed, near):
    done = call("explain", typed)
    shown = words(done.stderr)
    assert done.exit_code == 2
    assert f"{typed} is not a code of this version of gradscale. Did you mean" in shown
    assert near in shown
    assert "gradscale explain --all lists all codes." in shown


def test_a_word_similar_to_no_code_is_refused_without_a_suggestion():
    shown = words(call("explain", "xyzzy").stderr)
    assert (
        "xyzzy is not a code of this version of gradscale. gradscale explain" in shown
    )


@pytest.mark.parametrize("arguments", [[], ["GS201", "--all"]], ids=["none", "both"])
def test_one_code_or_all_must_be_asked_for(arguments):
    done = call("explain", *arguments)
    assert done.exit_code == 2
    assert "Give one code, such as GS201, or --all to list all" in words(done.stderr)


def test_an_error_leaves_standard_output_empty():
    assert call("explain", "GS999").stdout == ""


@pytest.mark.parametrize(
    "text",
    [
        "Explain a code: its meaning, its consequences and the remedy.",
        "gradscale explain GS201 – print one page",
        "gradscale explain --all – list all codes",
        "gradscale explain GS201 --json – print JSON",
        "scaler.last.verdict.code",
    ],
)
def test_the_help_has_examples(text):
    assert text in words(call("explain", "--help").stdout)


def test_the_version_is_printed():
    assert call("--version").stdout == f"gradscale {gradscale.__version__}\n"


def test_without_a_command_the_commands_are_listed():
    shown = call().output
    assert [name for name in COMMANDS if name not in shown] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_module_of_the_folder_is_a_command_with_help(name):
    done = call(name, "--help")
    assert done.exit_code == 0
    assert f"{name} [OPTIONS]" in words(done.stdout)


def test_a_command_that_does_not_exist_is_refused():
    done = call("explian")
    assert done.exit_code == 2
    assert "No such command 'explian'." in words(done.stderr)


def test_the_module_runs_as_a_program_and_loads_no_framework():
    script = (
        "import runpy, sys\n"
        "sys.argv = ['gradscale', 'explain', 'GS201']\n"
        "try:\n    runpy.run_module('gradscale', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'jax', 'keras', 'numpy', 'altair'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("GS201 overflow")
