"""Walks the autograd graph of a loss."""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

# The maximum distance in operations from a node to the parameters behind it.
NEAR = 3
_HALF = (torch.float16, torch.bfloat16)
# Maximum number of views and casts between an operation and a weight it uses.
MAX_VIEWS = 8
# Nodes that pass gradient values on unchanged.
VIEWS = (
    "TBackward",
    "ViewBackward",
    "TransposeBackward",
    "PermuteBackward",
    "UnsafeViewBackward",
    "ReshapeAliasBackward",
    "UnsqueezeBackward",
    "SqueezeBackward",
    "AliasBackward",
    "CloneBackward",
)
# Those of which a part is left.
PARTS = ("SelectBackward", "SliceBackward", "ExpandBackward")
SUMS = ("SubBackward", "RsubBackward", "AddBackward")


def nodes_of(losses: Iterable[Tensor]) -> list[Any]:
    """Return the nodes of the graph of `losses`, without AccumulateGrad nodes."""
    stack: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    visited: dict[Any, None] = {}
    while stack:
        node = stack.pop()
        if node is None or node in visited or is_leaf(node):
            continue
        visited[node] = None
        stack += [following for following, _ in node.next_functions]
    return list(visited)


def leaves_of(nodes: Iterable[Any], losses: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that receive gradients, each once."""
    leaves: dict[int, Tensor] = {}
    for loss in losses:
        if loss.grad_fn is None and loss.requires_grad:
            leaves[id(loss)] = loss
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None and is_leaf(following):
                leaves[id(following.variable)] = following.variable
    return list(leaves.values())


def leaf_behind(node: Any) -> Tensor | None:
    """Return the leaf that receives the gradient of `node` through views and casts.

    None if there is another operation between them.
    """
    for _ in range(MAX_VIEWS):
        if node is None:
            return None
        if is_leaf(node):
            return node.variable
        if len(node.next_functions) != 1 or not _passes_on(node):
            return None
        node = node.next_functions[0][0]
    return None


def is_leaf(node: Any) -> bool:
    """Return whether a node accumulates the gradient of a leaf."""
    return node.name().endswith("AccumulateGrad")


def data_saved_by(node: Any) -> list[Tensor]:
    """Return the tensors that a node keeps for backward and that no graph computed.

    Those of a loss are its targets. Single numbers, such as weights of losses, are left
    out.

    >>> import torch
    >>> output, target = torch.ones(2, requires_grad=True), torch.zeros(2)
    >>> data_saved_by(torch.nn.functional.mse_loss(output, target).grad_fn)
    [tensor([0., 0.])]
    """
    return [each for each in _saved_by(node) if not each.requires_grad]


def differences_saved_by(node: Any) -> list[tuple[Tensor, Any]]:
    """Return the differences from data, and sums with it, that a node keeps.

    Each with the node that computed the other operand, behind views and casts. Where
    that operand is finite, a NaN of the difference is one of the data.

    >>> import torch
    >>> layer, target = torch.nn.Linear(1, 1), torch.ones(2, 1)
    >>> loss = (layer(torch.ones(2, 1)).float() - target).square().mean()
    >>> ((kept, behind),) = differences_saved_by(loss.grad_fn.next_functions[0][0])
    >>> kept.shape, behind.name()
    (torch.Size([2, 1]), 'AddmmBackward0')
    """
    found = []
    for each in _saved_by(node):
        if each.grad_fn is None or not each.grad_fn.name().startswith(SUMS):
            continue
        computed = [given for given, _ in each.grad_fn.next_functions]
        if len(computed) == 2 and computed.count(None) == 1:
            behind: Any = computed[0] or computed[1]
            while len(behind.next_functions) == 1 and (
                _passes_on(behind) or behind.name().startswith(PARTS)
            ):
                behind = behind.next_functions[0][0]
            found.append((each, behind))
    return found


def divisor_saved_by(node: Any) -> Tensor | None:
    """Return the divisor that a division keeps for backward; None for other nodes.

    >>> import torch
    >>> divisor_saved_by((torch.ones(1, requires_grad=True) / torch.zeros(1)).grad_fn)
    tensor([0.])
    """
    kept: Any = None
    if node.name().startswith("DivBackward"):
        # Raised for a tensor that was freed or written to since.
        with suppress(RuntimeError):
            kept = getattr(node, "_saved_other", None)
    return kept if isinstance(kept, Tensor) else None


def _saved_by(node: Any) -> list[Tensor]:
    found = []
    for name in dir(node):
        if name.startswith("_saved_"):
            # Raised for a tensor that was freed or written to since.
            with suppress(RuntimeError):
                found.append(getattr(node, name))
    return [each for each in found if isinstance(each, Tensor) and each.dim()]


def _passes_on(node: Any) -> bool:
    return is_view(node) or node.name().startswith("ToCopyBackward")


def has_reentrant_checkpoint(nodes: Iterable[Any]) -> bool:
    """Return whether a node runs a nested backward: reentrant checkpointing.

    PyTorch rejects `torch.autograd.grad` for such a graph.
    """
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes)


def is_view(node: Any) -> bool:
    """Return whether a node passes gradient values on unchanged: views and clones."""
    return bool(node.name().startswith(VIEWS))


def operation_name(node: Any) -> str:
    """Return the name of the operator whose gradient a node computes.

    >>> import torch
    >>> operation_name(torch.ones(2, requires_grad=True).log_softmax(0).grad_fn)
    'log_softmax'
    """
    name = str(node.name()).split("::")[-1]
    name = name.split("Backward")[0] or name
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        # A user's autograd.Function keeps its name.
        return name
    return plain_name(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def plain_name(name: str) -> str:
    """Return an operator's name without namespace, underscores and prefixes.

    >>> plain_name("aten::_log_softmax"), plain_name("aten::native_layer_norm")
    ('log_softmax', 'layer_norm')
    """
    plain = name.split("::")[-1].strip("_")
    return plain.removeprefix("native_").removesuffix("_legit")


def half_dtype(loss: Tensor, nodes: Iterable[Any] | None = None) -> str | None:
    """Return the half precision of a loss's graph, else its own; None if not known.

    >>> layer = torch.nn.Linear(2, 1)
    >>> half_dtype(layer(torch.ones(1, 2)).sum())
    'float32'

    Args:
        loss: The loss.
        nodes: Those of its graph, if they are known.
    """
    nodes = list(nodes_of([loss]) if nodes is None else nodes)
    dtypes = set()
    for node in nodes:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            # A custom function, compiled graph or checkpoint: its dtypes are unknown.
            return None
        dtypes |= {meta.dtype for meta in node._input_metadata}
    for dtype in _HALF:
        if dtype in dtypes:
            return str(dtype).removeprefix("torch.")
    return str(loss.dtype).removeprefix("torch.") if nodes else None


def params_behind(node: Any) -> list[Tensor]:
    """Return the parameters that the gradient of a node reaches first.

    >>> layer = torch.nn.Linear(2, 1)
    >>> node = layer(torch.ones(1, 2)).double().grad_fn
    >>> [tuple(param.shape) for param in params_behind(node)]
    [(1,), (1, 2)]
    """
    layer = [node]
    for _ in range(NEAR):
        layer = [each for at in layer for each, _ in at.next_functions if each]
        leaves = [leaf for each in layer if (leaf := leaf_behind(each)) is not None]
        if leaves:
            return leaves
    return []
