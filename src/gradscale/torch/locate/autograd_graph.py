"""Walking the graph that autograd has made for a loss."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# What may stand between an operation and the weight it uses: views and casts.
THROUGH = 8
MOVES = (
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


def nodes_of(losses: Iterable[Tensor]) -> list[Any]:
    """Return the nodes of the graph behind `losses`, those of leaves left out."""
    waiting: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    found: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in found or is_leaf(node):
            continue
        found[node] = None
        waiting += [following for following, _ in node.next_functions]
    return list(found)


def leaves_of(nodes: Iterable[Any], losses: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that gradients flow to, each once."""
    found: dict[int, Tensor] = {}
    for loss in losses:
        if loss.grad_fn is None and loss.requires_grad:
            found[id(loss)] = loss
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None and is_leaf(following):
                found[id(following.variable)] = following.variable
    return list(found.values())


def leaf_behind(node: Any) -> Tensor | None:
    """Return the leaf whose gradient leaves `node` unmixed, if there is one.

    Views and casts of a weight are looked through.
    """
    for _ in range(THROUGH):
        if node is None:
            return None
        if is_leaf(node):
            return node.variable
        if len(node.next_functions) != 1 or not _is_seen_through(node):
            return None
        node = node.next_functions[0][0]
    return None


def is_leaf(node: Any) -> bool:
    """Return whether a node does nothing but keep a leaf's gradient."""
    return node.name().endswith("AccumulateGrad")


def runs_backward_inside(nodes: Iterable[Any]) -> bool:
    """Return whether some node runs a backward of its own: reentrant checkpointing.

    PyTorch refuses `torch.autograd.grad` for it.
    """
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes)


def only_moves(node: Any) -> bool:
    """Return whether a node hands gradients on with the values they have."""
    return bool(node.name().startswith(MOVES))


def operation_name(node: Any) -> str:
    """Return the operation that a node is the gradient of, as operators are named.

    >>> import torch
    >>> operation_name(torch.ones(2, requires_grad=True).log_softmax(0).grad_fn)
    'log_softmax'
    """
    name = str(node.name()).split("::")[-1]
    name = name.split("Backward")[0] or name
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        # A function of the user's own keeps its name.
        return name
    return plain_name(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def plain_name(name: str) -> str:
    """Return an operator's name without namespace, marks and prefixes.

    >>> plain_name("aten::_log_softmax"), plain_name("aten::native_layer_norm")
    ('log_softmax', 'layer_norm')
    """
    plain = name.split("::")[-1].strip("_")
    return plain.removeprefix("native_").removesuffix("_legit")


def _is_seen_through(node: Any) -> bool:
    return only_moves(node) or node.name().startswith("ToCopyBackward")
