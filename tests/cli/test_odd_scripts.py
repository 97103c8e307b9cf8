"""Unusual scripts behave under `gradscale run` as under python."""

import pytest

from tests.cli.odd_scripts import (
    SCRIPTS,
    Ended,
    Launcher,
    compare_alone,
    compare_forked,
    differences,
)

# The rest of the list: python -m tests.cli.odd_scripts.
WITHOUT_TORCH = (
    "exit_text",
    "exception",
    "underscore_exit",
    "killed",
    "stdin",
    "stdout_closed",
    "arguments",
    "module",
    "folder",
    "pythonpath",
    "warnings_are_errors",
    "removes_its_folder",
    "removes_temporary_files",
)
FORKED = (
    "growth_interval_large",
    "tensor_as_init_scale",
    "settings_changed_later",
    "odd_scaler_copied",
    "chdir_before_training",
    "folder_removed_in_training",
    "run_file_removed",
    "killed_in_training",
    "warnings_are_errors_in_training",
    "step_without_gradients",
    "scale_at_its_floor",
)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_a_script_without_torch_is_the_same(name, tmp_path):
    assert compare_alone(name, tmp_path) == []


@pytest.fixture(scope="module")
def launchers(tmp_path_factory):
    parent = tmp_path_factory.mktemp("launchers")
    both = [Launcher(parent, recorded=recorded) for recorded in (False, True)]
    yield both
    for launcher in both:
        launcher.close()


@pytest.mark.parametrize("name", FORKED)
def test_a_script_that_trains_is_the_same_and_recorded(name, tmp_path, launchers):
    assert compare_forked(name, tmp_path, *launchers) == []


# Once in ten runs a thread read gradients that another one was replacing.
@pytest.mark.parametrize("run", range(4))
def test_threads_that_train_at_once_do_not_crash(run, tmp_path, launchers):
    assert compare_forked("threads", tmp_path, *launchers) == []


@pytest.mark.parametrize("field", Ended._fields)
def test_a_difference_is_found(field):
    end = Ended(0, "", "")
    other = end._replace(**{field: 1 if field == "code" else "other"})
    [found] = differences(SCRIPTS["exit_none"], end, other, [])
    assert found.startswith(f"{field}: ")
