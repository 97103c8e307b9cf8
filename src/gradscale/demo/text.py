"""The data: the source text of Python's standard library."""

import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Printable ASCII, the line break, and one symbol for all other bytes.
SYMBOLS = 97
_LINE_BREAK, _OTHER = 95, 96
_SYMBOL_OF_BYTE = bytes(
    byte - 32 if 32 <= byte < 127 else _LINE_BREAK if byte == 10 else _OTHER
    for byte in range(256)
)
# Bytes, about eighty modules; the last part is held out.
_TOTAL, _HELD_OUT = 1_000_000, 100_000


class Text(NamedTuple):
    """Source text as symbols, in two parts that share no line.

    Attributes:
        training: i64[n], each in [0, SYMBOLS).
        held_out: i64[m], likewise; not used for training.
    """

    training: Tensor
    held_out: Tensor


def library_text(folder: Path | None = None) -> Text:
    """Return the text of the top-level modules, the same on every call.

    Args:
        folder: Of the modules; None for the running Python's.

    Raises:
        FileNotFoundError: If there are no sources, as in some frozen Pythons.
    """
    if folder is None:
        folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in _modules(folder))[:_TOTAL]
    if not text:
        raise FileNotFoundError(
            f"{folder} has no source files of the standard library. The demo trains on "
            "that text, so it has no data. Run it with a Python that was installed "
            "with its .py files."
        )
    encoded = bytearray(text.translate(_SYMBOL_OF_BYTE))
    symbols = torch.frombuffer(encoded, dtype=torch.uint8)
    held_out = min(_HELD_OUT, len(text) // 10)
    cut = len(text) - held_out
    return Text(symbols[:cut].long(), symbols[cut:].long())


def _modules(folder: Path) -> list[Path]:
    """Return the source files in order of name; some Pythons lack some modules."""
    paths = (folder / f"{name}.py" for name in sorted(sys.stdlib_module_names))
    return [path for path in paths if path.is_file()]


def draw(symbols: Tensor, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw i64[count, length]: `count` random windows of `length` symbols."""
    count, length = shape
    starts = torch.randint(len(symbols) - length + 1, (count, 1), generator=generator)
    return symbols[starts + torch.arange(length)]


def frequency_loss(training: Tensor, targets: Tensor) -> float:
    """Return the mean loss on `targets` of guessing by frequency in `training`.

    About the best loss of a model that ignores its input.
    """
    # Add-one smoothing: no symbol has probability 0.
    counts = torch.bincount(training, minlength=SYMBOLS) + 1
    return float(-(counts / counts.sum()).log()[targets].mean())
