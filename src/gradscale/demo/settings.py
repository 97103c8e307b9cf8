"""What all runs of the demo share."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sizes of the model and of the runs.

    Attributes:
        device: "cpu" or "cuda".
        seed: Of the weights and of the batches.
        steps: Optimizer steps of each run, skipped ones included.
        batch: Characters predicted in one step; the loss is their mean.
        context, depth, width: Of the model.
        learning_rate: Of AdamW, whose other settings are PyTorch's defaults.
        measurements: How often in a run the lost share is measured.
    """

    device: str = "cpu"
    seed: int = 0
    steps: int = 160
    batch: int = 4096
    context: int = 8
    depth: int = 19
    width: int = 16
    learning_rate: float = 3e-3
    measurements: int = 8

    @property
    def shape(self) -> tuple[int, int]:
        """Of a batch: what the model sees, and the character that comes next."""
        return self.batch, self.context + 1

    @property
    def measured_steps(self) -> range:
        """The steps, from 0, whose gradients are compared with those of FP32."""
        return range(0, self.steps, max(1, self.steps // self.measurements))

    @property
    def shown_steps(self) -> list[int]:
        """The counts of steps after which the held-out loss is taken."""
        return [*range(5, self.steps, 5), self.steps]
