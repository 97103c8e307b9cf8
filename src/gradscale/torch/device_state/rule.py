"""The rule of `DynamicScale` in two operations, where torch's own computes the same."""

import torch
from torch import Tensor

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.policies import HIGHEST_SCALE, DynamicScale
from gradscale.core.state import FixedState, ScaleState


def moves_as_torch(policy: AnyPolicy) -> bool:
    """Return whether `move_` computes this policy's rule.

    Torch's operator knows no tolerance, and leaves the scale alone where the product
    overflows f32, while the rule takes it to `max_scale`.
    """
    return (
        isinstance(policy, DynamicScale)
        and policy.tolerance == 0.0
        and policy.max_scale * policy.growth_factor <= HIGHEST_SCALE
    )


def move_(policy: AnyPolicy, state: FixedState | ScaleState, found: Tensor) -> None:
    """Move the state in place as `policy.next_state` does. No host sync.

    tests/torch/device_state/test_rule.py is its licence.

    Args:
        policy: One for which `moves_as_torch` holds.
        state: The tensors that hold the state.
        found: f32[], 0 if every gradient was finite.
    """
    assert isinstance(policy, DynamicScale)
    assert isinstance(state, ScaleState)
    # Torch's operator grows only where the count equals the interval: a count that a
    # shorter interval has overtaken would never get there.
    state.finite_steps.clamp_(max=policy.growth_interval - 1)
    torch._amp_update_scale_(
        state.scale,
        state.finite_steps,
        found,
        policy.growth_factor,
        policy.backoff_factor,
        policy.growth_interval,
    )
    state.scale.clamp_(policy.min_scale, policy.max_scale)
