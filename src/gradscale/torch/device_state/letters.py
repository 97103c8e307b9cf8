"""Facts that a kernel writes into host memory itself: no copy, no event.

A letter is some lines of words of 64 bits. The lower half of a word is a value, the
upper half the number of the letter, so that one store of the device brings both. The
host takes a line for there once every word of it bears the number: in whatever order
the words arrive, none is read too early.
"""

import ctypes
import itertools
import struct
import time
from collections.abc import Iterable
from typing import Any

import torch

from gradscale.torch.device_state.layout import RING, ROW

# The words of a line: the fields of a row, then the loss and the updates, low and high.
LOSS = len(ROW)
LOW, HIGH = LOSS + 1, LOSS + 2
WORDS = LOSS + 3
# In the high one: nothing happened, and no step is missing before this one.
CALM = 2**31
# Numbers are i32 and begin at 1: fresh memory holds 0. No two mailboxes use the same,
# for a letter that one has lost is used again by another.
NUMBERS = 2**31 - 1
serial = itertools.count()
# The first line is of the last update, the others are a ring of earlier ones.
LINES = 1 + RING
_LINE = 8 * WORDS
# The byte whose highest bit is the mark: it is above 127 in a calm step.
CALM_AT = 8 * HIGH + 3
numbers = struct.Struct("@" + "4xI" * WORDS).unpack_from
_values = struct.Struct("@" + "f4x" * LOW + "I4xI4x").unpack_from
# Seconds: the first and the longest pause while waiting, when to ask the device how it
# is, and when to wait until it is idle.
_SHORT, _LONG, _ASK, _FOR_LONG = 2e-5, 1e-3, 1.0, 60.0

# Of the last update: how many there were, its row, the loss.
LastFacts = tuple[int, list[float], float]

# Written to by kernels that are still to run, for mailboxes that are gone. Torch does
# not know of them and would give the memory to others.
_astray: "list[Letter]" = []


class Letter:
    """Host memory for the facts of one update, used again and again.

    Attributes:
        device: Of which the facts are.
        head: The first line, as bytes.
        lines: i64[LINES, WORDS], pinned for CUDA.
        number: Of the update that was last written to it, or is to be.
        void: The facts in it are forgotten.
        has_loss: The loss in it is that of the last step.
    """

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.lines = torch.zeros(
            (LINES, WORDS), dtype=torch.int64, device="cpu", pin_memory=pinned
        )
        self.number = 0
        self.void = False
        self.has_loss = False
        self.device = device
        # Made once: whatever reads from it runs no operator.
        size = LINES * _LINE
        self._bytes = (ctypes.c_char * size).from_address(self.lines.data_ptr())
        self.head = memoryview(self._bytes)[:_LINE]

    def arrived(self, line: int = 0) -> bool:
        """Return whether all of a line is there."""
        return numbers(self._bytes, line * _LINE).count(self.number) == WORDS

    def read(self) -> LastFacts | None:
        """Return the facts of the last update; None if they are not there yet."""
        # Numbers first: the values are of the same stores or of later ones.
        return opened(self._bytes) if self.arrived() else None

    def wait(self) -> LastFacts:
        """Wait for the facts of the last update without stopping the device.

        Raises:
            RuntimeError: The device has failed, or they do not come.
        """
        self._wait_for(0)
        found = self.read()
        assert found is not None
        return found

    def row(self, step: int) -> list[float]:
        """Return the row of an earlier step, the first of which is 0."""
        line = 1 + step % RING
        self._wait_for(line)
        return list(_values(self._bytes, line * _LINE)[:LOSS])

    def _wait_for(self, line: int) -> None:
        pause, begin = _SHORT, time.monotonic()
        asked = begin
        while not self.arrived(line):
            time.sleep(pause)
            pause = min(2 * pause, _LONG)
            now = time.monotonic()
            if now - asked > _ASK:
                asked = now
                self._ask(line, long=now - begin > _FOR_LONG)

    def _ask(self, line: int, *, long: bool) -> None:
        """Let a device that has failed say so: it writes no letters."""
        if self.device.type == "cuda":
            # Any call does.
            torch.cuda.current_stream(self.device).query()
            if long:
                # After so long a time the device can as well be waited for.
                torch.cuda.synchronize(self.device)
        if long and not self.arrived(line):
            raise RuntimeError(
                f"The device is idle, and the facts of update {self.number} are not "
                "there: the kernel that writes them did not run to its end. The scale "
                "cannot be guarded without them. Report it, please, and go on with "
                "GradScaler(..., kernels='plain')."
            )


def opened(head: Any) -> LastFacts:
    """Return the facts of an update from the first line of a letter."""
    *row, loss, low, high = _values(head)
    return low | (high & ~CALM) << 32, row, loss


def lose(posted: Iterable[object]) -> None:
    """Keep those letters that nobody waits for until the device has written them."""
    _astray.extend(post for post in posted if isinstance(post, Letter))


def fresh(device: torch.device) -> Letter:
    """Return a letter that no kernel is going to write to."""
    for place, letter in enumerate(_astray):
        if letter.device == device and letter.arrived():
            return _astray.pop(place)
    return Letter(device)
