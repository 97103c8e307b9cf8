"""The drop-in for FSDP1's scaler."""

from typing import Any, ClassVar

from gradscale.torch.scaler import GradScaler


class ShardedGradScaler(GradScaler):
    """A `GradScaler` whose ranks always decide together.

    A drop-in for `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`, in
    the order of its arguments too. Float16 gradients are accepted. `clip_grad_norm_`
    takes the norm over all ranks of the group, each of which holds elements of its own;
    parameters that FSDP1 ignores are counted once. `ShardingStrategy.NO_SHARD` with
    `use_orig_params=True` cannot be recognised, although every rank then has all
    elements: use DDP instead, as torch advises.

    >>> scaler = ShardedGradScaler("cpu", 2.0**16, 0.5, 2.0)
    >>> scaler.get_backoff_factor(), scaler.get_growth_factor()
    (0.5, 2.0)

    Args:
        device, init_scale, backoff_factor, growth_factor, growth_interval, enabled: As
            in torch.
        process_group: The ranks that decide together; None for all. With
            `ShardingStrategy.HYBRID_SHARD`, the ranks that hold one copy of the model:
            `model.process_group`.
        more: As in `GradScaler`.
    """

    _frames_to_caller: ClassVar[int] = 4
    _always_together: ClassVar[bool] = True
    # Float16 gradients are accepted by default, as in torch.
    _refuses_eps: ClassVar[bool] = False

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
        **more: Any,
    ) -> None:
        moves = (init_scale, growth_factor, backoff_factor, growth_interval)
        more = {"allow_fp16": True, "process_group": process_group, **more}
        super().__init__(device, *moves, enabled, **more)

    @property
    def process_group(self) -> Any:
        """The ranks that decide together; None for all."""
        return self._process_group
