"""What to try, as far as the evidence carries it.

Each piece of advice stands beside the evidence that it needs. Nothing is said on
suspicion: a learning rate is named only where the loss or the gradients have grown.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Evidence = Mapping[str, Any]


class Advice(NamedTuple):
    """One thing to try, and what must have been seen for it to be worth a try.

    Attributes:
        when: Tells from the evidence whether it applies.
        text: A sentence; names in braces are filled in from the evidence.
    """

    when: Callable[[Evidence], bool]
    text: str


def advice_for(code: str, evidence: Evidence) -> tuple[str, ...]:
    """Return what to try, in this order.

    >>> advice_for("GS206", {"scale": "2^16", "loss": 3.5})[0]
    'Compute the loss in float32: scaler.scale(loss.float()).'
    """
    return tuple(
        advice.text.format_map(evidence)
        for advice in ADVICE[code]
        if advice.when(evidence)
    )


def _always(seen: Evidence) -> bool:
    return True


def _grown(seen: Evidence) -> bool:
    return float(seen.get("gradients_grown_bits", 0.0)) >= 3.0


def _rising(seen: Evidence) -> bool:
    return "loss_low" in seen


def _named(seen: Evidence) -> bool:
    return bool(seen.get("culprits"))


def _local(seen: Evidence) -> bool:
    """Few tensors of many are hit."""
    return _named(seen) and 10 * int(seen["culprits"]) <= int(seen.get("tensors", 0))


def _everywhere(seen: Evidence) -> bool:
    return _named(seen) and seen["culprits"] == seen.get("tensors")


_DIVERGED = Advice(
    _rising,
    "The loss rose from {loss_low:.4g} to {loss_mean:.4g} before: the run diverges. "
    "Load a checkpoint from before step {usual_before} and go on with a lower learning "
    "rate.",
)
_EXPLODED = Advice(
    # Growth in a few tensors of many is a module's fault, not the learning rate's.
    lambda seen: _grown(seen) and not (_rising(seen) or _local(seen)),
    "Gradients had grown by {gradients_grown_bits:.0f} bits before: load a checkpoint "
    "from before step {usual_before}, and clip tighter or lower the learning rate.",
)
_IN_FLOAT32 = Advice(
    lambda seen: _named(seen) and not _everywhere(seen),
    "Run the module of {culprit} in float32: torch.autocast(device, enabled=False).",
)
_NEAR_LOSS = Advice(
    _everywhere,
    "All {tensors} tensors are hit, so the fault is where backward begins: the loss "
    "function or the last layers. Compute those in float32.",
)
_WHO = Advice(
    lambda seen: not _named(seen),
    "Find the tensors: scaler.last.culprits at the next skip.",
)
# A finite loss and gradients that are not.
_BACKWARD = (
    _DIVERGED,
    _EXPLODED,
    Advice(
        lambda seen: _finite_loss(seen) and _local(seen),
        "The fault is local, {culprits} of {tensors} tensors, first {culprit}: run "
        "its module in float32: torch.autocast(device, enabled=False).",
    ),
    Advice(
        lambda seen: _finite_loss(seen) and not _local(seen) and _IN_FLOAT32.when(seen),
        _IN_FLOAT32.text,
    ),
    Advice(lambda seen: _finite_loss(seen) and _everywhere(seen), _NEAR_LOSS.text),
    Advice(
        lambda seen: _finite_loss(seen) and seen["nan"],
        "NaN under a finite loss is a derivative that is not defined: a root, a norm "
        "or a power at 0, 0/0, a mask of infinity. Keep the argument away from 0 "
        "before the operation, not after it.",
    ),
    Advice(
        lambda seen: _finite_loss(seen) and not seen["nan"],
        "Infinity and no NaN: the backward pass exceeds 65504 even at S = {scale}. "
        "bfloat16 has the range for it.",
    ),
    Advice(lambda seen: _finite_loss(seen) and not _named(seen), _WHO.text),
)


def _finite_loss(seen: Evidence) -> bool:
    return bool(seen["loss_finite"])


_SKIPS = (
    _DIVERGED,
    _EXPLODED,
    _IN_FLOAT32,
    _NEAR_LOSS,
    _WHO,
)

ADVICE: dict[str, tuple[Advice, ...]] = {
    "GS001": (),
    "GS103": (
        Advice(
            lambda seen: not seen["gradients_before"],
            "No step of this run had a gradient: make the optimizer after the model "
            "was moved, wrapped or replaced, and check requires_grad.",
        ),
        Advice(
            lambda seen: seen["gradients_before"],
            "There were gradients before step {since}: look for what changed there, a "
            "frozen part, a branch, a zero_grad() between backward and step.",
        ),
    ),
    "GS201": (
        Advice(
            lambda seen: seen["at_floor"],
            "S = {scale} is the lowest the policy allows, so it cannot give way. Lower "
            "min_scale, or keep the module that overflows in float32.",
        ),
        *_SKIPS,
        Advice(
            lambda seen: (
                not (seen["at_floor"] or seen["falling"] or _rising(seen))
                and not _grown(seen)
            ),
            "The scale holds its place, so single batches are to blame: pass "
            "policy=DynamicScale(tolerance=0.01), and rare outliers no longer lower "
            "the scale.",
        ),
    ),
    "GS202": (
        *_BACKWARD,
        Advice(
            lambda seen: not seen["loss_finite"],
            "The loss itself was not finite, so no scale can help: check the batch, "
            "then the forward pass, from the input on.",
        ),
    ),
    "GS203": (
        _DIVERGED,
        Advice(
            lambda seen: not seen["finite_before"],
            "No step of this run had a finite loss: check the first batch, labels and "
            "masks included, and the weights it starts from.",
        ),
        Advice(
            lambda seen: seen["over"],
            "The run went on by itself: look at the batches of these steps for NaN, "
            "infinity, empty masks and labels out of range.",
        ),
        Advice(
            lambda seen: seen["loss"] == "inf",
            "Infinity: look for log or division near 0 and for values above 65504; "
            "compute the loss in float32 from logits.",
        ),
        Advice(
            lambda seen: seen["loss"] == "nan",
            "NaN: look for 0/0, infinity minus infinity, the log or root of a negative "
            "number, in the first module whose output has one.",
        ),
        Advice(
            lambda seen: seen["loss"] == "not finite" and not seen["over"],
            "Find the first module whose output is not finite.",
        ),
        Advice(
            lambda seen: seen["scale"] != seen["scale_from"],
            'Pass guard="raise": the scale is then held at a loss that is not finite, '
            "where it fell from {scale_from} to {scale} for nothing.",
        ),
    ),
    "GS204": (
        _DIVERGED,
        _EXPLODED,
        Advice(
            lambda seen: not (_rising(seen) or _grown(seen)),
            "Neither loss nor gradients were seen to grow before: look at the batch of "
            "this step, and for a sum where a mean was meant.",
        ),
    ),
    "GS205": (
        Advice(
            lambda seen: seen["steps"] >= seen["of"],
            "No step of the last {of} was taken: lower the scale from {scale} by 2^8, "
            "or let DynamicScale find it.",
        ),
        Advice(
            lambda seen: seen["steps"] < seen["of"],
            "Some steps fit: lower the scale from {scale} by a factor of 2 to 16.",
        ),
        *_SKIPS,
    ),
    "GS206": (
        Advice(_always, "Compute the loss in float32: scaler.scale(loss.float())."),
        Advice(
            lambda seen: "fits" in seen,
            "As float16, a loss of {loss:.4g} leaves room for a scale of {fits} at "
            "most, whatever the gradients would allow.",
        ),
    ),
    "GS207": (
        _DIVERGED,
        Advice(
            _always,
            "Load a checkpoint from before step {since}: no scale and no batch brings "
            "these weights back.",
        ),
        Advice(
            lambda seen: seen["steps_before"] > 0,
            "The scaler skips every step that is not finite, so something else wrote "
            "them: an optimizer stepped without it, weights kept in float16, a "
            "learning rate that is not finite.",
        ),
        Advice(
            lambda seen: seen["steps_before"] == 0,
            "They were so before the first step: check how they are made or loaded.",
        ),
    ),
    "GS208": _BACKWARD,
    "GS209": (
        Advice(
            lambda seen: seen.get("headroom_bits", 0.0) >= 4.0,
            "There are {headroom_bits:.0f} bits of headroom: raise the scale from "
            "{scale} to {room}.",
        ),
        Advice(
            lambda seen: seen.get("headroom_bits", 4.0) < 4.0,
            "Only {headroom_bits:.0f} bits of headroom are left, so a higher scale "
            "would overflow: the gradients span more than float16 holds. Train in "
            "bfloat16, or keep the layers with the largest gradients in float32.",
        ),
        Advice(
            lambda seen: "headroom_bits" not in seen,
            "Every gradient was exactly 0: see whether the loss depends on the "
            "parameters, then start from a scale above {scale}.",
        ),
        Advice(
            lambda seen: seen["fallen"],
            "The scale had fallen from {scale_from} before: what made it fall comes "
            "first.",
        ),
    ),
    "GS210": (
        _DIVERGED,
        _EXPLODED,
        Advice(
            lambda seen: not _rising(seen),
            "Keep a checkpoint from before step {since}: in runs that were lost, the "
            "scale fell before the loss rose.",
        ),
        Advice(
            lambda seen: _named(seen) and not _everywhere(seen),
            "The last overflow was in {culprit}, {culprits} in all: watch that module, "
            "or run it in float32.",
        ),
    ),
}
