"""The tensors that an optimizer's pass walks over together."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gradscale.torch.tensor_list import Numbers


class AdamLists(NamedTuple):
    """What Adam and AdamW walk over: one entry for each parameter with a gradient.

    Within one value all parameters have one dtype and device, and so have all
    gradients. The entries of one parameter have one shape, but perhaps other strides.

    Attributes:
        params: f32[...], or f16[...] and bf16[...] where `masters` is not empty.
        grads: float[...] each; never written but where `write_back` is asked for.
        exp_avgs, exp_avg_sqs: f32[...] each.
        max_exp_avg_sqs: f32[...] each; empty without amsgrad.
        masters: f32[...] each, the exact parameters; empty where they are f32.
        steps: f32[] each, how many steps were taken; counted up where one is.
    """

    params: list[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    masters: list[Tensor]
    steps: list[Tensor]


class MomentumLists(NamedTuple):
    """What SGD and Lion walk over; as in `AdamLists`.

    Attributes:
        params, grads, masters: As in `AdamLists`.
        momenta: f32[...] each; empty for SGD without momentum.
        steps: f32[] each, as in `AdamLists`; empty where nobody asks for the count,
            that is but for SGD with momentum and dampening.
    """

    params: list[Tensor]
    grads: Sequence[Tensor]
    momenta: list[Tensor]
    masters: list[Tensor]
    steps: list[Tensor]


class AdamHow(NamedTuple):
    """The settings of one pass of Adam.

    Attributes:
        lr: A number, or f32[], for f64 parameters f64[], on their device.
        beta1, beta2, eps, weight_decay: As in `torch.optim.Adam`.
        decoupled: Weight decay as in AdamW.
        maximize: Climb.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool


class SgdHow(NamedTuple):
    """The settings of one pass of SGD; as in `torch.optim.SGD`."""

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


class LionHow(NamedTuple):
    """The settings of one pass of Lion.

    Attributes:
        lr: A number, or f32[] on the device of the parameters.
        beta1: Of the direction: sign(beta1 * momentum + (1 - beta1) * gradient).
        beta2: Of the momentum.
        weight_decay: Decoupled, times lr.
        maximize: Climb.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool


class Handed(NamedTuple):
    """What a scaler hands to an optimizer for one step.

    Attributes:
        grad_scale: f32[], what the gradients are divided by; None is 1.
        found_inf: f32[], 0 to step, all else leaves everything untouched; None is 0.
        write_back: Write the divided gradients into the gradients.
        grads_at: Where the gradients begin, if somebody has just looked; they are then
            contiguous. None if nobody has.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None
    write_back: bool
    grads_at: Numbers | None = None
