"""Settings shared by all runs of the demo."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the model and of the runs.

    Attributes:
        device: "cpu" or "cuda".
        seed: Of the weights and the batches.
        steps: Optimizer steps of each run, skipped ones included.
        batch: Characters predicted per step; the loss is their mean.
        context, depth, width: Of the model.
        learning_rate: Of AdamW; its other settings are PyTorch's defaults.
        measurements: Measurements of the lost share per run.
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
        """Shape of a batch: `context` input characters and the target."""
        return self.batch, self.context + 1

    @property
    def measured_steps(self) -> range:
        """Steps, from 0, in which gradients are compared with FP32."""
        return range(0, self.steps, max(1, self.steps // self.measurements))

    @property
    def shown_steps(self) -> list[int]:
        """Numbers of steps after which the held-out loss is computed."""
        return [*range(5, self.steps, 5), self.steps]
