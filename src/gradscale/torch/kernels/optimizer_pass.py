"""One pass of an optimizer: by Triton kernels where they run, else by torch."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gradscale.torch import tensor_list
from gradscale.torch.kernels import Kernels, on, on_host, reference, usable
from gradscale.torch.kernels.args import (
    AdamConfig,
    AdamLists,
    AmpArgs,
    LionConfig,
    MomentumLists,
    SgdConfig,
)
from gradscale.torch.kernels.pointer_table import (
    ADDRESSES,
    KERNEL_DTYPES,
    Layout,
    PointerTable,
    layout_of,
)
from gradscale.torch.tensor_list import GradSnapshot

Lists = TypeVar("Lists", AdamLists, MomentumLists)


def kernel_layout(
    lists: AdamLists | MomentumLists,
    kernels: Kernels,
    grads: GradSnapshot | None = None,
) -> Layout | None:
    """Return the layout of the lists where kernels take the step; None elsewhere.

    Args:
        lists: All tensors of the step.
        kernels: As in `usable`.
        grads: A snapshot of `lists.grads`; None to look at them.
    """
    if not lists.params or not usable(kernels, lists.params[0].device):
        return None
    dtypes = {lists.params[0].dtype, lists.grads[0].dtype}
    exact = lists.params[0].dtype is torch.float32 or lists.masters
    if not exact or not dtypes <= KERNEL_DTYPES:
        return None
    return layout_of([one for one in lists[:-1] if one], lists.steps, grads)


def adam_(
    lists: AdamLists,
    config: AdamConfig,
    amp: AmpArgs,
    layout: Layout | None,
    table: PointerTable,
) -> None:
    """Step by Adam or AdamW, or leave all unchanged. No host sync.

    Args:
        lists: The tensors.
        config: The settings.
        amp: The arguments of the scaler.
        layout: What `kernel_layout` has just returned for the lists.
        table: Kept for these lists from step to step.
    """
    ways = _launch_adam, on_host.adam_, reference.adam_
    _step(*ways, lists, config, amp, layout, table)


def sgd_(
    lists: MomentumLists,
    config: SgdConfig,
    amp: AmpArgs,
    layout: Layout | None,
    table: PointerTable,
) -> None:
    """Step by SGD, or leave all unchanged; arguments as in `adam_`. No host sync."""
    ways = _launch_momentum, on_host.sgd_, reference.sgd_
    _step(*ways, lists, config, amp, layout, table)


def lion_(
    lists: MomentumLists,
    config: LionConfig,
    amp: AmpArgs,
    layout: Layout | None,
    table: PointerTable,
) -> None:
    """Step by Lion, or leave all unchanged; arguments as in `adam_`. No host sync."""
    ways = _launch_momentum, on_host.lion_, reference.lion_
    _step(*ways, lists, config, amp, layout, table)


def _step(
    launch: Callable[[Lists, Any, AmpArgs, Layout, PointerTable], list[int]],
    host: Callable[[Lists, Any, AmpArgs], None],
    plain: Callable[[Lists, Any, AmpArgs], None],
    lists: Lists,
    config: Any,
    amp: AmpArgs,
    layout: Layout | None,
    table: PointerTable,
) -> None:
    if layout is not None:
        with on(lists.params[0].device):
            rest = launch(lists, config, amp, layout, table)
        lists = type(lists)(*([one[i] for i in rest] if one else [] for one in lists))
    if lists.params:
        # Torch's operators require lists.
        lists = lists._replace(grads=list(lists.grads))
        (host if on_host.fits(lists) else plain)(lists, config, amp)


def _launch_adam(
    lists: AdamLists,
    config: AdamConfig,
    amp: AmpArgs,
    layout: Layout,
    table: PointerTable,
) -> list[int]:
    """Launch the kernels; return the positions of the parameters that remain."""
    from gradscale.torch.kernels.adam import launch_
    from gradscale.torch.kernels.step_counter import count_

    shaped = [one for one in lists[:-1] if one]
    made, rest = table.of_lists(shaped, layout)
    if made is not None:
        launch_(
            made,
            lists.params[0].dtype,
            lists.grads[0].dtype,
            config,
            amp,
            masters=bool(lists.masters),
            amsgrad=bool(lists.max_exp_avg_sqs),
        )
        count_(made, ADDRESSES + len(shaped), amp.found_inf)
        _note_writes(lists, amp, rest)
    return rest


def _launch_momentum(
    lists: MomentumLists,
    config: SgdConfig | LionConfig,
    amp: AmpArgs,
    layout: Layout,
    table: PointerTable,
) -> list[int]:
    """Launch the kernels; return the positions of the parameters that remain."""
    from gradscale.torch.kernels.momentum import launch_
    from gradscale.torch.kernels.step_counter import count_

    shaped = [one for one in lists[:-1] if one]
    made, rest = table.of_lists(shaped, layout)
    if made is not None:
        launch_(
            made,
            lists.params[0].dtype,
            lists.grads[0].dtype,
            config,
            amp,
            masters=bool(lists.masters),
            momenta=bool(lists.momenta),
            steps=bool(lists.steps),
        )
        if lists.steps:
            count_(made, ADDRESSES + len(shaped), amp.found_inf)
        _note_writes(lists, amp, rest)
    return rest


def _note_writes(
    lists: AdamLists | MomentumLists, amp: AmpArgs, rest: list[int]
) -> None:
    """Increment the versions of what a kernel has written: autograd has not seen it."""
    written = lists.params
    if amp.write_back and amp.grad_scale is not None:
        written = [*lists.params, *lists.grads]
    if rest:
        left_out = {id(column[i]) for column in lists[:2] for i in rest}
        written = [tensor for tensor in written if id(tensor) not in left_out]
    tensor_list.note_writes(written)
