"""Noticing a backward pass that adds scaled gradients to unscaled ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from gradscale.torch.step.iteration import Iteration


def watch_backward(
    scaled: Tensor, iteration: Iteration, report: Callable[[list[Tensor]], None]
) -> None:
    """Report the parameters whose unscaled gradients a backward pass changes.

    Clipping, or a backward of another optimizer's loss, is not reported. Nothing is
    read from the device.

    Args:
        scaled: The scaled loss.
        iteration: Knows the parameters whose gradients are unscaled when it begins.
        report: Called at the end of the backward pass with the parameters.
    """
    if scaled.grad_fn is None:
        return

    def before(_: tuple[Tensor | None, ...]) -> None:
        if not (iteration.steps or iteration.carried):
            return
        iteration.forget_cleared()
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
            report(changed)

    scaled.grad_fn.register_prehook(before)


def _mark(grad: Tensor | None) -> tuple[Tensor | None, int]:
    return grad, -1 if grad is None else grad._version
