"""Policies as arguments and as the configuration of an optimizer."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gradscale.core.checkpoint import POLICIES, AnyPolicy
from gradscale.core.policies import DynamicScale, Policy
from gradscale.errors import ConfigError

# Keras' own defaults.
INITIAL_SCALE = 2.0**15
GROWTH_STEPS = 2000
# The inverse of a larger scale is subnormal, and TensorFlow and XLA flush subnormals.
HIGHEST_SCALE = 2.0**126


def policy_of(policy: Any, initial_scale: float, dynamic_growth_steps: int) -> Policy:
    """Return the policy that the arguments of an optimizer describe.

    Args:
        policy: A policy, or None for the rule of Keras with bounds.
        initial_scale: Its first scale.
        dynamic_growth_steps: Finite steps in a row after which the scale doubles.

    Raises:
        ConfigError: `policy` is not a policy or comes with other arguments, or a
            setting can never work.
    """
    if policy is None:
        return DynamicScale(
            init_scale=initial_scale, growth_interval=dynamic_growth_steps
        )
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise ConfigError(
            f"policy={policy!r} is a {type(policy).__name__}. Loss scaling needs "
            "settings and a rule. Pass DynamicScale(), StaticScale(scale=...) or "
            "NoScale().",
            code="GS101",
        )
    if (initial_scale, dynamic_growth_steps) != (INITIAL_SCALE, GROWTH_STEPS):
        raise ConfigError(
            f"initial_scale={initial_scale} and "
            f"dynamic_growth_steps={dynamic_growth_steps} were passed together with a "
            "policy, which has settings of its own. Pass "
            "DynamicScale(init_scale=..., growth_interval=...) as the policy alone.",
            code="GS101",
        )
    if policy.max_scale > HIGHEST_SCALE:
        raise ConfigError(
            f"max_scale={policy.max_scale:g} is above {HIGHEST_SCALE:g}, which is "
            "2^126. TensorFlow and XLA multiply by the inverse of the scale and flush "
            "numbers below 2^-126 to zero, so every gradient would become 0. Pass a "
            "lower max_scale, or a lower scale to StaticScale.",
            code="GS101",
        )
    return policy


def settings_of(policy: Any) -> dict[str, Any]:
    """Return the entries of a configuration that describe a policy.

    The entries of Keras' own class if it has the same rule, bounds aside; else one
    entry, `policy`, which Keras' own class does not support.

    >>> settings_of(DynamicScale(init_scale=1024.0))
    {'initial_scale': 1024.0, 'dynamic_growth_steps': 2000}
    >>> from gradscale.core.policies import StaticScale
    >>> settings_of(StaticScale(scale=64.0))
    {'policy': {'kind': 'StaticScale', 'scale': 64.0}}
    """
    if isinstance(policy, DynamicScale):
        start, interval = policy.init_scale, policy.growth_interval
        if policy == DynamicScale(init_scale=start, growth_interval=interval):
            return {"initial_scale": start, "dynamic_growth_steps": interval}
    return {"policy": {"kind": type(policy).__name__, **asdict(policy)}}


def policy_from(described: Mapping[str, Any]) -> AnyPolicy:
    """Return the policy that the entry `policy` of a configuration describes.

    >>> policy_from({"kind": "StaticScale", "scale": 64.0})
    StaticScale(scale=64.0)

    Raises:
        ConfigError: There is no such policy.
    """
    settings = dict(described)
    kind = settings.pop("kind", None)
    if kind not in POLICIES:
        raise ConfigError(
            f"The configuration names the policy {kind!r}. This version of gradscale "
            f"has {', '.join(POLICIES)}. Load it with the version that wrote it.",
            code="GS101",
        )
    return POLICIES[kind](**settings)
