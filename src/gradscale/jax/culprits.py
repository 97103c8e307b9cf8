"""Which leaves were not finite."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradscale.errors import ConfigError
from gradscale.jax.last_step import LastStep
from gradscale.jax.names import leaf_names
from gradscale.jax.reading import Reading


def culprits(seen: Any, params: Any = None) -> tuple[str, ...]:
    """Return the names of the leaves that were not finite. Waits for the device.

    Args:
        seen: What `observe` or `last` returned, or any tree of arrays.
        params: The parameters, whose paths are the names; needed with `last`, which
            keeps figures only.

    Raises:
        ConfigError: `params` is missing, or is not what the gradients belong to.

    >>> from gradscale.jax import observe
    >>> culprits(observe({"head": jnp.array([1.0, jnp.nan]), "tail": jnp.ones(2)}))
    ('head',)
    """
    if isinstance(seen, LastStep):
        return _of_last(seen, params)
    tree = seen.peaks if isinstance(seen, Reading) else seen
    bad = jax.device_get([~jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)])
    return _named(leaf_names(tree), bad)


def _of_last(step: LastStep, params: Any) -> tuple[str, ...]:
    names = leaf_names(params)
    check_names(names, step.peaks.size)
    return _named(names, ~np.isfinite(jax.device_get(step.peaks)))


def check_names(names: Sequence[str], leaves: int) -> None:
    """Raise if there is not one name for each leaf of the gradients.

    Raises:
        ConfigError: The names are those of another tree.
    """
    if len(names) != leaves:
        raise ConfigError(
            f"params has {len(names)} leaves, and the last step had {leaves} "
            "gradients. The state of an optimizer keeps a figure for each and no "
            "names. Pass the parameters that init() was called with.",
            code="GS101",
        )


def _named(names: list[str], bad: Any) -> tuple[str, ...]:
    return tuple(name for name, flag in zip(names, bad, strict=True) if flag)
