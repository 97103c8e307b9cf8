"""Metrics for TensorBoard."""

import os
from typing import Any, Protocol

from gradscale.core.records import StepRecord
from gradscale.judge.judge import Judgement
from gradscale.sinks.figures import Figures


class SummaryWriter(Protocol):
    """The methods used of torch's or tensorboardX's `SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> Any: ...

    def add_text(self, tag: str, text_string: str, global_step: int) -> Any: ...


class TensorBoardSink:
    """Writes scalars under `gradscale/`, and findings as text.

    Args:
        writer: A `SummaryWriter` of torch.utils.tensorboard or tensorboardX; the
            caller closes it.
        every: Interval in steps; a step with a verdict other than ok is always sent.
        prefix: Of every tag.
    """

    def __init__(
        self, writer: SummaryWriter, *, every: int = 1, prefix: str = "gradscale/"
    ) -> None:
        self._writer = writer
        self._prefix = prefix
        self._figures = Figures(every)

    @classmethod
    def into(
        cls, folder: str | os.PathLike[str], *, every: int = 1
    ) -> "TensorBoardSink":
        """Return a sink with its own writer of PyTorch, for a folder.

        Raises:
            ModuleNotFoundError: torch or tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter as Writer
        except ModuleNotFoundError as error:
            missing = "torch" if error.name == "torch" else "tensorboard"
            raise ModuleNotFoundError(
                f"{missing} is not installed. PyTorch writes TensorBoard's files with "
                f"it. Run: pip install {missing}",
                name=missing,
            ) from error
        return cls(Writer(os.fspath(folder)), every=every)

    def see(self, record: StepRecord, judgement: Judgement) -> None:
        """Write one step."""
        figures = self._figures.see(record, judgement) or {}
        for name, value in figures.items():
            self._writer.add_scalar(self._prefix + name, value, record.step)
        for finding in judgement.findings:
            # TensorBoard renders Markdown: indented lines keep their breaks.
            text = "".join(f"    {line}\n" for line in finding.text().splitlines())
            self._writer.add_text(f"{self._prefix}findings", text, record.step)

    def close(self) -> None:
        """Flush and close the writer that `into` created."""
        close = getattr(self._writer, "close", None)
        if close is not None:
            close()
