"""The passes of the optimizers in plain torch operations: what a kernel must compute.

They run on any device and for any strides, one tensor at a time, so that no more than
a few temporaries of one tensor's size exist at once. Arithmetic is in the dtype of the
state: f32, or f64 for f64 parameters. No host sync.
"""

import math

import torch
from torch import Tensor

from gradscale.torch.kernels.lists import (
    AdamHow,
    AdamLists,
    Handed,
    LionHow,
    MomentumLists,
    SgdHow,
)


def adam_(lists: AdamLists, how: AdamHow, handed: Handed) -> None:
    """Step by Adam or AdamW, or leave all untouched."""
    skip = _skip(handed)
    wide = lists.exp_avgs[0].dtype
    taken = torch.stack(lists.steps).to(wide) + 1.0
    step_sizes = (how.lr / _one_minus_power(how.beta1, taken)).unbind()
    roots = _one_minus_power(how.beta2, taken).sqrt().unbind()
    for i, param in enumerate(lists.params):
        exact = lists.masters[i] if lists.masters else param
        grad = _unscaled(lists.grads[i], wide, handed, skip)
        if how.maximize:
            grad = -grad
        start = exact
        if how.weight_decay and how.decoupled:
            # Not start * (1 - lr * weight_decay): the factor is next to 1, and its
            # rounding would be a decay of its own.
            start = exact - exact * (how.lr * how.weight_decay)
        elif how.weight_decay:
            grad = grad + exact * how.weight_decay
        exp_avg = torch.lerp(lists.exp_avgs[i], grad, 1.0 - how.beta1)
        exp_avg_sq = torch.addcmul(
            lists.exp_avg_sqs[i] * how.beta2, grad, grad, value=1.0 - how.beta2
        )
        largest = exp_avg_sq
        if lists.max_exp_avg_sqs:
            largest = torch.maximum(lists.max_exp_avg_sqs[i], exp_avg_sq)
            _put_(lists.max_exp_avg_sqs[i], largest, skip)
        spread = (largest.sqrt() / roots[i]).add_(how.eps)
        stepped = start - (exp_avg / spread).mul_(step_sizes[i])
        _put_(lists.exp_avgs[i], exp_avg, skip)
        _put_(lists.exp_avg_sqs[i], exp_avg_sq, skip)
        _put_parameter_(param, exact, stepped, skip)
    count_(lists.steps, handed.found_inf)


def sgd_(lists: MomentumLists, how: SgdHow, handed: Handed) -> None:
    """Step by SGD, or leave all untouched."""
    skip = _skip(handed)
    for i, param in enumerate(lists.params):
        exact = lists.masters[i] if lists.masters else param
        grad = _unscaled(lists.grads[i], exact.dtype, handed, skip)
        if how.maximize:
            grad = -grad
        if how.weight_decay:
            grad = grad + exact * how.weight_decay
        if lists.momenta:
            momentum = lists.momenta[i] * how.momentum + grad * (1.0 - how.dampening)
            if lists.steps:
                # The first step that is taken is not dampened.
                momentum = torch.where(lists.steps[i] == 0.0, grad, momentum)
            grad = grad + momentum * how.momentum if how.nesterov else momentum
            _put_(lists.momenta[i], momentum, skip)
        _put_parameter_(param, exact, exact - grad * how.lr, skip)
    count_(lists.steps, handed.found_inf)


def lion_(lists: MomentumLists, how: LionHow, handed: Handed) -> None:
    """Step by Lion, or leave all untouched. arXiv 2302.06675, algorithm 2."""
    skip = _skip(handed)
    for i, param in enumerate(lists.params):
        exact = lists.masters[i] if lists.masters else param
        grad = _unscaled(lists.grads[i], exact.dtype, handed, skip)
        if how.maximize:
            grad = -grad
        start = exact
        if how.weight_decay:
            start = exact - exact * (how.lr * how.weight_decay)
        direction = torch.lerp(lists.momenta[i], grad, 1.0 - how.beta1).sign_()
        momentum = torch.lerp(lists.momenta[i], grad, 1.0 - how.beta2)
        _put_(lists.momenta[i], momentum, skip)
        _put_parameter_(param, exact, start - direction * how.lr, skip)


def _skip(handed: Handed) -> Tensor | None:
    return None if handed.found_inf is None else handed.found_inf != 0.0


def _unscaled(
    grad: Tensor, wide: torch.dtype, handed: Handed, skip: Tensor | None
) -> Tensor:
    if handed.grad_scale is None:
        return grad.to(wide)
    unscaled = grad.to(wide) / handed.grad_scale
    if handed.write_back:
        _put_(grad, unscaled, skip)
    return unscaled


def _one_minus_power(base: float, exponents: Tensor) -> Tensor:
    # 1 - 0.999 ** 1 taken in f32 has four digits left; expm1 keeps them all.
    log = math.log(base) if base > 0.0 else -math.inf
    return -torch.expm1(exponents * log)


def _put_parameter_(
    param: Tensor, exact: Tensor, stepped: Tensor, skip: Tensor | None
) -> None:
    _put_(exact, stepped, skip)
    if param is not exact:
        _put_(param, stepped, skip)


def _put_(kept: Tensor, new: Tensor, skip: Tensor | None) -> None:
    kept.copy_(new if skip is None else torch.where(skip, kept, new.to(kept.dtype)))


def count_(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """Add 1 to each f32[], unless the flag says skip.

    Args:
        steps: On one device.
        found_inf: f32[], 0 to count; None is 0.
    """
    if not steps:
        return
    taken = torch.ones_like(steps[0])
    if found_inf is not None:
        taken = (found_inf == 0.0).to(taken.dtype)
    # A list, not one tensor for all: some devices would read that one on the host.
    torch._foreach_add_(steps, [taken] * len(steps))
