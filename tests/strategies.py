"""What hypothesis draws: policies and traces of finite flags."""

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from gradscale import DynamicScale, NoScale, StaticScale
from gradscale.core.policies import HIGHEST_SCALE, LOWEST_SCALE

# Wall clocks of shared machines say nothing about the code.
settings.register_profile(
    "gradscale", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gradscale")

SCALES = st.floats(LOWEST_SCALE, HIGHEST_SCALE, width=32)
GROWTH_FACTORS = st.floats(1.0, 2.0**20, exclude_min=True, width=32)
BACKOFF_FACTORS = st.floats(2.0**-20, 1.0, exclude_max=True, width=32)
INTERVALS = st.integers(1, 12) | st.just(2000)
TOLERANCES = st.floats(2.0**-8, 0.5, exclude_max=True)
SOME_TOLERANCE = st.just(0.0) | TOLERANCES
TRACES = st.lists(st.booleans(), max_size=120)
COUNTS = st.integers(0, 2**31 - 2)


@st.composite
def dynamic_policies(draw, tolerances=SOME_TOLERANCE):
    """Draw any `DynamicScale` whose count and bounds come into play in a trace."""
    low, start, high = sorted(draw(st.tuples(SCALES, SCALES, SCALES)))
    return DynamicScale(
        init_scale=start,
        growth_factor=draw(GROWTH_FACTORS),
        backoff_factor=draw(BACKOFF_FACTORS),
        growth_interval=draw(INTERVALS),
        min_scale=low,
        max_scale=high,
        tolerance=draw(tolerances),
    )


POLICIES = (
    dynamic_policies() | st.builds(StaticScale, scale=SCALES) | st.builds(NoScale)
)


def binary_policy(rng: random.Random) -> DynamicScale:
    """Return a policy whose moves are powers of two, far from the bounds.

    Torch has no bounds: within thirty steps none of these comes near them.
    """
    return DynamicScale(
        init_scale=2.0 ** rng.randint(10, 20),
        growth_factor=rng.choice((2.0, 4.0, 8.0)),
        backoff_factor=rng.choice((0.5, 0.25)) if rng.random() < 0.5 else 0.5,
        growth_interval=rng.choice((1, 2, 3, 5, 8)),
        min_scale=2.0**-120,
    )


def any_policy(rng: random.Random) -> DynamicScale:
    """Return a policy with any bounds, factors and tolerance."""
    low, start, high = sorted(rng.uniform(-125.0, 127.0) for _ in range(3))
    return DynamicScale(
        init_scale=2.0**start,
        growth_factor=1.0 + 2.0 ** rng.uniform(-20.0, 20.0),
        backoff_factor=1.0 - 2.0 ** rng.uniform(-20.0, -0.01),
        growth_interval=rng.choice((1, 2, 3, 10, 100)),
        min_scale=2.0**low,
        max_scale=2.0**high,
        tolerance=rng.choice((0.0, 0.01, 0.1, 0.49)),
    )


def flags(rng: random.Random, steps: int) -> list[bool]:
    """Return finite flags with an overflow share that differs from call to call."""
    share = rng.choice((0.0, 0.01, 0.1, 0.3, 0.5, 0.9))
    return [rng.random() >= share for _ in range(steps)]
