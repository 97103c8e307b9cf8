"""One pass of an optimizer: by Triton kernels where they run, else by torch."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradscale.torch import tensor_list
from gradscale.torch.kernels import Kernels, on, plain, usable
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

_DTYPE = attrgetter("dtype")

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
        grads: A snapshot of `lists.grads`; None to inspect them.
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
        layout: The current result of `kernel_layout` for the lists.
        table: Kept for these lists from step to step.
    """
    _step(_torch_adam_, plain.adam_, lists, config, amp, layout, table)


def sgd_(
    lists: MomentumLists,
    config: SgdConfig,
    amp: AmpArgs,
    layout: Layout | None,
    table: PointerTable,
) -> None:
    """Step by SGD, or leave all unchanged; arguments as in `adam_`. No host sync."""
    # Torch's operator takes one flag for the first step of all parameters.
    by_torch = plain.sgd_ if lists.steps else _torch_sgd_
    _step(by_torch, plain.sgd_, lists, config, amp, layout, table)


def lion_(
    lists: MomentumLists,
    config: LionConfig,
    amp: AmpArgs,
    layout: Layout | None,
    table: PointerTable,
) -> None:
    """Step by Lion, or leave all unchanged; arguments as in `adam_`. No host sync."""
    _step(plain.lion_, plain.lion_, lists, config, amp, layout, table)


def _step(
    by_torch: Callable[[Lists, Any, AmpArgs], None],
    plain: Callable[[Lists, Any, AmpArgs], None],
    lists: Lists,
    config: Any,
    amp: AmpArgs,
    layout: Layout | None,
    table: PointerTable,
) -> None:
    if layout is not None:
        with on(lists.params[0].device):
            rest = _launch(lists, config, amp, layout, table)
        lists = type(lists)(*([one[i] for i in rest] if one else [] for one in lists))
    if lists.params:
        (by_torch if _torch_takes(lists) else plain)(lists, config, amp)


def _launch(
    lists: AdamLists | MomentumLists,
    config: Any,
    amp: AmpArgs,
    layout: Layout,
    table: PointerTable,
) -> list[int]:
    """Launch the kernels; return the positions of the parameters that remain."""
    # Imported here: Triton may be missing.
    from gradscale.torch.kernels import adam, momentum
    from gradscale.torch.kernels.step_counter import count_

    shaped = [one for one in lists[:-1] if one]
    made, rest = table.of_lists(shaped, layout)
    if made is None:
        return rest
    first = made, lists.params[0].dtype, lists.grads[0].dtype, config, amp
    masters = bool(lists.masters)
    if isinstance(lists, AdamLists):
        adam.launch_(*first, masters=masters, amsgrad=bool(lists.max_exp_avg_sqs))
    else:
        momenta, steps = bool(lists.momenta), bool(lists.steps)
        momentum.launch_(*first, masters=masters, momenta=momenta, steps=steps)
    if lists.steps:
        count_(made, ADDRESSES + len(shaped), amp.found_inf)
    _note_writes(lists, amp, rest)
    return rest


def _note_writes(
    lists: AdamLists | MomentumLists, amp: AmpArgs, rest: list[int]
) -> None:
    """Increment the versions of tensors that a kernel wrote without autograd."""
    written = lists.params
    if amp.write_back and amp.grad_scale is not None:
        written = [*lists.params, *lists.grads]
    if rest:
        left_out = {id(column[i]) for column in lists[:2] for i in rest}
        written = [tensor for tensor in written if id(tensor) not in left_out]
    tensor_list.note_writes(written)


def _torch_takes(lists: AdamLists | MomentumLists) -> bool:
    """Return whether torch's fused operators for the CPU can process the lists."""
    exact = lists.masters or lists.params
    if exact[0].device.type != "cpu" or torch.compiler.is_compiling():
        return False
    *shaped, steps = lists
    return (
        set(map(_DTYPE, exact)) in ({torch.float32}, {torch.float64})
        and set(map(_DTYPE, steps)) <= {torch.float32}
        and set(map(type, lists.params)) <= {Tensor, torch.nn.Parameter}
        and all(all(map(Tensor.is_contiguous, column)) for column in shaped)
    )


def _torch_adam_(lists: AdamLists, config: AdamConfig, amp: AmpArgs) -> None:
    """Compute `plain.adam_` by torch's fused operator for the CPU."""
    if _is_set(amp.found_inf):
        return
    exact, lr = lists.masters or lists.params, _number(config.lr)
    plain.count_(lists.steps, None)
    if config.decoupled:
        # Not by torch's operator: it multiplies by 1 - lr * weight_decay, whose
        # rounding error is a decay of its own.
        torch._foreach_add_(exact, exact, alpha=-lr * config.weight_decay)
    torch._fused_adam_(
        exact,
        _unscaled(lists, amp),
        lists.exp_avgs,
        lists.exp_avg_sqs,
        lists.max_exp_avg_sqs,
        lists.steps,
        lr=lr,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=0.0 if config.decoupled else config.weight_decay,
        eps=config.eps,
        amsgrad=bool(lists.max_exp_avg_sqs),
        maximize=config.maximize,
    )
    _round_masters(lists)


def _torch_sgd_(lists: MomentumLists, config: SgdConfig, amp: AmpArgs) -> None:
    """Compute `plain.sgd_` by torch's fused operator for the CPU."""
    if _is_set(amp.found_inf):
        return
    torch._fused_sgd_(
        lists.masters or lists.params,
        _unscaled(lists, amp),
        lists.momenta,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        lr=_number(config.lr),
        dampening=config.dampening,
        nesterov=config.nesterov,
        maximize=config.maximize,
        is_first_step=False,
    )
    _round_masters(lists)


def _unscaled(lists: AdamLists | MomentumLists, amp: AmpArgs) -> list[Tensor]:
    """Return the gradients in the dtype of the arithmetic, divided by the scale."""
    dtype = (lists.masters or lists.params)[0].dtype
    grads = [grad.to(dtype) for grad in lists.grads]
    if amp.grad_scale is not None:
        grads = list(torch._foreach_div(grads, amp.grad_scale.item()))
        if amp.write_back:
            torch._foreach_copy_(list(lists.grads), grads)
    return grads


def _round_masters(lists: AdamLists | MomentumLists) -> None:
    if lists.masters:
        torch._foreach_copy_(lists.params, lists.masters)
    else:
        # Torch's fused operators do not increment the versions.
        torch.autograd.graph.increment_version(lists.params)


def _is_set(found_inf: Tensor | None) -> bool:
    return found_inf is not None and found_inf.item() != 0.0


def _number(value: float | Tensor) -> float:
    return value.item() if isinstance(value, Tensor) else value
