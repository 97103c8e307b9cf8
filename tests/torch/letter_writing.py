"""What the settling kernel writes into a letter, in plain Python."""

import struct

from gradscale.torch.device_state.layout import RING, calm
from gradscale.torch.device_state.letters import CALM, WORDS


def write(letter, ledger, known, number=None):
    """Write the last row, and those that the host has not heard of, as the kernel."""
    number = letter.number if number is None else number
    updates = int(ledger.total.tally[0])
    for step in range(max(known, updates - RING), updates - 1):
        line(letter, 1 + step % RING, ledger.ring[step % RING].tolist(), number)
    last = ledger.ring[(updates - 1) % RING].tolist()
    numbers = [*last, ledger.loss.item()]
    mark = CALM if calm(last) is not None and known >= updates - 1 else 0
    halves = [updates & 0xFFFFFFFF, updates >> 32 | mark]
    line(letter, 0, numbers, number, halves)


def line(letter, place, numbers, number, halves=()):
    """Write one line: each value with the number above it."""
    bits = [struct.unpack("I", struct.pack("f", value))[0] for value in numbers]
    bits += halves
    bits += [0] * (WORDS - len(bits))
    for word, value in enumerate(bits):
        letter.lines[place, word] = number << 32 | value
