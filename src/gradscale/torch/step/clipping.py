"""Clips the gradients of optimizers and of bare parameters by their joint norm."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.errors import GradientError
from gradscale.torch import messages
from gradscale.torch.grads.clip import clip_of, clip_params_
from gradscale.torch.grads.collect import collect
from gradscale.torch.grads.stats import combine_norms
from gradscale.torch.ranks.consensus import RankChannel
from gradscale.torch.step.dispatch import StepMode
from gradscale.torch.step.iteration import Iteration, params_of
from gradscale.torch.step.optimizer_step import OptimizerStep
from gradscale.torch.tensor_list import GradSnapshot


def clip_steps(
    iteration: Iteration,
    steps: Sequence[OptimizerStep],
    max_norm: float,
    norm_type: float,
    *,
    scale: Tensor,
    used_scale: Tensor,
    allow_fp16: bool,
) -> Tensor:
    """Clip the gradients of optimizers. No host sync.

    Gradients that are still scaled are clipped by their step; others at once.

    Args:
        iteration: The steps since the last update.
        steps: Those to clip by their joint norm.
        max_norm, norm_type: The maximum norm, and its order.
        scale: f32[], the current scale.
        used_scale: f32[], the scale that multiplied the last loss.
        allow_fp16: Accept f16 gradients with every optimizer.

    Returns:
        f32[], the norm of the unscaled gradients.
    """
    alone = len(steps) == 1 and not iteration.params_clips
    read: list[tuple[OptimizerStep, Tensor, bool]] = []
    norms = []
    for step in steps:
        stage = iteration.states[id(step.optimizer)]["stage"]
        if stage is OptState.STEPPED:
            raise messages.clipped_late(step.optimizer)
        if step.channel is not None:
            step.channel.clips(max_norm, norm_type)
        ready = stage is OptState.READY
        if ready:
            limit = max_norm if alone and norm_type == 2.0 else None
            step.collect(allow_fp16 or step.mode is not StepMode.FLAG)
            grads_scale = iteration.scale_of_grads(step, scale, used_scale)
            step.read(grads_scale, norm_type=norm_type, max_norm=limit)
            decision = step.decision
            if limit is not None and decision is not None and step.clip is None:
                # The kernel that read them has also decided on the clip.
                return step.take_clip(decision)
            factor = grads_scale.reciprocal()
            if step.clip is not None:
                factor = factor * step.clip.coef
            norm = None if step.stats is None else step.stats.norm
            norm = None if norm is None else norm * factor
        else:
            factor = torch.ones_like(scale)
            norm = step.norm_of_unscaled(norm_type, factor, allow_fp16=allow_fp16)
        if norm is not None:
            read.append((step, factor, ready))
            norms.append(norm)
    if not norms:
        return torch.zeros_like(scale)
    whole = norms[0] if len(norms) == 1 else combine_norms(norms, norm_type)
    whole = whole.float()
    for step, factor, ready in read:
        clip = clip_of(whole, max_norm, factor)
        step.add_clip(clip, unscaled=not ready)
        if not ready:
            iteration.also_skip(step, clip.norm_unusable)
    return whole


def clip_bare_params(
    iteration: Iteration,
    params: list[Tensor],
    max_norm: float,
    norm_type: float,
    *,
    scale: Tensor,
    used_scale: Tensor,
    model: Any,
    channel: RankChannel | None,
    before_write: Callable[[GradSnapshot, Tensor], None],
) -> Tensor:
    """Clip bare parameters at once: their optimizers are not known. No host sync.

    For parameters whose gradients were unscaled into masters, the masters are clipped.

    Args:
        iteration: The steps since the last update.
        params: The parameters.
        max_norm, norm_type: The maximum norm, and its order.
        scale: f32[], the current scale.
        used_scale: f32[], the scale that multiplied the last loss.
        model: Names the parameters; None if unknown.
        channel: To the ranks that decide together; None for one alone.
        before_write: Called with the gradients and their scale while all of them are
            as backward left them.

    Returns:
        f32[], the norm of the unscaled gradients.
    """
    waiting = iteration.unscaled() + [one.step for one in iteration.carried.values()]
    masters = {
        id(param): master
        for step in waiting
        if step.in_masters
        for param, master in zip(step.owned_params(), step.params(), strict=True)
    }
    params = [masters.get(id(param), param) for param in params]
    try:
        gradients = collect(
            params,
            allow_fp16=True,
            names=(model,),
            copies=None if channel is None else channel.copies,
        )
    except GradientError:
        if channel is not None:
            channel.refuse()
        raise
    if not gradients.tensors and channel is None:
        return torch.zeros_like(scale)
    iteration.resume(params, model)
    steps = iteration.unscaled()
    unscaled = {id(param) for param in params_of(steps)}
    unscaled |= {id(m) for step in steps if step.in_masters for m in step.params()}
    by_hand = not iteration.scaled and iteration.ended_in_last(params)
    grads_scale = scale if by_hand else used_scale
    if not unscaled and not iteration.params_clips:
        before_write(gradients, grads_scale)
    clip = clip_params_(
        gradients,
        unscaled,
        grads_scale.reciprocal(),
        max_norm,
        norm_type,
        None if channel is None else channel.agree_on_norm,
    )
    clipped = frozenset(map(id, params))
    for step in steps:
        if iteration.affects(clipped, step):
            step.mark_unscaled()
            iteration.also_skip(step, clip.norm_unusable)
    iteration.params_clips.append((clipped, clip))
    return clip.norm
