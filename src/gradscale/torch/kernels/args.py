"""The arguments of an optimizer pass: lists of tensors, settings, AMP scalars."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

# Elements of a Triton program of an optimizer pass; chosen by the sweep in
# benchmarks/results/kernels_h200.json.
CHUNK = 1024


class AdamLists(NamedTuple):
    """The tensors of Adam and AdamW, one entry for each parameter with a gradient.

    All parameters have one dtype and device, and so have all gradients. The entries of
    one parameter have one shape, but may have different strides.

    Attributes:
        params: f32[...], or f16[...] and bf16[...] where `masters` is not empty.
        grads: float[...] each; written only with `write_back`.
        exp_avgs, exp_avg_sqs: f32[...] each.
        max_exp_avg_sqs: f32[...] each; empty without amsgrad.
        masters: f32[...] each, the exact parameters; empty where these are f32.
        steps: f32[] each, the number of steps taken; incremented by a step.
    """

    params: list[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    masters: list[Tensor]
    steps: list[Tensor]


class MomentumLists(NamedTuple):
    """The tensors of SGD and Lion, with the conditions of `AdamLists`.

    Attributes:
        params, grads, masters: As in `AdamLists`.
        momenta: f32[...] each; empty for SGD without momentum.
        steps: As in `AdamLists`; empty except for SGD with momentum and dampening.
    """

    params: list[Tensor]
    grads: Sequence[Tensor]
    momenta: list[Tensor]
    masters: list[Tensor]
    steps: list[Tensor]


class AdamConfig(NamedTuple):
    """The settings of a pass of Adam.

    Attributes:
        lr: A number, or f32[], for f64 parameters f64[], on their device.
        beta1, beta2, eps, weight_decay: As in `torch.optim.Adam`.
        decoupled: Weight decay as in AdamW.
        maximize: Ascend instead of descend.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool


class SgdConfig(NamedTuple):
    """The settings of a pass of SGD; as in `torch.optim.SGD`."""

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


class LionConfig(NamedTuple):
    """The settings of a pass of Lion.

    Attributes:
        lr: A number, or f32[] on the device of the parameters.
        beta1: Of the direction: sign(beta1 * momentum + (1 - beta1) * gradient).
        beta2: Of the momentum.
        weight_decay: Decoupled, multiplied by lr.
        maximize: Ascend instead of descend.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool


class AmpArgs(NamedTuple):
    """The arguments that a gradient scaler passes to a step.

    Attributes:
        grad_scale: f32[], the divisor of the gradients; None is 1.
        found_inf: f32[], 0 to step, any other value to change nothing; None is 0.
        write_back: Write the divided gradients into the gradients.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None
    write_back: bool
