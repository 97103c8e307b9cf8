"""Calm steps pass by unopened: what is judged and written is the same as without."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale import DynamicScale
from gradscale.runfile import open_run
from gradscale.torch import GradScaler
from gradscale.torch.device_state import layout as ledger
from gradscale.torch.device_state.calm import Calm
from gradscale.torch.device_state.host_copy import LAG, Mailbox
from gradscale.torch.device_state.letters import CALM_AT, opened
from tests.torch.kernels.books import Books
from tests.torch.kernels.test_update import STEPS
from tests.torch.training import INF, NAN, planted

# The interpreter computes by NumPy, which warns where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@given(step=STEPS, replayed=st.sampled_from([0, 0, 0, 1]))
@settings(max_examples=80)
def test_the_kernel_calls_calm_what_the_host_does(device, step, replayed):
    box = Mailbox()
    books = Books(DynamicScale(init_scale=2.0, min_scale=1.0), device, "triton")
    for _ in range(replayed):
        books.end()
    books.mailbox = box
    books.end(**step)
    letter = box._posted[0]
    updates, row, _ = letter.read() or letter.wait()
    head = letter.head.tobytes()
    calm = head[CALM_AT] > 127
    assert updates == 1 + replayed
    assert calm == (ledger.calm(row) is not None and not replayed)
    if calm:
        assert opened(head)[:2] == (updates, row)


def test_what_passes_by_is_what_an_exchange_brings(device):
    boxes = [Mailbox(), Mailbox()]
    seen = [[], []]
    for box, late, quick in zip(boxes, seen, (True, False), strict=True):
        books = Books(DynamicScale(), device, "triton", box)
        for step in range(1, 12):
            books.ledger.loss.fill_(step / 4)
            skip = float(step in (5, 6))
            books.end(skip, amax=float(step))
            if device.type == "cuda":
                torch.cuda.synchronize()
            has_loss = step % 3 > 0
            found = box.calm(has_loss=has_loss) if quick else None
            if found is not None:
                kept = Calm()
                kept.append((*found, 0.0))
                late.extend(kept.take())
            else:
                late.extend(box.exchange(books.ledger, has_loss=has_loss) or ())
    assert seen[0] == seen[1]
    assert [one.step for one in seen[0]] == list(range(1, 12 - LAG))


def test_nothing_is_changed_by_a_step_that_is_not_calm_or_not_there(device):
    box = Mailbox()
    books = Books(DynamicScale(), device, "triton", box)
    assert box.calm(has_loss=True) is None
    for skip in (1.0, 0.0, 0.0):
        books.end(skip, amax=1.0)
        assert box.calm(has_loss=True) is None
        late = box.exchange(books.ledger)
    assert [one.step for one in late] == [1]
    books.end(amax=1.0)
    box.clear()
    assert box.calm(has_loss=True) is None
    assert box.exchange(books.ledger) == []


class Writer:
    """Takes rows, and asks for them."""

    def __init__(self):
        self.written = []

    def rows(self, rows):
        self.written.extend(rows)

    def ask(self, ask):
        self.asked = ask


def kept(device, steps):
    """Return what is kept of a run of calm steps, and who writes it."""
    calm, writer, box = Calm(), Writer(), Mailbox()
    calm.write_to(writer)
    books = Books(DynamicScale(), device, "triton", box)
    for step in range(1, steps + 1):
        books.ledger.loss.fill_(0.25)
        books.end(scale=8.0, amax=3.0, norm=2.0)
        letter = box._posted.popleft()
        box._unread, box._sent = 0, False
        box._seen += 1
        assert letter.read() or letter.wait()
        calm.append((letter.head.tobytes(), step == 1, 7.5))
    return calm, writer


def test_rows_are_written_once_whoever_comes_first(device):
    calm, writer = kept(device, 5)
    writer.asked()
    assert writer.written[0] == (1, 7.5, 8.0, True, "GS000", 2.0, 3.0, 0.25)
    assert writer.written[1] == (2, 7.5, 8.0, True, "GS000", 2.0, 3.0, None)
    more, _ = kept(device, 2)
    calm.extend(more)
    assert len(calm.take()) == 7
    writer.asked()
    assert [row[0] for row in writer.written] == [1, 2, 3, 4, 5, 1, 2]
    assert calm == calm.take() == []


def test_rows_that_a_thread_asks_for_keep_their_order(device):
    calm, writer = kept(device, 1)
    [fact] = calm
    calm.clear()
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            writer.asked()

    thread = threading.Thread(target=ask)
    thread.start()
    for count in range(20_000):
        calm.append((*fact[:2], float(count)))
        if count % 64 == 63:
            calm.take()
    stop.set()
    thread.join()
    calm.take()
    assert [row[1] for row in writer.written] == [float(n) for n in range(20_000)]


def trained(path, device, kernels):
    """Train for 150 steps, some of them bad; return the scaler."""
    scaler = GradScaler(device.type, kernels=kernels, record=path, init_scale=2.0**10)
    param = torch.nn.Parameter(torch.zeros(4, device=device))
    optimizer = torch.optim.SGD([param], lr=2.0**-10)
    for step in range(1, 151):
        grad = INF if step in (60, 61, 62, 63, 90) else NAN if step == 120 else 1.0
        loss = planted(param, grad) + step
        optimizer.zero_grad()
        scaler.scale(loss * (NAN if step == 100 else 1.0)).backward()
        if step % 2:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    return scaler


def shown(path):
    """Return all rows and events of a run file, without their times."""
    with open_run(path) as run:
        rows = [repr(row._replace(time=0.0)) for row in run.steps()]
        events = [(event.step, event.code, event.where) for event in run.events()]
    return rows, events


def test_a_run_file_is_the_same_by_kernel_and_by_plain_operations(
    device, tmp_path, monkeypatch
):
    passed, calm = [], Mailbox.calm

    def counted(self, **given):
        found = calm(self, **given)
        passed.append(found is not None)
        return found

    monkeypatch.setattr(Mailbox, "calm", counted)
    for kernels in ("triton", "plain"):
        trained(tmp_path / f"{kernels}.gs", device, kernels).close()
    assert shown(tmp_path / "triton.gs") == shown(tmp_path / "plain.gs")
    rows, _ = shown(tmp_path / "triton.gs")
    assert len(rows) == 150
    # Else nothing was tested.
    assert sum(passed) > 50


def test_what_is_said_is_said_in_the_same_update(device, tmp_path, caplog):
    said = []
    for kernels in ("triton", "plain"):
        caplog.clear()
        trained(tmp_path / f"{kernels}.gs", device, kernels).close()
        said.append([record.message for record in caplog.records])
    assert said[0] == said[1]
    assert [text for text in said[0] if text.startswith("GS203 step 101")]
