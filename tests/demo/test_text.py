"""The data: the standard library's own source text."""

import math

import pytest
import torch

from gradscale.demo.text import SYMBOLS, draw, frequency_loss, library_text


def decoded(symbols):
    letters = [chr(32 + k) for k in range(95)] + ["\n", "\0"]
    return "".join(letters[k] for k in symbols.tolist())


def test_the_text_is_the_same_on_every_call():
    once, again = library_text(), library_text()
    assert torch.equal(once.training, again.training)
    assert torch.equal(once.held_out, again.held_out)


def test_there_is_enough_text_and_every_symbol_is_known():
    text = library_text()
    assert len(text.training) > 500_000
    assert len(text.held_out) > 50_000
    assert int(text.training.min()) >= 0
    assert int(text.training.max()) < SYMBOLS


def test_the_text_is_that_of_the_modules_in_the_order_of_their_names(tmp_path):
    (tmp_path / "os.py").write_text("import sys\n" * 20)
    (tmp_path / "abc.py").write_text("x = 1\n" * 20)
    text = library_text(tmp_path)
    whole = decoded(torch.cat(text))
    assert whole == "x = 1\n" * 20 + "import sys\n" * 20
    assert len(text.held_out) == len(whole) // 10


def test_a_file_that_is_no_module_of_the_library_is_left_out(tmp_path):
    (tmp_path / "os.py").write_text("a" * 50)
    (tmp_path / "mine.py").write_text("b" * 50)
    assert decoded(torch.cat(library_text(tmp_path))) == "a" * 50


def test_bytes_outside_ascii_become_one_symbol(tmp_path):
    (tmp_path / "os.py").write_bytes("aé\tb".encode() * 5)
    assert decoded(torch.cat(library_text(tmp_path))) == "a\0\0\0b" * 5


def test_a_folder_without_sources_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no source.*its \.py files"):
        library_text(tmp_path)


def test_windows_are_parts_of_the_text():
    windows = draw(torch.arange(10), (200, 4), torch.Generator().manual_seed(0))
    assert windows.shape == (200, 4)
    assert torch.equal(windows - windows[:, :1], torch.arange(4).expand(200, 4))
    assert set(windows[:, 0].tolist()) == set(range(7))


def test_the_frequency_loss_is_the_cross_entropy():
    # 97 of 194 after each symbol was counted once more.
    training = torch.cat([torch.zeros(96), torch.ones(1)]).long()
    assert frequency_loss(training, torch.zeros(5).long()) == pytest.approx(math.log(2))
    assert frequency_loss(training, torch.ones(5).long()) == pytest.approx(math.log(97))
