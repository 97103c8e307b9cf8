"""The passes on the CPU: PyTorch's own fused loops, piece by piece in the cache.

They compute what `reference` does. A pass in single operations writes a dozen
temporaries of the size of the model: 50 times the time of one fused loop at 124 M
parameters.
"""

from collections.abc import Iterator
from operator import attrgetter

import torch
from torch import Tensor

from gradscale.torch.devices import host_value
from gradscale.torch.kernels import reference
from gradscale.torch.kernels.args import (
    AdamConfig,
    AdamLists,
    AmpArgs,
    LionConfig,
    MomentumLists,
    SgdConfig,
)

_DTYPE = attrgetter("dtype")
# Elements that are worked on at once: 1 MiB of f32 for each list.
PIECE = 2**18


def fits(lists: AdamLists | MomentumLists) -> bool:
    """Return whether these passes can walk the tensors."""
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


def adam_(lists: AdamLists, config: AdamConfig, amp: AmpArgs) -> None:
    """Step by Adam or AdamW, or leave all untouched."""
    if _is_skipped(amp):
        return
    reference.count_(lists.steps, None)
    lr = _number(config.lr)
    for piece in _pieces(lists, amp):
        exact, grads, exp_avgs, exp_avg_sqs, largest, steps = piece
        if config.decoupled:
            # Not a factor next to 1: its rounding would be a decay of its own.
            torch._foreach_add_(exact, exact, alpha=-lr * config.weight_decay)
        torch._fused_adam_(
            exact,
            grads,
            exp_avgs,
            exp_avg_sqs,
            largest,
            steps,
            lr=lr,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=0.0 if config.decoupled else config.weight_decay,
            eps=config.eps,
            amsgrad=bool(largest),
            maximize=config.maximize,
        )
    _round(lists)


def sgd_(lists: MomentumLists, config: SgdConfig, amp: AmpArgs) -> None:
    """Step by SGD, or leave all untouched."""
    if _is_skipped(amp):
        return
    lr = _number(config.lr)
    for exact, grads, momenta, steps in _pieces(lists, amp):
        # The first step that is taken is not dampened.
        first = [_number(step) == 0.0 for step in steps] or [False] * len(exact)
        for is_first in set(first):
            chosen = [i for i, one in enumerate(first) if one is is_first]
            torch._fused_sgd_(
                [exact[i] for i in chosen],
                [grads[i] for i in chosen],
                [momenta[i] for i in chosen] if momenta else [],
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                lr=lr,
                dampening=config.dampening,
                nesterov=config.nesterov,
                maximize=config.maximize,
                is_first_step=is_first,
            )
    reference.count_(lists.steps, None)
    _round(lists)


def lion_(lists: MomentumLists, config: LionConfig, amp: AmpArgs) -> None:
    """Step by Lion, or leave all untouched."""
    if _is_skipped(amp):
        return
    lr = _number(config.lr)
    for exact, grads, momenta, _ in _pieces(lists, amp):
        if config.maximize:
            grads = list(torch._foreach_neg(grads))
        directions = torch._foreach_lerp(momenta, grads, 1.0 - config.beta1)
        torch._foreach_sign_(directions)
        torch._foreach_add_(exact, exact, alpha=-lr * config.weight_decay)
        torch._foreach_add_(exact, directions, alpha=-lr)
        torch._foreach_lerp_(momenta, grads, 1.0 - config.beta2)
    _round(lists)


def _pieces(
    lists: AdamLists | MomentumLists, amp: AmpArgs
) -> Iterator[list[list[Tensor]]]:
    """Yield exact parameters, unscaled gradients, state and steps, piece by piece."""
    exact = lists.masters or lists.params
    columns = [exact, lists.grads, *lists[2:]]
    # Masters are the exact parameters: they are walked already.
    del columns[lists._fields.index("masters")]
    *shaped, steps = columns
    held: list[list[Tensor]] = [[] for _ in columns]
    size = 0
    for place, numel in enumerate(map(Tensor.numel, exact)):
        tensors = [one[place] for one in shaped if one]
        # A view costs more than a step of a small tensor.
        small = numel <= PIECE
        parts = [tensors] if small else zip(*map(_split, tensors), strict=True)
        for part in parts:
            walked = iter(part)
            for column, one in zip(held, shaped, strict=False):
                if one:
                    column.append(next(walked))
            held[-1] += steps[place : place + 1]
            size += part[0].numel()
            if size >= PIECE:
                yield _unscaled(held, amp)
                held, size = [[] for _ in columns], 0
    if held[0]:
        yield _unscaled(held, amp)


def _split(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.view(-1).split(PIECE)


def _unscaled(held: list[list[Tensor]], amp: AmpArgs) -> list[list[Tensor]]:
    exact, grads, *others = held
    wide = [grad.to(exact[0].dtype) for grad in grads]
    if amp.grad_scale is not None:
        wide = list(torch._foreach_div(wide, _number(amp.grad_scale)))
        if amp.write_back:
            torch._foreach_copy_(grads, wide)
    return [exact, wide, *others]


def _round(lists: AdamLists | MomentumLists) -> None:
    """Let the parameters follow their masters, and autograd know of the writes."""
    if lists.masters:
        torch._foreach_copy_(lists.params, lists.masters)
    else:
        # PyTorch's fused loops do not say it themselves.
        torch.autograd.graph.increment_version(lists.params)


def _is_skipped(amp: AmpArgs) -> bool:
    return amp.found_inf is not None and _number(amp.found_inf) != 0.0


def _number(value: float | Tensor) -> float:
    return host_value(value) if isinstance(value, Tensor) else value
