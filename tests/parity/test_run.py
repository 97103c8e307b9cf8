"""The command `python -m parity`, as far as it goes without running a test."""

import pytest
import torch

from parity.run import main, mismatch
from parity.swap import BASELINE, swap


@pytest.mark.parametrize(
    ("make", "happened", "remedy"),
    [
        (lambda tmp: "", "No folder was given", "make parity PT_TEST="),
        (lambda tmp: str(tmp / "none"), "none is not a folder", "make parity PT_TEST="),
        (lambda tmp: str(tmp), "holds no test_torch.py", "make parity PT_TEST="),
    ],
    ids=["none given", "not there", "another folder"],
)
def test_a_wrong_folder_is_refused_with_a_remedy(
    tmp_path, capsys, make, happened, remedy
):
    with pytest.raises(SystemExit) as exit_:
        main([make(tmp_path)])
    said = capsys.readouterr().err
    assert exit_.value.code == 2
    assert happened in said
    assert remedy in said


def test_the_root_of_a_checkout_is_refused_and_its_test_folder_named(tmp_path, capsys):
    (tmp_path / "test").mkdir()
    (tmp_path / "test/test_torch.py").touch()
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert f"Pass {(tmp_path / 'test').resolve()}" in capsys.readouterr().err


def test_tests_of_another_release_are_warned_about(tmp_path):
    (tmp_path / "version.txt").write_text("1.4.0a0\n")
    assert "the tests are of PyTorch 1.4.0a0" in mismatch(tmp_path / "test")


def test_tests_of_the_installed_release_are_not_warned_about(tmp_path):
    (tmp_path / "version.txt").write_text(torch.__version__)
    assert mismatch(tmp_path / "test") == ""


def test_a_baseline_run_leaves_torchs_class(monkeypatch):
    before = torch.amp.GradScaler
    monkeypatch.setenv(BASELINE, "1")
    swap()
    assert torch.amp.GradScaler is before
