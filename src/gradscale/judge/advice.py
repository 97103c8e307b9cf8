"""What to try, as far as the evidence carries it.

Each piece of advice stands beside the evidence that it needs. Nothing is said on
suspicion: a learning rate is named only where the loss or the gradients have grown.
"""

from gradscale.judge.history import MANY_LOSSES
from gradscale.judge.remedies import (
    DIVERGED,
    EXPLODED,
    IN_FLOAT32,
    NEAR_LOSS,
    PERHAPS_DIVERGED,
    PLACE,
    WHO,
    Advice,
    Evidence,
    always,
    everywhere,
    grown,
    local,
    named,
    placed,
    rising,
)


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


def _finite_loss(seen: Evidence) -> bool:
    return bool(seen["loss_finite"])


def _unplaced(seen: Evidence) -> bool:
    """The loss was finite, and no instrument saw where gradients were not."""
    return _finite_loss(seen) and not placed(seen)


# A finite loss and gradients that are not.
_BACKWARD = (
    *DIVERGED,
    EXPLODED,
    *PLACE,
    Advice(
        lambda seen: _unplaced(seen) and local(seen),
        "The fault is local, {culprits} of {tensors} tensors, first {culprit}: run "
        "its module in float32: torch.autocast(device, enabled=False).",
    ),
    Advice(
        lambda seen: _unplaced(seen) and not local(seen) and IN_FLOAT32.when(seen),
        IN_FLOAT32.text,
    ),
    Advice(lambda seen: _finite_loss(seen) and NEAR_LOSS.when(seen), NEAR_LOSS.text),
    Advice(
        lambda seen: _unplaced(seen) and seen["nan"],
        "NaN under a finite loss is a derivative that is not defined: a root, a norm "
        "or a power at 0, 0/0, a mask of infinity. Keep the argument away from 0 "
        "before the operation, not after it.",
    ),
    Advice(
        lambda seen: _finite_loss(seen) and not seen["nan"],
        "Infinity and no NaN: the backward pass exceeds 65504 even at S = {scale}. "
        "bfloat16 has the range for it.",
    ),
    Advice(lambda seen: _finite_loss(seen) and WHO.when(seen), WHO.text),
    PERHAPS_DIVERGED,
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
        *DIVERGED,
        EXPLODED,
        *PLACE,
        IN_FLOAT32,
        NEAR_LOSS,
        WHO,
        Advice(
            lambda seen: (
                not (seen["at_floor"] or seen["falling"] or rising(seen))
                and not grown(seen)
            ),
            "The scale holds its place, so single batches are to blame: a larger "
            "growth_interval raises it less often, and "
            "policy=DynamicScale(tolerance=0.01) of gradscale.torch.GradScaler does "
            "not lower it for rare outliers.",
        ),
        PERHAPS_DIVERGED,
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
        *DIVERGED,
        *PLACE,
        Advice(
            lambda seen: not seen["finite_before"],
            "No step of this run had a finite loss: check the first batch, labels and "
            "masks included, and the weights it starts from.",
        ),
        Advice(
            lambda seen: (
                seen["over"] or (seen["times"] > 1 and seen["steps"] < MANY_LOSSES)
            ),
            "The run went on by itself: look at the batches of these steps for NaN, "
            "infinity, empty masks and labels out of range.",
        ),
        Advice(
            lambda seen: seen["loss"] == "inf" and not placed(seen),
            "Infinity: look for log or division near 0 and for values above 65504; "
            "compute the loss in float32 from logits.",
        ),
        Advice(
            lambda seen: seen["loss"] == "nan" and not placed(seen),
            "NaN: look for 0/0, infinity minus infinity, the log or root of a negative "
            "number, in the first module whose output has one.",
        ),
        Advice(
            lambda seen: (
                seen["loss"] == "not finite" and not (seen["over"] or placed(seen))
            ),
            "Find the first module whose output is not finite.",
        ),
        Advice(
            lambda seen: seen["applied"] > 0,
            "Gradients were finite and steps were taken all the same, {applied} of "
            "{steps}: the run learns, and whatever reads the loss, a log, a schedule, "
            "early stopping, reads a number that means nothing.",
        ),
        Advice(
            lambda seen: seen["scale"] != seen["scale_from"] and not seen["applied"],
            "The scale fell from {scale_from} to {scale} for nothing: leave a batch "
            "out whose loss is not finite, before scaler.scale(loss), or take "
            'gradscale.torch.GradScaler(guard="raise"), which holds the scale there '
            "and stops a run that is hopeless.",
        ),
        PERHAPS_DIVERGED,
    ),
    "GS204": (
        *DIVERGED,
        EXPLODED,
        PERHAPS_DIVERGED,
        Advice(
            lambda seen: not (rising(seen) or grown(seen)),
            "Neither loss nor gradients were seen to grow before: look at the batch of "
            "this step, and for a sum where a mean was meant.",
        ),
    ),
    "GS205": (
        Advice(
            lambda seen: seen["steps"] >= seen["of"],
            "No step of the last {of} was taken: lower the scale from {scale} by 2^8, "
            "or let the scaler find it: GradScaler(init_scale=2.0**16, "
            "growth_interval=2000), and nothing that sets the scale after that.",
        ),
        Advice(
            lambda seen: seen["steps"] < seen["of"],
            "Some steps fit: lower the scale from {scale} by a factor of 2 to 16.",
        ),
        *DIVERGED,
        EXPLODED,
        *PLACE,
        IN_FLOAT32,
        WHO,
        PERHAPS_DIVERGED,
    ),
    "GS206": (
        Advice(always, "Compute the loss in float32: scaler.scale(loss.float())."),
        Advice(
            lambda seen: "fits" in seen,
            "As float16, a loss of {loss:.4g} leaves room for a scale of {fits} at "
            "most, whatever the gradients would allow.",
        ),
    ),
    "GS207": (
        *DIVERGED,
        Advice(
            always,
            "Load a checkpoint from before step {since}: no scale and no batch brings "
            "these weights back.",
        ),
        Advice(
            lambda seen: seen["steps_before"] > 0,
            "The scaler skips every step that is not finite, so something else wrote "
            "them: an edit in place, such as a weight divided by its norm, a clamp or "
            "a copy under torch.no_grad(), an optimizer stepped without the scaler, "
            "weights kept in float16, a learning rate that is not finite.",
        ),
        Advice(
            lambda seen: seen["steps_before"] == 0,
            "They were so before the first step: check how they are made or loaded.",
        ),
        PERHAPS_DIVERGED,
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
        *DIVERGED,
        EXPLODED,
        *PLACE,
        Advice(
            lambda seen: not rising(seen),
            "Keep a checkpoint from before step {since}: in runs that were lost, the "
            "scale fell before the loss rose.",
        ),
        Advice(
            lambda seen: named(seen) and not everywhere(seen),
            "The last overflow was in {culprit}, {culprits} in all: watch that module, "
            "or run it in float32.",
        ),
        PERHAPS_DIVERGED,
    ),
}
