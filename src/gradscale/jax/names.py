"""The names of a tree's leaves."""

from typing import Any

import jax


def path_name(path: Any) -> str:
    """Return a leaf's path in dotted notation: `layers.0.weight`.

    >>> path_name(jax.tree_util.tree_flatten_with_path({"layers": [1.0]})[0][0][0])
    'layers.0'
    """
    return jax.tree_util.keystr(path, simple=True, separator=".") or "the tree itself"


def leaf_names(tree: Any) -> list[str]:
    """Return the name of every leaf, in the order of `jax.tree.leaves`."""
    return [
        path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
