"""Casts networks, and creates lists of f32 master parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from gradscale.errors import AmpError
from gradscale.torch.precision.casting import cast

_BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm


class tofp16(torch.nn.Module):  # apex's name
    """Casts its input to half precision."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input in half precision."""
        return input.half()


def BN_convert_float(module: torch.nn.Module) -> torch.nn.Module:
    """Cast all batch norms with weights back to f32, in place."""
    for part in module.modules():
        if isinstance(part, _BATCH_NORM) and part.affine:
            part.float()
    return module


def network_to_half(network: torch.nn.Module) -> torch.nn.Module:
    """Return the network in half precision, batch norms in f32, behind a cast.

    >>> network_to_half(torch.nn.Linear(2, 1))(torch.ones(1, 2)).dtype
    torch.float16
    """
    return torch.nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the module's own floating parameters and buffers, in place."""
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            param.data = param.data.to(dtype)
            if param.grad is not None:
                param.grad = param.grad.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def convert_network(network: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast a network in place, except batch norms with weights."""
    for module in network.modules():
        if isinstance(module, _BATCH_NORM) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(torch.nn.Module):
    """A network in half precision, batch norms with weights in f32.

    >>> FP16Model(torch.nn.Linear(2, 1))(torch.ones(1, 2)).dtype
    torch.float16
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.float16)

    def forward(self, *inputs: Any) -> Any:
        """Run the network with its inputs in half precision."""
        return self.network(*cast(inputs, torch.float16))


def prep_param_lists(
    model: torch.nn.Module, flat_master: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the trainable parameters, and f32 masters of them.

    >>> model = torch.nn.Linear(2, 1).half()
    >>> params, masters = prep_param_lists(model, flat_master=True)
    >>> len(params), [(master.dtype, master.shape) for master in masters]
    (2, [(torch.float32, torch.Size([3]))])

    Args:
        model: The model.
        flat_master: Keep all masters in one tensor.
    """
    params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        return params, [torch.nn.Parameter(p.detach().clone().float()) for p in params]
    if len({param.dtype for param in params}) > 1:
        raise AmpError(
            "flat_master=True was given for a model with parameters of several dtypes. "
            "One tensor has one dtype. Pass flat_master=False.",
            code="GS101",
        )
    flat = _flatten_dense_tensors([param.detach() for param in params]).float()
    master = torch.nn.Parameter(flat.clone())
    master.grad = torch.zeros_like(master)
    return params, [master]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor],
    master_params: Sequence[Tensor],
    flat_master: bool = False,
) -> None:
    """Copy the gradients of the model to the masters.

    Args:
        model_params, master_params: As `prep_param_lists` returned them.
        flat_master: As given to it.
    """
    if flat_master:
        grads = [
            torch.zeros_like(param) if param.grad is None else param.grad
            for param in model_params
        ]
        master_params[0].grad = _flatten_dense_tensors(grads).float()
        return
    for param, master in zip(model_params, master_params, strict=True):
        grad = param.grad
        master.grad = (
            None if grad is None else grad.detach().to(master.dtype, copy=True)
        )


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor],
    master_params: Sequence[Tensor],
    flat_master: bool = False,
) -> None:
    """Round the masters into the parameters of the model.

    Args:
        model_params, master_params: As `prep_param_lists` returned them.
        flat_master: As given to it.
    """
    masters: Sequence[Tensor] = master_params
    if flat_master:
        masters = _unflatten_dense_tensors(master_params[0], model_params)
    for param, master in zip(model_params, masters, strict=True):
        param.copy_(master)


def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip gradients in place by their joint norm, as torch's `clip_grad_norm_`."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def to_python_float(t: Any) -> float:
    """Return the number in a tensor of one element."""
    return t.item() if hasattr(t, "item") else t[0]
