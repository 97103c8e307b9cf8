"""One pass of an optimizer: by Triton where it runs, else by plain operations."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gradscale.torch import tensor_list
from gradscale.torch.kernels import Kernels, on, on_host, reference, usable
from gradscale.torch.kernels.args import (
    AdamHow,
    AdamLists,
    Handed,
    LionHow,
    MomentumLists,
    SgdHow,
)
from gradscale.torch.kernels.plans import KERNEL_DTYPES, Plans
from gradscale.torch.kernels.pointer_table import ADDRESSES

__all__ = ["Plans", "adam_", "lion_", "sgd_"]

Lists = TypeVar("Lists", AdamLists, MomentumLists)


def adam_(
    lists: AdamLists, how: AdamHow, handed: Handed, plans: Plans, kernels: Kernels
) -> None:
    """Step by Adam or AdamW, or leave all untouched. No host sync."""
    ways = _launch_adam, on_host.adam_, reference.adam_
    _step(*ways, lists, how, handed, plans, kernels)


def sgd_(
    lists: MomentumLists, how: SgdHow, handed: Handed, plans: Plans, kernels: Kernels
) -> None:
    """Step by SGD, or leave all untouched. No host sync."""
    ways = _launch_momentum, on_host.sgd_, reference.sgd_
    _step(*ways, lists, how, handed, plans, kernels)


def lion_(
    lists: MomentumLists, how: LionHow, handed: Handed, plans: Plans, kernels: Kernels
) -> None:
    """Step by Lion, or leave all untouched. No host sync."""
    ways = _launch_momentum, on_host.lion_, reference.lion_
    _step(*ways, lists, how, handed, plans, kernels)


def _step(
    launch: Callable[[Lists, Any, Handed, Plans], list[int]],
    host: Callable[[Lists, Any, Handed], None],
    plain: Callable[[Lists, Any, Handed], None],
    lists: Lists,
    how: Any,
    handed: Handed,
    plans: Plans,
    kernels: Kernels,
) -> None:
    rest = None
    if _walkable(lists, kernels):
        with on(lists.params[0].device):
            rest = launch(lists, how, handed, plans)
    if rest is not None:
        picked = [[column[i] for i in rest] if column else [] for column in lists]
        lists = type(lists)(*picked)
    if lists.params:
        # Torch's operators take lists alone.
        lists = lists._replace(grads=list(lists.grads))
        (host if on_host.fits(lists) else plain)(lists, how, handed)


def _walkable(lists: AdamLists | MomentumLists, kernels: Kernels) -> bool:
    if not lists.params or not usable(kernels, lists.params[0].device):
        return False
    dtypes = {lists.params[0].dtype, lists.grads[0].dtype}
    return dtypes <= KERNEL_DTYPES and (
        lists.params[0].dtype is torch.float32 or bool(lists.masters)
    )


def _launch_adam(
    lists: AdamLists, how: AdamHow, handed: Handed, plans: Plans
) -> list[int]:
    """Launch the kernels; return the places of the parameters that are left."""
    from gradscale.torch.kernels.adam import CHUNK, launch_
    from gradscale.torch.kernels.step_counter import count_

    shaped = [lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs]
    shaped += [more for more in (lists.max_exp_avg_sqs, lists.masters) if more]
    table, rest = plans.of(shaped, lists.steps, CHUNK, handed.grads_at)
    if table is not None:
        launch_(
            table,
            lists.params[0].dtype,
            lists.grads[0].dtype,
            how,
            handed,
            masters=bool(lists.masters),
            amsgrad=bool(lists.max_exp_avg_sqs),
        )
        count_(table, ADDRESSES + len(shaped), handed.found_inf)
        _note_writes(lists, handed, rest)
    return rest


def _launch_momentum(
    lists: MomentumLists,
    how: SgdHow | LionHow,
    handed: Handed,
    plans: Plans,
) -> list[int]:
    """Launch the kernels; return the places of the parameters that are left."""
    from gradscale.torch.kernels.momentum import CHUNK, launch_
    from gradscale.torch.kernels.step_counter import count_

    shaped = [lists.params, lists.grads]
    shaped += [more for more in (lists.momenta, lists.masters) if more]
    table, rest = plans.of(shaped, lists.steps, CHUNK, handed.grads_at)
    if table is not None:
        launch_(
            table,
            lists.params[0].dtype,
            lists.grads[0].dtype,
            how,
            handed,
            masters=bool(lists.masters),
            momenta=bool(lists.momenta),
            steps=bool(lists.steps),
        )
        if lists.steps:
            count_(table, ADDRESSES + len(shaped), handed.found_inf)
        _note_writes(lists, handed, rest)
    return rest


def _note_writes(
    lists: AdamLists | MomentumLists, handed: Handed, rest: list[int]
) -> None:
    """Tell autograd of the writes that it has not seen."""
    written = lists.params
    if handed.write_back and handed.grad_scale is not None:
        written = [*lists.params, *lists.grads]
    if rest:
        left_out = {id(lists.params[i]) for i in rest} | {
            id(lists.grads[i]) for i in rest
        }
        written = [tensor for tensor in written if id(tensor) not in left_out]
    tensor_list.note_writes(written)
