"""Building the looks in C++: in nobody's way, whatever happens on the way."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from gradscale.errors import ConfigError
from gradscale.torch import looks
from gradscale.torch.kernels.readers import MANY, Reader
from gradscale.torch.looks import building


@pytest.fixture(autouse=True)
def _unbuilt(monkeypatch, tmp_path):
    """Begin as a new process does, with an empty folder for extensions."""
    monkeypatch.setattr(building, "native", None)
    monkeypatch.setattr(building, "_asked", False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "with a space"))


def compiling(monkeypatch, act):
    """Let `act(library)` stand for the compiler."""
    monkeypatch.setattr(building, "_compile", act)


def with_this_package():
    """Return an environment in which another process finds this very package."""
    return {**os.environ, "PYTHONPATH": str(Path(building.__file__).parents[3])}


def wait_for_thread():
    for thread in threading.enumerate():
        if thread.name == "gradscale looks":
            thread.join(60.0)


def copied(library):
    """Return what stands for the compiler and copies a library."""

    def copy(to):
        shutil.copy(library, to)

    return copy


# --- what cannot be built -------------------------------------------------------------


def fail(library):
    raise RuntimeError("Error building extension\nmany lines of a compiler")


def test_a_build_that_fails_raises_where_it_was_asked_for(monkeypatch):
    compiling(monkeypatch, fail)
    with pytest.raises(ConfigError, match=r"(?s)Install a C.*Error building extension"):
        looks.build()
    assert building.native is None


def test_a_build_that_fails_in_the_background_is_one_line_of_the_log(
    monkeypatch, caplog
):
    compiling(monkeypatch, fail)
    with caplog.at_level(logging.INFO, logger="gradscale"):
        looks.build_soon()
        looks.build_soon()
        wait_for_thread()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "Error building extension" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_python_answers_after_a_build_that_failed(monkeypatch):
    compiling(monkeypatch, fail)
    looks.build_soon()
    wait_for_thread()
    tensor = torch.ones(3)
    assert list(looks.addresses([tensor])) == [tensor.data_ptr()]


def test_a_machine_without_a_compiler_is_told_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="Install a C"):
        looks.build()


def test_a_failed_build_leaves_nothing_behind(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError):
        looks.build()
    assert [path.name for path in building._folder().iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.setattr(sys, "platform", "win32"), "on Linux"),
        (
            lambda m: m.setattr(sys, "_is_gil_enabled", lambda: False, raising=False),
            "interpreter lock",
        ),
    ],
    ids=["platform", "free-threading"],
)
def test_another_python_is_told_so(monkeypatch, change, reason):
    change(monkeypatch)
    with pytest.raises(ConfigError, match=reason):
        building.build()


def test_a_library_that_cannot_be_loaded_is_an_error_that_says_so(monkeypatch):
    compiling(monkeypatch, lambda library: library.write_text("no library"))
    with pytest.raises(ConfigError, match="gradscale_looks"):
        looks.build()


def test_a_machine_without_threads_goes_on(monkeypatch, caplog):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with caplog.at_level(logging.INFO, logger="gradscale"):
        looks.build_soon()
    assert "can't start new thread" in caplog.text


# --- what was built -------------------------------------------------------------------


def test_the_library_is_built_once_for_all_processes(monkeypatch, looks_in_cpp):
    made = []
    copy = copied(looks_in_cpp.__file__)
    compiling(monkeypatch, lambda library: (made.append(library), copy(library)))
    looks.build()
    monkeypatch.setattr(building, "native", None)
    looks.build()
    assert len(made) == 1
    assert building.native is not None


def test_another_source_is_another_library(monkeypatch, tmp_path):
    before = building._folder()
    source = tmp_path / "looks.cpp"
    source.write_text(building.SOURCE.read_text(encoding="utf-8") + "// more\n")
    monkeypatch.setattr(building, "SOURCE", source)
    assert building._folder() != before


def test_another_torch_is_another_library(monkeypatch):
    before = building._folder()
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert building._folder() != before


SMALL = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "gradscale_looks"};
PyMODINIT_FUNC PyInit_gradscale_looks() {
  return PyModule_Create(&definition);
}
"""


def test_folders_may_have_a_space(monkeypatch, looks_in_cpp, tmp_path, capfd):
    source = tmp_path / "a source" / "looks.cpp"
    source.parent.mkdir()
    source.write_text(SMALL)
    monkeypatch.setattr(building, "SOURCE", source)
    # The fixture skips where there is no compiler.
    looks.build()
    assert building.native.__name__ == "gradscale_looks"
    assert building._folder().parent.name == "with a space"
    assert sorted(path.name for path in building._folder().iterdir()) == [
        "gradscale_looks.so",
        "lock",
    ]
    assert capfd.readouterr() == ("", "")


# --- others at the same time ----------------------------------------------------------


def test_what_a_dead_process_left_is_no_hindrance(monkeypatch, looks_in_cpp):
    folder = building._folder()
    left = folder / "build-dead"
    left.mkdir(parents=True)
    (left / "lock").touch()
    (folder / "lock").touch()
    compiling(monkeypatch, copied(looks_in_cpp.__file__))
    looks.build()
    assert building.native is not None
    assert not left.exists()


WAITER = """
from gradscale.torch.looks import building
building._compile = lambda library: print("compiled")
try:
    building.build()
except Exception as error:
    print(type(error).__name__)
else:
    print("found")
"""


def test_another_process_waits_and_finds_what_this_one_built(looks_in_cpp):
    folder = building._folder()
    folder.mkdir(parents=True)
    with building._alone(folder):
        waiter = subprocess.Popen(
            [sys.executable, "-c", WAITER],
            stdout=subprocess.PIPE,
            text=True,
            env=with_this_package(),
        )
        with pytest.raises(subprocess.TimeoutExpired):
            waiter.wait(5.0)
        shutil.copy(looks_in_cpp.__file__, folder / "gradscale_looks.so")
    assert waiter.communicate(timeout=60.0)[0].split() == ["found"]


def test_a_second_thread_waits_for_the_first(monkeypatch, looks_in_cpp):
    begun, go = threading.Event(), threading.Event()
    copy = copied(looks_in_cpp.__file__)

    def slow(library):
        begun.set()
        assert go.wait(60.0)
        copy(library)

    compiling(monkeypatch, slow)
    looks.build_soon()
    assert begun.wait(60.0)
    second = threading.Thread(target=looks.build)
    second.start()
    assert building.native is None
    go.set()
    second.join(60.0)
    assert building.native is not None


ENDS = """
import threading, time
from gradscale.torch.looks import building
building._built = lambda: time.sleep(600.0)
building.build_soon()
print("ends")
"""


def test_the_end_of_a_process_does_not_wait_for_the_build():
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", ENDS],
        capture_output=True,
        text=True,
        timeout=60.0,
        env=with_this_package(),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")
    assert time.perf_counter() - begun < 60.0


# --- when -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "device", "kernels", "asked"),
    [
        (MANY, "cuda", "auto", True),
        (MANY - 1, "cuda", "auto", False),
        (MANY, "cpu", "auto", False),
        (MANY, "cuda", "plain", False),
    ],
)
def test_the_build_begins_with_many_tensors_on_a_gpu(
    monkeypatch, count, device, kernels, asked
):
    started = []
    monkeypatch.setattr(looks, "build_soon", lambda: started.append(True))
    monkeypatch.setattr(
        "gradscale.torch.kernels.readers.usable", lambda kernels, _: kernels == "auto"
    )
    monkeypatch.setattr("gradscale.torch.kernels.readers.on", lambda _: nullcontext())
    monkeypatch.setattr(Reader, "_read", lambda *_: None)
    tensors = [torch.ones(1)] * count
    Reader(kernels).read(tensors, None, (torch.device(device), torch.float32))
    assert started == [True] * asked
