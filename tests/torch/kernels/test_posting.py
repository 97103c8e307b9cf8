"""The settling kernel writes letters: what arrives is what a copy would bring."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale import DynamicScale
from gradscale.torch import GradScaler
from gradscale.torch.device_state.host_copy import LAG, Mailbox
from gradscale.torch.device_state.layout import RING
from gradscale.torch.device_state.letters import Letter
from tests.torch.kernels.books import Books
from tests.torch.kernels.test_update import STEPS
from tests.torch.training import INF, NAN, iterate

# The interpreter computes by NumPy, which warns where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


class Post:
    """Books whose rows go through a mailbox, with the steps of a graph in between."""

    def __init__(self, device, kind, start=0):
        self.box = Mailbox()
        self.books = Books(DynamicScale(growth_interval=2), device, kind)
        self.books.ledger.total.set_tally(start, 0)
        self.late = []

    def update(self, replayed=0, loss=None, **step):
        """Take steps, the last of which the host sees."""
        self.books.mailbox = None
        for place in range(replayed):
            self.books.end(scale=float(place + 1))
        self.books.mailbox = self.box
        self.books.ledger.loss.fill_(0.0 if loss is None else loss)
        self.books.end(**step)
        self.late += [self.box.exchange(self.books.ledger, has_loss=loss is not None)]

    def shown(self):
        """Return all that arrived as text, in which NaN equals NaN."""
        return [repr(late) for late in self.late], self.box.lost


@given(steps=st.lists(STEPS, min_size=1, max_size=2 * LAG + 2), data=st.data())
@settings(max_examples=40)
def test_what_arrives_is_what_a_copy_brings(device, steps, data):
    by_kernel, by_copy = (Post(device, kind) for kind in ("triton", "plain"))
    for step in steps:
        loss = data.draw(st.sampled_from([None, 0.5, NAN, INF]))
        replayed = data.draw(st.sampled_from([0, 0, 0, 1, 5]))
        for post in (by_kernel, by_copy):
            post.update(replayed, loss, **step)
    assert by_kernel.shown() == by_copy.shown()
    assert all(isinstance(post, Letter) for post in by_kernel.box._posted)
    assert not any(isinstance(post, Letter) for post in by_copy.box._posted)


@pytest.mark.parametrize("replayed", [RING - 1, RING, RING + 9])
def test_rows_that_were_overwritten_are_counted(device, replayed):
    by_kernel, by_copy = (Post(device, kind) for kind in ("triton", "plain"))
    for count in (0, replayed, 0, 0, 0):
        by_kernel.update(count)
        by_copy.update(count)
    assert by_kernel.shown() == by_copy.shown()
    assert by_kernel.box.lost == max(0, replayed - RING + 1)


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2, 2**40])
def test_a_run_of_any_length_is_followed(device, start):
    post = Post(device, "triton", start)
    for count in (0, 2, 0, 0, 0):
        post.update(count)
    steps = [one.step - start for late in post.late[LAG:] for one in late]
    assert steps == [1, 2, 3, 4, 5]


def test_nothing_is_written_where_the_host_may_not_act(device):
    post = Post(device, "triton")
    post.update()
    before = post.box._posted[0].lines.clone()
    post.books.mailbox = None
    for _ in range(3):
        post.books.end()
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(post.box._posted[0].lines, before)


def test_a_scaler_hears_of_every_step_by_letter(device):
    scaler = GradScaler(device.type, kernels="triton", init_scale=4.0)
    param = torch.nn.Parameter(torch.zeros(4, device=device))
    optimizer = torch.optim.SGD([param], lr=1.0)
    seen, exchange = [], scaler._mailbox.exchange

    def noted(*given, **more):
        late = exchange(*given, **more)
        seen.extend(late or ())
        return late

    scaler._mailbox.exchange = noted
    values = [1.0, INF, 1.0, NAN, 1.0, 1.0]
    for value in values:
        iterate(scaler, optimizer, param, value)
    assert [one.step for one in seen] == [1, 2, 3, 4]
    assert [one.row[2] for one in seen] == [0.0, 1.0, 0.0, 1.0]
    assert all(isinstance(post, Letter) for post in scaler._mailbox._posted)
