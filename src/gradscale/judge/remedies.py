"""Pieces of advice that several findings share: on trends, places and tensors."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gradscale.judge.history import RISEN

Evidence = Mapping[str, Any]


class Advice(NamedTuple):
    """One thing to try, and what must have been seen for it to be worth a try.

    Attributes:
        when: Tells from the evidence whether it applies.
        text: A sentence; names in braces are filled in from the evidence.
    """

    when: Callable[[Evidence], bool]
    text: str


def always(seen: Evidence) -> bool:
    """The advice needs no evidence."""
    return True


def grown(seen: Evidence) -> bool:
    """Gradients had grown before."""
    return float(seen.get("gradients_grown_bits", 0.0)) >= 3.0


def rising(seen: Evidence) -> bool:
    """The loss had gone up before, slowly or at once."""
    return "loss_low" in seen or "loss_last" in seen


def diverged(seen: Evidence) -> bool:
    """The loss had gone up far above where the run began."""
    above = seen.get("loss_mean", 0.0) > RISEN * seen.get("loss_start", 0.0)
    return "loss_last" in seen or ("loss_low" in seen and above)


def named(seen: Evidence) -> bool:
    """Some tensor that was not finite is known."""
    return bool(seen.get("culprits"))


def local(seen: Evidence) -> bool:
    """Few tensors of many are hit."""
    return named(seen) and 10 * int(seen["culprits"]) <= int(seen.get("tensors", 0))


def everywhere(seen: Evidence) -> bool:
    """All tensors are hit."""
    return named(seen) and seen["culprits"] == seen.get("tensors")


def widespread(seen: Evidence) -> bool:
    """So many tensors are hit that the first of them says nothing."""
    tensors = int(seen.get("tensors", 0))
    return named(seen) and 0 < 3 * tensors <= 4 * int(seen["culprits"])


def placed(seen: Evidence) -> bool:
    """An instrument saw where the value was lost."""
    return "place" in seen


def _given(seen: Evidence, kind: str, *, to_model: bool) -> bool:
    """Tell whether the model, or a module of it, was given what is not finite."""
    given = seen.get("place_tensor") == "input" and seen.get("place_kind") == kind
    return given and to_model != bool(seen.get("place_module"))


def _made(seen: Evidence, direction: str, kind: str) -> bool:
    """Tell whether a place has no known pattern, and what it looks like."""
    known = seen.get("place_instead") or seen.get("place_tensor") == "input"
    same = seen.get("place_direction") == direction
    return placed(seen) and not known and same and seen.get("place_kind") == kind


DIVERGED = (
    Advice(
        lambda seen: "loss_last" in seen,
        "The loss rose from {loss_start:.4g} to {loss_last:.4g} within its first "
        "steps: the run diverges. Start again with a lower learning rate, or let it "
        "rise slowly over the first steps.",
    ),
    Advice(
        lambda seen: diverged(seen) and "loss_low" in seen,
        "The loss rose from {loss_low:.4g} to {loss_mean:.4g} before: the run "
        "diverges. Load a checkpoint from before step {usual_before} and go on with a "
        "lower learning rate.",
    ),
)
# Below its start a loss may rise because batches get harder.
PERHAPS_DIVERGED = Advice(
    lambda seen: rising(seen) and not diverged(seen),
    "The loss rose from {loss_low:.4g} to {loss_mean:.4g} before, though not above "
    "the {loss_start:.4g} of its start. If the batches did not get harder there, the "
    "run diverges: load a checkpoint from before step {usual_before} and go on with a "
    "lower learning rate.",
)
EXPLODED = Advice(
    # Growth in a few tensors of many is a module's fault, not the learning rate's.
    lambda seen: grown(seen) and not (rising(seen) or local(seen)),
    "Gradients had grown by {gradients_grown_bits:.0f} bits before: load a checkpoint "
    "from before step {usual_before}, and clip tighter or lower the learning rate.",
)
PLACE = (
    Advice(
        lambda seen: _given(seen, "nan", to_model=True),
        "The batch of step {place_step} holds NaN before the model has seen it "
        "({place}): look at the data of that step, and at what was done to it.",
    ),
    Advice(
        lambda seen: _given(seen, "inf", to_model=True),
        "The batch of step {place_step} holds infinity before the model has seen it "
        "({place}): look at the data of that step, and at what was done to it.",
    ),
    Advice(
        lambda seen: _given(seen, "nan", to_model=False),
        "What goes into {place_at} holds NaN ({place}): look at what is computed "
        "before it, outside of any module.",
    ),
    Advice(
        lambda seen: _given(seen, "inf", to_model=False),
        "What goes into {place_at} holds infinity ({place}): look at what is computed "
        "before it, outside of any module.",
    ),
    Advice(
        lambda seen: bool(seen.get("place_instead")),
        "Look at {place_at}. {place_instead}",
    ),
    Advice(
        lambda seen: _made(seen, "forward", "nan"),
        "Look into {place_at}, whose output is the first that is NaN: 0/0, infinity "
        "minus infinity where a value has passed 65504, a row that is masked "
        "everywhere, the log or root of a negative number.",
    ),
    Advice(
        lambda seen: _made(seen, "forward", "inf"),
        "Look into {place_at}, whose output is the first that is infinite: a log or a "
        "division near 0, a sum or product above 65504. Compute it in float32: "
        "torch.autocast(device, enabled=False).",
    ),
    Advice(
        lambda seen: _made(seen, "backward", "nan"),
        "Look at {place_at}, whose gradient is the first that is NaN: a derivative "
        "that is not defined, such as that of a root, a norm or a power at 0. Keep the "
        "argument away from 0 before the operation, not after it.",
    ),
    Advice(
        lambda seen: _made(seen, "backward", "inf"),
        "Look at {place_at}, whose gradient is the first that is infinite: compute it "
        "in float32: torch.autocast(device, enabled=False).",
    ),
)
IN_FLOAT32 = Advice(
    lambda seen: named(seen) and not (widespread(seen) or placed(seen)),
    "Run the module of {culprit} in float32: torch.autocast(device, enabled=False).",
)
NEAR_LOSS = Advice(
    lambda seen: everywhere(seen) and not placed(seen),
    "All {tensors} tensors are hit, so the fault is where backward begins: the loss "
    "function or the last layers. Compute those in float32.",
)
WHO = Advice(
    lambda seen: not (named(seen) or placed(seen)),
    "Find the tensors: gradscale run names them, as does scaler.last.culprits of "
    "gradscale.torch.GradScaler at the next skip.",
)
