"""The walk of a step: which calls are counted, and where they were made."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from benchmarks import bench_walk
from benchmarks.bench_walk import CASES, Case, Walk, listed, row_of, trace

SOURCE = """
from outer import called_back

def first():
    second()
    return [double(n) for n in range(3)]

def second():
    return called_back(double, 1)

def double(n):
    return 2 * n
"""
HELPER = """
def called_back(function, argument):
    return function(argument)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return (the folder of a package, a function that loads its one module).

    Its `second` calls `double` through a library whose folder has the given name.
    """
    root = tmp_path / "package"
    root.mkdir()
    (root / "steps.py").write_text(SOURCE)

    def load(library):
        folder = tmp_path / library
        folder.mkdir()
        (folder / "outer.py").write_text(HELPER)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, "outer", raising=False)
        spec = importlib.util.spec_from_file_location("steps", root / "steps.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield root, load
    sys.modules.pop("outer", None)


def walked(package, library):
    root, load = package
    module = load(library)
    walk = Walk(f"{root}{os.sep}")
    with walk.during("step"):
        module.first()
    return [(call.function, call.depth) for call in walk.calls]


def test_calls_of_the_package_are_counted_in_order_without_comprehensions(package):
    seen = walked(package, "somewhere")
    assert seen == [("first", 0), ("second", 1), ("double", 2), *[("double", 1)] * 3]


def test_calls_below_a_frame_of_triton_are_left_out(package):
    seen = walked(package, "triton")
    assert seen == [("first", 0), ("second", 1), *[("double", 1)] * 3]


def test_a_step_that_is_not_traced_has_no_calls(package):
    root, load = package
    module = load("somewhere")
    walk = Walk(f"{root}{os.sep}", traced=False)
    with walk.during("step"):
        module.first()
    assert walk.calls == []


def test_a_row_counts_calls_and_files_of_the_step_and_of_each_method():
    walk = trace(CASES["plain"])
    row = row_of("plain", walk)
    assert row["calls"] == len(walk.calls)
    assert row["calls"] == sum(row[f"{method}_calls"] for method in bench_walk.METHODS)
    assert max(row["clip_files"], row["step_files"]) <= row["files"] < row["calls"]
    assert row["last_calls"] > 0


def test_a_case_without_a_clip_makes_no_calls_for_one():
    assert row_of("plain, no clip", trace(CASES["plain, no clip"]))["clip_calls"] == 0


def test_the_step_with_the_most_calls_is_reported(monkeypatch):
    step = bench_walk._step
    counts = []

    def noted(case, walk, *rest):
        step(case, walk, *rest)
        counts.append(len(walk.calls))

    monkeypatch.setattr(bench_walk, "_step", noted)
    assert len(trace(CASES["plain"]).calls) == max(counts)
    assert counts[: bench_walk.FIRST - 1] == [0] * (bench_walk.FIRST - 1)
    assert min(counts[bench_walk.FIRST - 1 :]) > 0


def test_the_scaler_of_torch_is_one_file():
    row = row_of("torch.amp, foreach", trace(CASES["torch.amp, foreach"]))
    assert row["files"] == 1
    assert 10 < row["calls"] < 20


def test_the_list_shows_every_call_under_its_method():
    walk = trace(Case("torch.amp", "foreach"))
    lines = listed(walk).splitlines()
    assert "  grad_scaler.py  GradScaler.step" in lines
    assert sum(not line.startswith(" ") for line in lines) == 4
    assert len(lines) == 4 + len(walk.calls)


def test_a_record_is_printed_and_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(bench_walk, "CASES", {"plain": CASES["plain"]})
    path = tmp_path / "walk.json"
    bench_walk.main(["--json", "--out", str(path)])
    record = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out) == record
    assert (record["what"], record["unit"]) == ("walk", "calls")
    bench_walk.main([])
    assert str(record["rows"][0]["calls"]) in capsys.readouterr().out


def test_kernels_on_a_cpu_are_traced_in_a_process_that_interprets_them(monkeypatch):
    started, returncode = [], 0

    def noted(command, env, **how):
        started.append((command[3:], env.get("TRITON_INTERPRET")))
        return subprocess.CompletedProcess(command, returncode)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(bench_walk.subprocess, "run", noted)
    bench_walk.main(["--list", "own"])
    assert started == [(["--list", "own"], "1")]
    returncode = 7
    with pytest.raises(SystemExit, match="7"):
        bench_walk.main([])
