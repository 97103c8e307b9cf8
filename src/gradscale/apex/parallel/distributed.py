"""Apex's data parallelism on torch's own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from gradscale.apex.apex_C import flatten, unflatten
from gradscale.errors import AmpError


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """Torch's DistributedDataParallel with apex's arguments.

    `message_size`, `delay_allreduce` and the others below tune apex's own buckets;
    torch has its own and ignores them.

    Args:
        module: The model, as `amp.initialize` returned it.
        message_size, delay_allreduce, shared_param, allreduce_trigger_params,
            retain_allreduce_buffers, allreduce_always_fp32, num_allreduce_streams,
            allreduce_communicators, gradient_average, gradient_predivide_factor, prof:
            Apex's. `gradient_average=False` is refused: torch averages. It divides
            the gradients by the number of ranks before they are summed, so no further
            `gradient_predivide_factor` is needed.
        options: Arguments of torch's class.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,
        **options: Any,
    ) -> None:
        if not gradient_average:
            raise AmpError(
                f"gradient_average={gradient_average} was given. Torch's "
                "DistributedDataParallel averages the gradients of all ranks. Leave it "
                "out, and multiply the loss by the number of ranks for a sum.",
                code="GS101",
            )
        device = next((param.device for param in module.parameters()), None)
        if device is not None and device.type == "cuda":
            options.setdefault("device_ids", [device.index])
        super().__init__(module, **options)


class Reducer:
    """Averages the parameters' gradients over all ranks when `reduce` is called.

    Args:
        module_or_grads_list: A module, whose parameters are broadcast from rank 0;
            or a list of tensors.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        self.module = self.grads = None
        if isinstance(module_or_grads_list, torch.nn.Module):
            self.module = module_or_grads_list
            for param in self.module.parameters():
                distributed.broadcast(param.detach(), 0)
        else:
            self.grads = list(module_or_grads_list)

    def reduce(self) -> None:
        """Average the gradients in place."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        for grad in grads or ():
            distributed.all_reduce(grad)
            grad.div_(distributed.get_world_size())


def flat_dist_call(
    tensors: Sequence[Tensor], call: Callable[..., Any], extra_args: Any = None
) -> None:
    """Call a collective on one flat tensor for each dtype; average an all-reduce.

    Args:
        tensors: Changed in place.
        call: Such as `torch.distributed.broadcast`.
        extra_args: Its further positional arguments.
    """
    by_type: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.type(), []).append(tensor.detach())
    for same in by_type.values():
        flat = flatten(same)
        call(flat, *(extra_args or ()))
        if call is distributed.all_reduce:
            flat /= distributed.get_world_size()
        for tensor, value in zip(same, unflatten(flat, same), strict=True):
            tensor.copy_(value)


def convert_syncbn_model(
    module: torch.nn.Module, process_group: Any = None, channel_last: bool = False
) -> torch.nn.Module:
    """Replace batch norm by torch's SyncBatchNorm.

    >>> model = convert_syncbn_model(torch.nn.Sequential(torch.nn.BatchNorm1d(2)))
    >>> type(model[0]).__name__
    'SyncBatchNorm'

    Args:
        module: The model.
        process_group: The ranks whose statistics are shared; None for all.
        channel_last: Has no effect: torch follows the layout of the input.
    """
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)


def create_syncbn_process_group(group_size: int) -> Any:
    """Return the process group of this rank if ranks share statistics in groups.

    Args:
        group_size: Ranks in a group; 0 for all ranks.
    """
    if group_size == 0:
        return None
    world = distributed.get_world_size()
    if group_size < 0 or world % group_size:
        raise AmpError(
            f"group_size={group_size} does not divide the {world} ranks. Each rank "
            "must be in one group. Pass a divisor, or 0 for all ranks.",
            code="GS101",
        )
    own = None
    for first in range(0, world, group_size):
        ranks = list(range(first, first + group_size))
        # Every rank has to create every group.
        group = distributed.new_group(ranks)
        if distributed.get_rank() in ranks:
            own = group
    return own
