"""Late, non-blocking reading of device facts."""

from typing import ClassVar

import torch

from gradscale.torch.mailbox import LAG, Mailbox


def test_facts_arrive_two_steps_late_and_in_order():
    box = Mailbox()
    seen = [box.exchange(torch.tensor([float(i), -1.0])) for i in range(5)]
    assert seen == [None, None, [0.0, -1.0], [1.0, -1.0], [2.0, -1.0]]


def test_the_lag_is_two():
    # Guards act on the facts of exactly this many steps ago; it is part of the promise.
    assert LAG == 2


def test_facts_are_those_of_the_moment_they_were_posted():
    box, facts = Mailbox(), torch.tensor([1.0])
    box.exchange(facts)
    facts.fill_(9.0)
    box.exchange(facts)
    assert box.exchange(facts) == [1.0]


def test_nothing_arrives_from_before_a_clearing():
    box = Mailbox()
    for i in range(4):
        box.exchange(torch.tensor([float(i)]))
    box.clear()
    assert [box.exchange(torch.tensor([float(i)])) for i in (7, 8, 9)] == [
        None,
        None,
        [7.0],
    ]


class _Elsewhere(torch.Tensor):
    """A tensor on a device without events; writes down when it is read."""

    reads: ClassVar[list[float]] = []

    @property
    def device(self):
        return torch.device("xpu")

    def tolist(self):
        values = super().tolist()
        self.reads.append(values[0])
        return values


def test_on_other_devices_too_only_facts_two_steps_old_are_read():
    _Elsewhere.reads.clear()
    box = Mailbox()
    for i in range(4):
        box.exchange(torch.tensor([float(i)]).as_subclass(_Elsewhere))
    assert _Elsewhere.reads == [0.0, 1.0]
