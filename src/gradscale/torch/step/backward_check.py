"""Keeps a backward pass from adding up gradients of two scales."""

from collections.abc import Callable

import torch
from torch import Tensor

from gradscale.torch.messages import Mixture
from gradscale.torch.step.iteration import Iteration


def watch_backward(
    scaled: Tensor,
    iteration: Iteration,
    scale: Tensor,
    report: Callable[[list[Tensor], Mixture], None],
) -> None:
    """Keep gradients of two scales from being added up by a backward pass.

    Pending gradients from before an update are rescaled to the scale of the loss. The
    parameters whose unscaled gradients the pass changes are reported; clipping, or a
    backward of another optimizer's loss, is not. Nothing is read from the device.

    Args:
        scaled: The scaled loss.
        iteration: Has the pending and the unscaled gradients when the pass begins.
        scale: f32[], the scale of the last loss.
        report: Called at the end of the backward pass with the parameters, and why.
    """
    if scaled.grad_fn is None:
        return

    def before(_: tuple[Tensor | None, ...]) -> None:
        iteration.backwards += 1
        iteration.scaled = True
        if iteration.first:
            iteration.first_backwards.begin_scaled()
        if not (iteration.steps or iteration.carried or iteration.strays):
            return
        iteration.forget_cleared()
        iteration.bring_to(scale)
        closed = iteration.closed_params()
        noted = [(param, *_mark(param.grad)) for param in closed]
        if noted:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: after(noted))

    def after(noted: list[tuple[Tensor, Tensor | None, int]]) -> None:
        changed = [
            param
            for param, grad, version in noted
            if param.grad is not grad or _mark(grad)[1] != version
        ]
        if changed:
            report(changed, "closed")

    scaled.grad_fn.register_prehook(before)


def _mark(grad: Tensor | None) -> tuple[Tensor | None, int]:
    return grad, -1 if grad is None else grad._version
