"""A result names the measured commit."""

import subprocess

import pytest

from benchmarks.record import Place, result

PLACE = Place("a device", {})


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Return a folder that is a git checkout, and where commands run."""
    for name, text in {
        "step.py": "pass\n",
        "benchmarks/results/step.json": "{}",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rewritten_results_do_not_mark_the_commit_as_dirty(checkout):
    head = result("step", PLACE, [])["commit"]
    (checkout / "benchmarks/results/step.json").write_text("{ }")
    (checkout / "notes.txt").write_text("not of the project")
    assert len(head) >= 7
    assert result("step", PLACE, [])["commit"] == head


@pytest.mark.parametrize("folder", [".", "benchmarks"])
def test_changed_code_marks_the_commit_as_dirty(checkout, folder, monkeypatch):
    head = result("step", PLACE, [])["commit"]
    (checkout / "step.py").write_text("print()\n")
    monkeypatch.chdir(checkout / folder)
    assert result("step", PLACE, [])["commit"] == f"{head}-dirty"


def test_outside_a_checkout_the_commit_is_unknown_or_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert result("step", PLACE, [])["commit"] == "unknown"
    assert result("step", PLACE, [], "1234567")["commit"] == "1234567"
