"""Facts that a kernel writes into host memory itself."""

import gc
import itertools
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradscale.torch.device_state import host_copy as mailbox
from gradscale.torch.device_state import letters
from gradscale.torch.device_state.host_copy import LAG, Mailbox
from gradscale.torch.device_state.layout import RING, ROW, new_ledger
from gradscale.torch.device_state.letters import LINES, NUMBERS, WORDS, Letter
from tests.torch.letter_writing import line, write

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_astray():
    letters._astray.clear()
    yield
    letters._astray.clear()


def letter(number=7):
    made = Letter(CPU)
    made.number = number
    return made


def facts(updates=1, loss=0.5):
    ledger = new_ledger(CPU, 8.0)
    ledger.total.tally.fill_(updates)
    ledger.loss.fill_(loss)
    ledger.ring[(updates - 1) % RING] = torch.arange(len(ROW)).float()
    return ledger


@given(order=st.permutations(range(WORDS)))
def test_a_line_is_there_only_once_its_last_word_is(order):
    written, landing = letter(), letter()
    write(written, facts(), 0)
    for word in order:
        assert not landing.arrived()
        landing.lines[0, word] = written.lines[0, word]
    assert landing.arrived()
    assert landing.read() == (1, [float(field) for field in range(len(ROW))], 0.5)


@pytest.mark.parametrize("before", [0, 6, 8, NUMBERS])
def test_what_was_written_for_another_update_is_not_taken_for_this_one(before):
    landing = letter()
    write(landing, facts(), 0, number=before)
    assert not landing.arrived()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1.5, 3.4e38, float("inf")])
def test_values_arrive_bit_for_bit(value):
    landing, ledger = letter(number=NUMBERS), facts(loss=value)
    ledger.ring.fill_(value)
    write(landing, ledger, 0)
    _, row, loss = landing.read()
    assert [str(one) for one in (*row, loss)] == [
        str(torch.tensor(value).item())
    ] * len([*row, loss])


@pytest.mark.parametrize("updates", [1, 2**31, 2**32 - 1, 2**32, 2**40 + 3])
def test_counts_of_any_size_arrive(updates):
    landing = letter()
    write(landing, facts(updates), updates)
    assert landing.read()[0] == updates


def test_a_line_that_is_not_there_is_waited_for():
    landing, ledger = letter(), facts()
    thread = threading.Timer(0.05, write, (landing, ledger, 0))
    thread.start()
    assert landing.wait()[0] == 1
    thread.join()


def test_an_earlier_line_is_waited_for_too():
    landing = letter()
    thread = threading.Timer(0.05, line, (landing, 1 + 3, [2.0] * len(ROW), 7))
    thread.start()
    assert landing.row(RING + 3) == [2.0] * len(ROW)
    thread.join()


def test_a_device_that_is_done_and_has_not_written_is_an_error(monkeypatch):
    monkeypatch.setattr(letters, "_ASK", 0.0)
    monkeypatch.setattr(letters, "_FOR_LONG", 0.0)
    with pytest.raises(RuntimeError, match=r"facts of update 7 .* kernels='plain'"):
        letter().wait()


class Stream:
    """Of a device that is busy, or has failed."""

    def __init__(self, then):
        self.then = then

    def query(self):
        self.then()
        return False


def on_cuda(monkeypatch, then):
    """Return a letter of a device that does this when it is asked how it is."""
    landing = letter()
    landing.device = torch.device("cuda")
    monkeypatch.setattr(letters, "_ASK", 0.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(then))
    return landing


def test_a_device_that_is_busy_is_asked_again_and_not_given_up(monkeypatch):
    asked = itertools.count(1)

    def answer():
        if next(asked) == 3:
            write(landing, facts(), 0)

    landing = on_cuda(monkeypatch, answer)
    assert landing.wait()[0] == 1
    assert next(asked) == 4


def test_a_failed_device_says_so_itself(monkeypatch):
    def broken():
        raise torch.AcceleratorError("an illegal memory access was encountered")

    landing = on_cuda(monkeypatch, broken)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        landing.wait()


def test_after_a_long_time_the_device_is_waited_for(monkeypatch):
    landing = on_cuda(monkeypatch, lambda: None)
    monkeypatch.setattr(letters, "_FOR_LONG", 0.0)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: write(landing, facts(), 0)
    )
    assert landing.wait()[0] == 1


def sent(box, ledger):
    """Send a letter that is still to be written; return it and what it is to hold."""
    made, known = box.letter(ledger)
    ledger.total.tally[0].add_(1)
    return made, known


def test_memory_that_is_still_to_be_written_outlives_its_mailbox():
    # Mailboxes of other tests that wait for the collector lose theirs before.
    gc.collect()
    letters._astray.clear()
    box, ledger = Mailbox(), new_ledger(CPU, 8.0)
    late, known = sent(box, ledger)
    box.exchange(ledger)
    del box
    assert letters._astray == [late]
    assert letters.fresh(CPU) is not late
    write(late, ledger, known)
    assert letters.fresh(CPU) is late
    assert letters._astray == []


def test_memory_that_is_still_to_be_written_is_kept_when_the_count_is_set():
    box, ledger = Mailbox(), new_ledger(CPU, 8.0)
    late, _ = sent(box, ledger)
    box.exchange(ledger)
    ledger.total.set_tally(50, 0)
    new, known = sent(box, ledger)
    assert letters._astray == [late]
    assert new is not late
    assert known == 50


def test_an_update_that_failed_before_its_exchange_is_made_up_for():
    box, ledger = Mailbox(), new_ledger(CPU, 8.0)
    lost, known = sent(box, ledger)
    write(lost, ledger, known)
    late = []
    for _ in range(LAG + 1):
        made, known = sent(box, ledger)
        write(made, ledger, known)
        late.append(box.exchange(ledger))
    # The row of the first is in the next letter: the host never heard of it.
    assert [one.step for one in late[-1]] == [1, 2]
    # It was written meanwhile, and so it was used again.
    assert letters._astray == []


def test_letters_are_used_again_and_never_before_they_were_read():
    box, ledger, seen = Mailbox(), new_ledger(CPU, 8.0), []
    for _ in range(5 * LAG):
        made, known = sent(box, ledger)
        write(made, ledger, known)
        assert all(made is not other for other in seen[-LAG:])
        seen.append(made)
        box.exchange(ledger)
    assert len({id(made) for made in seen}) == LAG + 1


def test_copies_and_letters_may_take_turns():
    box, ledger, late = Mailbox(), new_ledger(CPU, 8.0), []
    for turn in range(12):
        if turn % 3:
            made, known = sent(box, ledger)
            write(made, ledger, known)
        else:
            ledger.total.tally[0].add_(1)
        late.append(box.exchange(ledger))
    assert [one.step for rows in late[LAG:] for one in rows] == list(range(1, 11))


def test_what_was_written_for_a_mailbox_that_is_gone_is_not_news_for_another():
    gc.collect()
    letters._astray.clear()
    box, ledger = Mailbox(), new_ledger(CPU, 8.0)
    lost, known = sent(box, ledger)
    write(lost, ledger, known)
    del box
    made, _ = Mailbox().letter(ledger)
    assert made is lost
    assert made.read() is None


def test_numbers_begin_anew_before_they_are_too_large(monkeypatch):
    box, ledger = Mailbox(), new_ledger(CPU, 8.0)
    monkeypatch.setattr(mailbox, "serial", itertools.count(NUMBERS - 1))
    assert [box.letter(ledger)[0].number for _ in range(3)] == [NUMBERS, 1, 2]


def test_a_letter_has_a_line_for_each_place_of_the_ring_and_one_more():
    assert tuple(letter().lines.shape) == (LINES, WORDS) == (RING + 1, len(ROW) + 3)


def test_a_letter_that_no_kernel_was_started_for_is_taken_back():
    box, ledger = Mailbox(), new_ledger(CPU, 8.0)
    unused, _ = box.letter(ledger)
    box.recall()
    box.recall()
    ledger.total.tally[0].add_(1)
    assert box.exchange(ledger) is None
    made, known = box.letter(ledger)
    assert made is unused
    assert known == 0
    write(made, ledger, known, number=made.number - 1)
    assert made.read() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_device_writes_to_is_pinned():
    assert Letter(torch.device("cuda", 0)).lines.is_pinned()
