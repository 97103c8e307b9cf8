"""What a judge has said, so that it says it once."""

from dataclasses import dataclass


@dataclass(slots=True)
class Said:
    """What was said already, and how often there was reason to.

    Attributes:
        told: The code of the trouble that the run is in; empty if it is well.
        losses: Times that the loss was not finite for a few steps.
        losses_now: The run is in such a time, and it was counted.
        scaled: Times that the scaled loss overflowed.
        scaled_now: The run is in such a time.
        norms: Times that the norm overflowed.
        norms_now: The run is in such a time.
        crowded: Too many skips, said.
        vanished: Gradients too small, said.
        window: Steps in the present window.
        window_since: The first of them.
        window_skips: Skips among them.
        window_held: Those at the scale of the skip before.
        skip_scale: The scale of the last skip.
    """

    told: str = ""
    losses: int = 0
    losses_now: bool = False
    scaled: int = 0
    scaled_now: bool = False
    norms: int = 0
    norms_now: bool = False
    crowded: bool = False
    vanished: bool = False
    window: int = 0
    window_since: int = 0
    window_skips: int = 0
    window_held: int = 0
    skip_scale: float = 0.0
