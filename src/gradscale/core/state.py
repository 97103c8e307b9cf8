"""The values that flow through a rule."""

from typing import Any, NamedTuple


class Observed(NamedTuple):
    """What one step showed.

    Attributes:
        finite: bool[], every gradient element on every rank is finite.
        amax: f32[], the largest magnitude among the scaled gradients.
        loss_finite: bool[], the loss was finite before it was scaled.
    """

    finite: Any
    amax: Any
    loss_finite: Any


class FixedState(NamedTuple):
    """The state of a policy that never moves.

    Attributes:
        scale: f32[], factor on the loss.
    """

    scale: Any


class ScaleState(NamedTuple):
    """All that changes from step to step.

    Attributes:
        scale: f32[], factor on the loss; in [min_scale, max_scale] at all times.
        finite_steps: i32[], finite steps in a row since the rule last acted.
        debt: i32[], finite steps still owed for the last forgiven overflow; 0 if none.
    """

    scale: Any
    finite_steps: Any
    debt: Any
