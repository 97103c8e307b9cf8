"""Quantisation-aware training under autocast: guarded observers, a learnable step size.

The scaler itself needs no change for fake-quantised training. Two parts of a model do:
moving-average observers, which one infinite activation makes infinite permanently, and
a trained step size.
"""

import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantizeBase, ObserverBase

from gradscale.errors import ConfigError
from gradscale.torch.precision.casting import fp32_island

__all__ = ["LearnableFakeQuantize", "guard_observers"]

Model = TypeVar("Model", bound=nn.Module)


def guard_observers(model: Model) -> Model:
    """Keep infinite and NaN activations out of the observers of `torch.ao`.

    Every fake-quantise module and every observer outside of one

    - runs in f32: under autocast the fused modules of torch.ao's default settings raise
      "expected scalar type Float but found Half". The layers between them stay in
      float16;
    - drops a batch that would make its range, its scale or its zero point non-finite.
      In torch.ao such a batch turns the moving average infinite, and every later output
      is NaN. The batch itself still gives NaN, so that the scaler skips the step.

    No host sync, except for the first batch of an observer by channel. A second call
    changes nothing.

    >>> from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
    >>> model = nn.Sequential(FusedMovingAvgObsFakeQuantize(), nn.Linear(2, 1))
    >>> model = guard_observers(model)
    >>> for value in (1.0, float("inf"), 1.0):
    ...     with torch.autocast("cpu", torch.bfloat16):
    ...         output = model(torch.full((1, 2), value))
    ...     print(bool(output.isfinite().all()))
    True
    False
    True

    Args:
        model: Prepared by `torch.ao.quantization.prepare_qat`, or by hand; changed in
            place.

    Returns:
        The model.

    Raises:
        ConfigError: There is no fake-quantise module and no observer in the model.
    """
    inside = {
        id(part)
        for module in model.modules()
        if isinstance(module, FakeQuantizeBase)
        for part in module.modules()
        if part is not module
    }
    kinds = (FakeQuantizeBase, ObserverBase)
    found = [
        module
        for module in model.modules()
        if isinstance(module, kinds) and id(module) not in inside
    ]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no fake-quantise module and no observer of "
            "torch.ao. There is nothing to guard. Call guard_observers() after "
            "torch.ao.quantization.prepare_qat(); quantizers of other libraries that "
            "are calibrated once need no guard.",
            code="GS101",
        )
    for module in found:
        fp32_island(module)
        observes = any(buffer.is_floating_point() for buffer in module.buffers())
        hooks = module._forward_pre_hooks.values()
        if observes and not any(isinstance(hook, _Keep) for hook in hooks):
            keep = _Keep()
            module.register_forward_pre_hook(keep)
            module.register_forward_hook(_PutBack(keep))
    return model


class _Keep:
    """A hook that copies the buffers before a forward pass."""

    def __init__(self) -> None:
        self.saved: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: Any) -> None:
        self.saved = {name: buffer.clone() for name, buffer in module.named_buffers()}


class _PutBack:
    """A hook that restores the copies if a buffer has become non-finite."""

    def __init__(self, keep: _Keep) -> None:
        self._keep = keep

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        saved, self._keep.saved = self._keep.saved, {}
        buffers = dict(module.named_buffers())
        # An observer without data has an infinite range, and keeps it.
        finite = [
            buffer.isfinite().all()
            for buffer in buffers.values()
            if buffer.is_floating_point()
        ]
        fine = torch.stack(finite).all()
        for name, buffer in buffers.items():
            before = saved[name]
            if before.shape == buffer.shape:
                buffer.copy_(torch.where(fine, buffer, before))
            elif not fine:
                # The first batch of an observer by channel has resized it.
                buffer.resize_(before.shape).copy_(before)


class LearnableFakeQuantize(nn.Module):
    """Fake-quantise to signed integers with a step size that is trained (LSQ).

    Computes in f32 also under autocast, where x / scale may exceed float16, and returns
    the dtype of its input. The step size is an f32 parameter: its gradient carries the
    loss scale like any other, and the scaler unscales it with them. It is multiplied
    by 1 / sqrt(n * qmax) for n elements, as in LSQ (https://arxiv.org/abs/1902.08153).

    In evaluation mode it is `torch.fake_quantize_per_tensor_affine`, or its version by
    channel, which ONNX export turns into a pair of QuantizeLinear and DequantizeLinear;
    the step size gets no gradient then.

    >>> quantize = LearnableFakeQuantize.of(torch.tensor([-2.0, 1.0]), bits=4)
    >>> quantize(torch.tensor([0.3, 100.0], dtype=torch.float16)).dtype
    torch.float16
    >>> [name for name, _ in quantize.named_parameters()]
    ['scale']

    Args:
        scale: f32[], or f32[channels] with an axis: the first step size, positive.
        bits: The width of the integers, from 2 to 8.
        axis: The axis of the channels; None for one step size.

    Raises:
        ConfigError: A setting is invalid.
    """

    _zero_point: Tensor

    def __init__(
        self, scale: float | Tensor, *, bits: int = 8, axis: int | None = None
    ) -> None:
        super().__init__()
        first = torch.as_tensor(scale, dtype=torch.float32)
        usable = bool((first.isfinite() & (first > 0.0)).all())
        if not usable or first.dim() != (axis is not None):
            wanted = "one for each channel" if axis is not None else "one"
            raise ConfigError(
                f"scale={scale} is not a step size. Values are divided by it, so it "
                f"must be positive and finite, and {wanted} with axis={axis}. Pass "
                "such a scale, or use LearnableFakeQuantize.of(tensor) on a tensor "
                "without infinity and NaN.",
                code="GS101",
            )
        if not 2 <= bits <= 8:
            raise ConfigError(
                f"bits={bits} is not a width of INT8 or below. ONNX and TensorRT have "
                "signed integers of up to 8 bits here. Pass 2 to 8.",
                code="GS101",
            )
        self.scale = nn.Parameter(first.clone())
        # A buffer: in an ONNX file it is a constant, as TensorRT demands.
        zero = torch.zeros_like(first, dtype=torch.int32)
        self.register_buffer("_zero_point", zero, persistent=False)
        self.axis = axis
        self.qmax = 2 ** (bits - 1) - 1

    @classmethod
    def of(
        cls, tensor: Tensor, *, bits: int = 8, axis: int | None = None
    ) -> "LearnableFakeQuantize":
        """Return a module whose step size suits a tensor: 2 mean(|x|) / sqrt(qmax).

        Args:
            tensor: A weight, or an activation of a first batch.
            bits: As for the class.
            axis: As for the class.

        Raises:
            ConfigError: The tensor is not finite, or zero throughout a channel.
        """
        wide = tensor.detach().float().abs()
        others = [d for d in range(wide.dim()) if d != axis]
        mean = wide.mean(dim=others) if axis is not None else wide.mean()
        return cls(2.0 * mean / math.sqrt(2 ** (bits - 1) - 1), bits=bits, axis=axis)

    def forward(self, x: Tensor) -> Tensor:
        """Return x rounded to a multiple of the step size, of the dtype of x."""
        with torch.autocast(x.device.type, enabled=False):
            # A cast to the same dtype would be a node of the ONNX file.
            wide = x if x.dtype is torch.float32 else x.float()
            if not self.training:
                fixed = self._exported(wide)
                return fixed if x.dtype is torch.float32 else fixed.to(x.dtype)
            self._keep_positive()
            factor = 1.0 / math.sqrt(
                max(x.numel() // self.scale.numel(), 1) * self.qmax
            )
            # The value of the scale, and a gradient multiplied by the factor.
            scale = self.scale * factor + (self.scale - self.scale * factor).detach()
            scale = self._along_axis(scale, wide)
            level = (wide / scale).clamp(-self.qmax - 1, self.qmax)
            # Rounding passes gradients through.
            rounded = level + (level.round() - level).detach()
            return (rounded * scale).to(x.dtype)

    def train(self, mode: bool = True) -> "LearnableFakeQuantize":
        """Switch between training and evaluation; see `torch.nn.Module.train`."""
        self._keep_positive()
        return super().train(mode)

    @torch.no_grad()
    def _keep_positive(self) -> None:
        """Undo a step that took the step size to 0 or below; training may raise it."""
        self.scale.clamp_(min=torch.finfo(torch.float32).eps)

    def _along_axis(self, scale: Tensor, x: Tensor) -> Tensor:
        if self.axis is None:
            return scale
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return scale.view(shape)

    def _exported(self, x: Tensor) -> Tensor:
        scale, zero = self.scale.detach(), self._zero_point
        if scale.dtype is torch.float16:
            # Cast with a model; torch takes no float16 here.
            scale = scale.float()
        low, high = -self.qmax - 1, self.qmax
        if self.axis is None:
            return torch.fake_quantize_per_tensor_affine(x, scale, zero, low, high)
        return torch.fake_quantize_per_channel_affine(
            x, scale, zero, self.axis, low, high
        )
