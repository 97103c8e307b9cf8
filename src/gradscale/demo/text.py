"""The data: the source text of the standard library, which every Python has."""

import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Printable ASCII, the line break, and one symbol for all else.
SYMBOLS = 97
_LINE_BREAK, _ALL_ELSE = 95, 96
_SYMBOL_OF_BYTE = bytes(
    byte - 32 if 32 <= byte < 127 else _LINE_BREAK if byte == 10 else _ALL_ELSE
    for byte in range(256)
)
# About eighty modules; the last ones in the order of their names are held out.
_ENOUGH, _HELD_OUT = 1_000_000, 100_000


class Text(NamedTuple):
    """Source text as symbols, in two parts that share no line.

    Attributes:
        training: i64[n], each in [0, SYMBOLS).
        held_out: i64[m], likewise; never trained on.
    """

    training: Tensor
    held_out: Tensor


def library_text(folder: Path | None = None) -> Text:
    """Return the text of the top-level modules, the same on every call.

    Args:
        folder: Where the modules lie; None for those of the running Python.

    Raises:
        FileNotFoundError: If there are no sources, as in some frozen Pythons.
    """
    if folder is None:
        folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in _modules(folder))[:_ENOUGH]
    if not text:
        raise FileNotFoundError(
            f"{folder} holds no source of the standard library. The demo trains on "
            "that text, so it has no data. Run it with a Python that was installed "
            "with its .py files."
        )
    encoded = bytearray(text.translate(_SYMBOL_OF_BYTE))
    symbols = torch.frombuffer(encoded, dtype=torch.uint8)
    held_out = min(_HELD_OUT, len(text) // 10)
    cut = len(text) - held_out
    return Text(symbols[:cut].long(), symbols[cut:].long())


def _modules(folder: Path) -> list[Path]:
    """Return the modules that exist, by name; a Python may be built without some."""
    paths = (folder / f"{name}.py" for name in sorted(sys.stdlib_module_names))
    return [path for path in paths if path.is_file()]


def draw(symbols: Tensor, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw i64[count, length]: `count` places of the text, `length` symbols at each."""
    count, length = shape
    starts = torch.randint(len(symbols) - length + 1, (count, 1), generator=generator)
    return symbols[starts + torch.arange(length)]


def frequency_loss(training: Tensor, seen: Tensor) -> float:
    """Return the mean loss on `seen` of guessing by the frequencies in `training`.

    What a model reaches that never looks at its input.
    """
    # Each symbol once more than it occurs: none gets the probability 0.
    counts = torch.bincount(training, minlength=SYMBOLS) + 1
    return float(-(counts / counts.sum()).log()[seen].mean())
