"""Advice for findings, each piece with the evidence that it requires.

No advice is given on suspicion: a learning rate is named only where the loss or the
gradients have grown.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gradscale.judge.history import MANY_LOSSES, RISEN

Evidence = Mapping[str, Any]


class Advice(NamedTuple):
    """One remedy, and the evidence that it requires.

    Attributes:
        when: Returns whether it applies to the evidence.
        text: A sentence; names in braces are filled in from the evidence.
    """

    when: Callable[[Evidence], bool]
    text: str


def advice_for(code: str, evidence: Evidence) -> tuple[str, ...]:
    """Return the remedies that apply, in the order in which to try them.

    >>> advice_for("GS206", {"scale": "2^16", "loss": 3.5})[0]
    'Compute the loss in float32: scaler.scale(loss.float()).'
    """
    return tuple(
        advice.text.format_map(evidence)
        for advice in ADVICE[code]
        if advice.when(evidence)
    )


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
    """So many tensors are hit that the first of them is no evidence."""
    tensors = int(seen.get("tensors", 0))
    return named(seen) and 0 < 3 * tensors <= 4 * int(seen["culprits"])


def located(seen: Evidence) -> bool:
    """Module hooks observed the location."""
    return "place" in seen


def _input_is(seen: Evidence, kind: str, *, to_model: bool) -> bool:
    """The input of the model, or of one of its modules, was not finite."""
    given = seen.get("place_tensor") == "input" and seen.get("place_kind") == kind
    return given and to_model != bool(seen.get("place_module"))


def _output_is(seen: Evidence, direction: str, kind: str) -> bool:
    """A location was observed that matches no known unsafe pattern."""
    known = seen.get("place_instead") or seen.get("place_tensor") == "input"
    same = seen.get("place_direction") == direction
    return located(seen) and not known and same and seen.get("place_kind") == kind


def _finite_loss(seen: Evidence) -> bool:
    return bool(seen["loss_finite"])


def _unlocated(seen: Evidence) -> bool:
    """The loss was finite, and no location was observed."""
    return _finite_loss(seen) and not located(seen)


DIVERGED = (
    Advice(
        lambda seen: "loss_last" in seen,
        "The loss rose from {loss_start:.4g} to {loss_last:.4g} within its first "
        "steps: the run diverges. Start again with a lower learning rate or "
        "with a warm-up.",
    ),
    Advice(
        lambda seen: diverged(seen) and "loss_low" in seen,
        "The loss rose from {loss_low:.4g} to {loss_mean:.4g} before: the run "
        "diverges. Load a checkpoint from before step {usual_before} and continue with "
        "a lower learning rate.",
    ),
)
# A loss below its initial value may rise because batches get harder.
PERHAPS_DIVERGED = Advice(
    lambda seen: rising(seen) and not diverged(seen),
    "The loss rose from {loss_low:.4g} to {loss_mean:.4g} before, but not above its "
    "initial {loss_start:.4g}. If the batches did not get harder there, the run "
    "diverges: load a checkpoint from before step {usual_before} and continue with a "
    "lower learning rate.",
)
EXPLODED = Advice(
    # Growth in a few tensors of many is caused by a module, not the learning rate.
    lambda seen: grown(seen) and not (rising(seen) or local(seen)),
    "Gradients had grown by {gradients_grown_bits:.0f} bits before: load a checkpoint "
    "from before step {usual_before}, and lower the clipping norm or the learning "
    "rate.",
)
LOCATION = (
    Advice(
        lambda seen: _input_is(seen, "nan", to_model=True),
        "The batch of step {place_step} contains NaN before the forward pass "
        "({place}): check the data of that step and its preprocessing.",
    ),
    Advice(
        lambda seen: _input_is(seen, "inf", to_model=True),
        "The batch of step {place_step} contains infinity before the forward pass "
        "({place}): check the data of that step and its preprocessing.",
    ),
    Advice(
        lambda seen: _input_is(seen, "nan", to_model=False),
        "The input of {place_at} contains NaN ({place}): check the computation before "
        "it, outside any module.",
    ),
    Advice(
        lambda seen: _input_is(seen, "inf", to_model=False),
        "The input of {place_at} contains infinity ({place}): check the computation "
        "before it, outside any module.",
    ),
    Advice(
        lambda seen: bool(seen.get("place_instead")),
        "Look at {place_at}. {place_instead}",
    ),
    Advice(
        lambda seen: _output_is(seen, "forward", "nan"),
        "Look at {place_at}, whose output is the first that is NaN: 0/0, infinity "
        "minus infinity after a value above 65504, a fully masked row, the log or root "
        "of a negative number.",
    ),
    Advice(
        lambda seen: _output_is(seen, "forward", "inf"),
        "Look at {place_at}, whose output is the first that is infinite: a log or a "
        "division near 0, a sum or product above 65504. Compute it in float32: "
        "torch.autocast(device, enabled=False).",
    ),
    Advice(
        lambda seen: _output_is(seen, "backward", "nan"),
        "Look at {place_at}, whose gradient is the first that is NaN: an undefined "
        "derivative, such as that of a root, a norm or a power at 0. Keep the argument "
        "away from 0 before the operation, not after it.",
    ),
    Advice(
        lambda seen: _output_is(seen, "backward", "inf"),
        "Look at {place_at}, whose gradient is the first that is infinite: compute it "
        "in float32: torch.autocast(device, enabled=False).",
    ),
)
# The judge does not know the framework: what is not common to all is named for each.
FLOAT32 = (
    "in float32 (PyTorch: torch.autocast(device, enabled=False); JAX: "
    "Precision(..., keep=...))."
)
IN_FLOAT32 = Advice(
    lambda seen: named(seen) and not (widespread(seen) or located(seen)),
    f"Run the module of {{culprit}} {FLOAT32}",
)
NEAR_LOSS = Advice(
    lambda seen: everywhere(seen) and not located(seen),
    "All {tensors} tensors are hit, so the cause is where backward begins: the loss "
    "function or the last layers. Compute those in float32.",
)
FIND_TENSORS = Advice(
    lambda seen: not (named(seen) or located(seen)),
    "Find the tensors at the next skip (PyTorch: gradscale run, or "
    "scaler.last.culprits; JAX: params= of the recorder, or "
    "culprits(last(opt_state), params)).",
)
# A finite loss and non-finite gradients.
_BACKWARD = (
    *DIVERGED,
    EXPLODED,
    *LOCATION,
    Advice(
        lambda seen: _unlocated(seen) and local(seen),
        "The problem is local, {culprits} of {tensors} tensors, first {culprit}: run "
        f"its module {FLOAT32}",
    ),
    Advice(
        lambda seen: _unlocated(seen) and not local(seen) and IN_FLOAT32.when(seen),
        IN_FLOAT32.text,
    ),
    Advice(lambda seen: _finite_loss(seen) and NEAR_LOSS.when(seen), NEAR_LOSS.text),
    Advice(
        lambda seen: _unlocated(seen) and seen["nan"],
        "NaN gradients of a finite loss come from an undefined derivative: a root, a "
        "norm or a power at 0, 0/0, a mask of infinity. Keep the argument away from 0 "
        "before the operation, not after it.",
    ),
    Advice(
        lambda seen: _finite_loss(seen) and not seen["nan"],
        "Infinity and no NaN: the backward pass exceeds 65504 even at S = {scale}. "
        "Train in bfloat16, which has the range for it.",
    ),
    Advice(
        lambda seen: _finite_loss(seen) and FIND_TENSORS.when(seen), FIND_TENSORS.text
    ),
    PERHAPS_DIVERGED,
)

ADVICE: dict[str, tuple[Advice, ...]] = {
    "GS001": (),
    "GS103": (
        Advice(
            lambda seen: not seen["gradients_before"],
            "No step of this run had a gradient: create the optimizer after the model "
            "was moved, wrapped or replaced, and check requires_grad.",
        ),
        Advice(
            lambda seen: seen["gradients_before"],
            "There were gradients before step {since}: look for a change at that step, "
            "such as frozen parameters, another branch, a zero_grad() between backward "
            "and step.",
        ),
    ),
    "GS201": (
        Advice(
            lambda seen: seen["at_floor"],
            "S = {scale} is the lowest the policy allows, so it cannot back off. Lower "
            "min_scale, or keep the module that overflows in float32.",
        ),
        *DIVERGED,
        EXPLODED,
        *LOCATION,
        IN_FLOAT32,
        NEAR_LOSS,
        FIND_TENSORS,
        Advice(
            lambda seen: (
                not (seen["at_floor"] or seen["falling"] or rising(seen))
                and not grown(seen)
            ),
            "The scale is stable, so single batches are the cause: a larger "
            "growth_interval raises it less often, and gradscale's policy "
            "DynamicScale(tolerance=0.01) does not lower it for rare outliers.",
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
        *LOCATION,
        Advice(
            lambda seen: not seen["finite_before"],
            "No step of this run had a finite loss: check the first batch, labels and "
            "masks included, and the initial weights.",
        ),
        Advice(
            lambda seen: (
                seen["over"] or (seen["times"] > 1 and seen["steps"] < MANY_LOSSES)
            ),
            "The run recovered by itself: check the batches of these steps for NaN, "
            "infinity, empty masks and labels out of range.",
        ),
        Advice(
            lambda seen: seen["loss"] == "inf" and not located(seen),
            "Infinity: look for log or division near 0 and for values above 65504; "
            "compute the loss in float32 from logits.",
        ),
        Advice(
            lambda seen: seen["loss"] == "nan" and not located(seen),
            "NaN: look for 0/0, infinity minus infinity, the log or root of a negative "
            "number, in the first module with a NaN output.",
        ),
        Advice(
            lambda seen: (
                seen["loss"] == "not finite" and not (seen["over"] or located(seen))
            ),
            "Find the first module whose output is not finite.",
        ),
        Advice(
            lambda seen: seen["applied"] > 0,
            "Gradients were finite and {applied} of {steps} steps were applied. "
            "Compute the loss in float32 and compare it with the one before step "
            "{since}: if it rose, load a checkpoint from before that step. Logs, "
            "schedules and early stopping that use the loss get a meaningless number.",
        ),
        Advice(
            lambda seen: seen["scale"] != seen["scale_from"] and not seen["applied"],
            "The scale fell from {scale_from} to {scale} without effect: skip batches "
            'with a non-finite loss before backward. GradScaler(guard="raise") of '
            "gradscale's PyTorch scaler holds the scale and stops a hopeless run.",
        ),
        PERHAPS_DIVERGED,
    ),
    "GS204": (
        *DIVERGED,
        EXPLODED,
        PERHAPS_DIVERGED,
        Advice(
            lambda seen: not (rising(seen) or grown(seen)),
            "Neither the loss nor the gradients grew before: check the batch of this "
            "step, and look for a sum that should be a mean.",
        ),
    ),
    "GS205": (
        Advice(
            lambda seen: seen["steps"] >= seen["of"],
            "None of the last {of} steps was applied: lower the scale from {scale} by "
            "2^8, or let the scaler find it: init_scale=2.0**16, "
            "growth_interval=2000, without setting the scale afterwards.",
        ),
        Advice(
            lambda seen: seen["steps"] < seen["of"],
            "Some steps fit: lower the scale from {scale} by a factor of 2 to 16.",
        ),
        *DIVERGED,
        EXPLODED,
        *LOCATION,
        IN_FLOAT32,
        FIND_TENSORS,
        PERHAPS_DIVERGED,
    ),
    "GS206": (
        Advice(
            lambda seen: not seen.get("above_float32"),
            "Compute the loss in float32: scaler.scale(loss.float()).",
        ),
        Advice(
            lambda seen: bool(seen.get("above_float32")),
            "Loss times scale is above 3.4e38, the largest float32: a loss of "
            "{loss:.4g} allows a scale of {fits}. Set max_scale to it or lower, or "
            "return a smaller loss, such as a mean instead of a sum.",
        ),
        Advice(
            lambda seen: "fits" in seen and not seen.get("above_float32"),
            "In float16, a loss of {loss:.4g} limits the scale to {fits}, although the "
            "gradients may allow more.",
        ),
    ),
    "GS207": (
        *DIVERGED,
        Advice(
            always,
            "Load a checkpoint from before step {since}: no scale and no batch "
            "restores these weights.",
        ),
        Advice(
            lambda seen: seen["steps_before"] > 0,
            "The scaler skips every step with non-finite gradients, so other code "
            "wrote them: an in-place edit, such as a weight divided by its norm, a "
            "clamp or a copy under torch.no_grad(), an optimizer stepped without the "
            "scaler, weights kept in float16, a learning rate that is not finite.",
        ),
        Advice(
            lambda seen: seen["steps_before"] == 0,
            "They were not finite before the first step: check how they are "
            "initialised or loaded.",
        ),
        PERHAPS_DIVERGED,
    ),
    "GS208": _BACKWARD,
    "GS209": (
        Advice(
            lambda seen: bool(seen.get("perhaps_unscaled")),
            "Check that the loss was multiplied by the scale before the gradients were "
            "computed (PyTorch: scaler.scale(loss).backward(); JAX: "
            "scaled_value_and_grad instead of jax.grad): otherwise they are {scale} "
            "times too small.",
        ),
        Advice(
            lambda seen: seen.get("headroom_bits", 0.0) >= 4.0,
            "There are {headroom_bits:.0f} bits of headroom: raise the scale from "
            "{scale} to {room}.",
        ),
        Advice(
            lambda seen: seen.get("headroom_bits", 4.0) < 4.0,
            "Only {headroom_bits:.0f} bits of headroom are left, so a higher scale "
            "would overflow: the gradients span more than the float16 range. Train in "
            "bfloat16, or keep the layers with the largest gradients in float32.",
        ),
        Advice(
            lambda seen: "headroom_bits" not in seen,
            "Every gradient was exactly 0: check whether the loss depends on the "
            "parameters, then start from a scale above {scale}.",
        ),
        Advice(
            lambda seen: seen["fallen"],
            "The scale had fallen from {scale_from} before: find the cause of the "
            "fall first.",
        ),
    ),
    "GS210": (
        *DIVERGED,
        EXPLODED,
        *LOCATION,
        Advice(
            lambda seen: not rising(seen),
            "Keep a checkpoint from before step {since}: in runs that were lost, the "
            "scale fell before the loss rose.",
        ),
        Advice(
            lambda seen: named(seen) and not everywhere(seen),
            "The last overflow was in {culprit}, one of {culprits}: monitor that "
            "module, or run it in float32.",
        ),
        PERHAPS_DIVERGED,
    ),
}
