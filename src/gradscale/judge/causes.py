"""The causes of trouble: the evidence each needs, its location and its remedies.

One table. The cause is the first row whose evidence is present; rows that need more
evidence come first. A finding without such evidence describes the symptom and has no
cause.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gradscale.judge.history import RISEN

Evidence = Mapping[str, Any]

# The largest float16.
LARGEST = 65504.0
# Batches in a row that may be bad by themselves.
FEW_BATCHES = 3
# Factor by which the largest weight must have grown to blame the updates.
WEIGHTS_GROWN = 8.0
# Growth of the loss since the start that indicates the learning rate although gradients
# have grown: an exploding recurrence raised it 27-fold, a learning rate 128-fold.
DIVERGED_FAR = 64.0
# Gain on independent inputs at which the weight of a layer is too large: usual
# initialisations have 1 to 2, and a few layers of this gain exceed the float16 range.
LARGE_GAIN = 8.0


def always(seen: Evidence) -> bool:
    """The advice needs no evidence."""
    return True


class Advice(NamedTuple):
    """One remedy, and the evidence that it requires.

    Attributes:
        text: A sentence; names in braces are filled in from the evidence, and from
            `WORDS` after "how_".
        when: Returns whether it applies to the evidence.
    """

    text: str
    when: Callable[[Evidence], bool] = always


class Cause(NamedTuple):
    """One cause.

    Attributes:
        name: In kebab case, for programs.
        when: Returns whether the evidence shows it.
        because: Completes "because ..."; names in braces are filled in. Empty if the
            code of the finding already names the cause.
        where: Returns the location.
        advice: Remedies, in the order in which to try them.
    """

    name: str
    when: Callable[[Evidence], bool]
    because: str
    where: Callable[[Evidence], str]
    advice: tuple[Advice, ...]


def cause_of(code: str, seen: Evidence) -> Cause:
    """Return the cause that the evidence of a finding shows.

    >>> cause_of("GS203", {"loss": "nan", "loss_start": 2.0, "loss_last": 900.0}).name
    'learning-rate'
    """
    rows = BY_CODE.get(code, EPISODES)
    return next((cause for cause in rows if cause.when(seen)), UNKNOWN)


def advice_of(cause: Cause, seen: Evidence, framework: str = "") -> tuple[str, ...]:
    """Return the remedies that apply, in the order in which to try them.

    Args:
        cause: Of the finding.
        seen: Its evidence.
        framework: A key of `WORDS`; for any other, neutral words are used.
    """
    # Evidence may have the name of a word: "loss".
    words = {
        f"how_{name}": text
        for name, text in {**NEUTRAL, **WORDS.get(framework, {})}.items()
    }
    known = {**seen, **words}
    texts = (each.text.format_map(known) for each in cause.advice if each.when(seen))
    return tuple(dict.fromkeys(texts))


# --- Evidence -------------------------------------------------------------------------


def forward(seen: Evidence) -> bool:
    """The loss was not finite."""
    return "loss" in seen


def grown(seen: Evidence) -> bool:
    """Gradients had grown before."""
    return float(seen.get("gradients_grown_bits", 0.0)) >= 3.0


def rising(seen: Evidence) -> bool:
    """The loss had risen before, slowly or suddenly."""
    return "loss_low" in seen or "loss_last" in seen


def diverged(seen: Evidence) -> bool:
    """The loss had risen far above its value at the start of the run."""
    above = seen.get("loss_mean", 0.0) > RISEN * seen.get("loss_start", 0.0)
    return "loss_last" in seen or ("loss_low" in seen and above)


def weights_grown(seen: Evidence) -> bool:
    """The largest weight is far above that of the first step."""
    first, now = seen.get("weight_from", 0.0), seen.get("weight_to", 0.0)
    return bool(0.0 < WEIGHTS_GROWN * first <= now)


def named(seen: Evidence) -> bool:
    """Some tensor that was not finite is known."""
    return bool(seen.get("culprits"))


def everywhere(seen: Evidence) -> bool:
    """All tensors are affected."""
    return named(seen) and seen["culprits"] == seen.get("tensors")


def widespread(seen: Evidence) -> bool:
    """So many tensors are affected that the first of them is no evidence."""
    tensors = int(seen.get("tensors", 0))
    return named(seen) and 0 < 3 * tensors <= 4 * int(seen["culprits"])


def located(seen: Evidence) -> bool:
    """Module hooks observed the location."""
    return "place" in seen


def _place_is(direction: str, *, module: bool) -> Callable[[Evidence], bool]:
    return lambda seen: (
        seen.get("place_direction") == direction
        and bool(seen.get("place_module")) is module
    )


def _batch_is_bad(seen: Evidence) -> bool:
    """An input or a target was not finite, and no module had computed it."""
    # A target that a poisoned model computes, such as a teacher, is no data.
    computed = seen.get("place_tensor") == "target" and bool(seen.get("buffers"))
    given = bool(seen.get("place_given")) and not seen.get("place_was_float16")
    return given and not (computed and not seen.get("recovered"))


def _batch_left_float16(seen: Evidence) -> bool:
    """An input or a target overflowed in a cast to float16."""
    return bool(seen.get("place_given") and seen.get("place_was_float16"))


def _weights_are_large(seen: Evidence) -> bool:
    """The weight of a layer has a large gain, since the start of the run."""
    first, now = seen.get("weight_from", 0.0), seen.get("weight_to", 0.0)
    return bool(seen.get("place_gain", 0.0) >= LARGE_GAIN and now <= 1.5 * first)


def _input_is_bad(seen: Evidence) -> bool:
    """The input of a module, computed outside any module, was not finite."""
    return seen.get("place_tensor") == "input" and bool(seen.get("place_module"))


def _input_is_large(seen: Evidence) -> bool:
    """A finite input was beyond the float16 range."""
    in_forward = seen.get("place_direction") == "forward"
    large = in_forward and seen.get("place_peak", 0.0) > LARGEST
    # Large weights make large activations of any input.
    return large and not weights_grown(seen)


def _is_loss_alone(seen: Evidence) -> bool:
    """The loss alone was not finite; a bad input also affects the gradients."""
    applied = seen.get("applied", 0)
    enough = 1 if seen.get("loss") == "inf" else seen.get("steps", 1)
    return forward(seen) and applied >= enough


def _kind(kind: str) -> Callable[[Evidence], bool]:
    return lambda seen: seen.get("place_kind") == kind and not seen.get("place_instead")


# --- Locations ------------------------------------------------------------------------


def _nowhere(seen: Evidence) -> str:
    return ""


def _culprit(seen: Evidence) -> str:
    """The first tensor that was not finite, if it helps to find the cause."""
    return "" if widespread(seen) else str(seen.get("culprit", ""))


def _module(seen: Evidence) -> str:
    return str(seen.get("place_module", "")) or _culprit(seen)


def _fixed(words: str) -> Callable[[Evidence], str]:
    return lambda seen: words


# --- Remedies that several causes share -----------------------------------------------

# Words that differ between frameworks. Advice on calls that only PyTorch's scaler
# observes contains its own.
NEUTRAL = {
    "float32": "in float32",
    "find": "Find the tensors at the next skip.",
    "guard": "",
    "settings": "init_scale=2.0**16, growth_interval=2000",
    "interval": "growth_interval",
    "clip": "Clip the gradients by their norm, after they are unscaled.",
    "loss": "Compute the loss in float32.",
    "scaling": "Check that the loss was multiplied by the scale before the gradients "
    "were computed",
}
WORDS: Mapping[str, Mapping[str, str]] = {
    "torch": {
        "float32": "in float32: torch.autocast(device, enabled=False)",
        "find": "Find the tensors at the next skip: gradscale run, or "
        "scaler.last.culprits.",
        "guard": ' With gradscale, GradScaler(guard="raise") keeps the scale while the '
        "loss is not finite, and stops a hopeless run.",
        "clip": "Clip the gradients by their norm: scaler.unscale_(optimizer), then "
        "clip_grad_norm_.",
        "loss": "Compute the loss in float32: scaler.scale(loss.float()).",
        "scaling": "Check that the loss was multiplied by the scale before the "
        "gradients were computed, scaler.scale(loss).backward()",
    },
    "apex": {
        "guard": ' amp.initialize(..., guard="raise") stops a hopeless run.',
        "settings": 'loss_scale="dynamic"',
        "interval": "growth interval",
        "clip": "Clip the gradients by their norm: clip_grad_norm_ of "
        "amp.master_params(optimizer), after the block of scale_loss.",
        "scaling": "Check that the backward pass was that of the scaled loss, with "
        "amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
    },
    "jax": {
        "float32": "in float32: Precision(..., keep=...)",
        "find": "Find the tensors at the next skip: params= of the recorder, or "
        "culprits(last(opt_state), params).",
        "clip": "Clip the gradients by their norm: optax.clip_by_global_norm.",
        "scaling": "Check that the loss was multiplied by the scale before the "
        "gradients were computed, scaled_value_and_grad instead of jax.grad",
    },
    "keras": {
        "float32": 'in float32: dtype="float32" of the layer',
        "guard": ' gradscale.keras.Monitor(guard="raise") stops a hopeless run.',
        "settings": "initial_scale=2.0**15, dynamic_growth_steps=2000",
        "interval": "dynamic_growth_steps",
        "clip": "Clip the gradients by their norm: global_clipnorm of the inner "
        "optimizer.",
    },
    "mxnet": {
        "find": "Find the tensors at the next skip: scaler.last.culprits.",
        "guard": ' gradscale.mxnet.Recorder(guard="raise") stops a hopeless run.',
        "clip": "Clip the gradients by their norm: amp.unscale(trainer), then "
        "gluon.utils.clip_global_norm.",
        "scaling": "Check that the loss was multiplied by the scale before the "
        "gradients were computed, amp.scale_loss(loss, trainer)",
    },
}
KNOWN_PATTERN = Advice(
    "Look at {place_at}. {place_instead}", lambda seen: bool(seen.get("place_instead"))
)
FOR_NOTHING = Advice(
    "The scale fell from {scale_from} to {scale} for nothing: leave out a batch whose "
    "loss is not finite, before its backward pass.{how_guard}",
    lambda seen: forward(seen) and seen.get("bits", 0.0) >= 1.0,
)
CHECKPOINT = Advice(
    "Load a checkpoint from before step {usual_before} and continue with a lower "
    "learning rate.",
    lambda seen: "usual_before" in seen,
)
APPLIED = Advice(
    "Gradients were finite and {applied} of {steps} steps were applied. Compute the "
    "loss in float32 and compare it with the one before step {since}: if it rose, load "
    "a checkpoint from before that step. Logs, schedules and early stopping that use "
    "the loss get a meaningless number.",
    lambda seen: seen.get("applied", 0) > 0,
)
IN_FLOAT32 = Advice(
    "Run the module of {culprit} {how_float32}.",
    lambda seen: named(seen) and not (widespread(seen) or located(seen)),
)
NEAR_LOSS = Advice(
    "All {tensors} tensors are hit, so the cause is where backward begins: the loss "
    "function or the last layers. Compute those in float32.",
    lambda seen: everywhere(seen) and not (located(seen) or forward(seen)),
)
FIND_TENSORS = Advice(
    "{how_find}", lambda seen: not (named(seen) or located(seen) or forward(seen))
)

# --- The table ------------------------------------------------------------------------

NEVER_CLEARED = Cause(
    "never-zeroed",
    lambda seen: bool(seen.get("uncleared")) and not forward(seen),
    "gradients are not cleared between steps, so a non-finite one stays",
    lambda seen: str(seen.get("uncleared_part") or "the training loop"),
    (
        Advice(
            "Call optimizer.zero_grad() before every backward pass, or after every "
            "step: backward adds to the gradients that exist."
        ),
    ),
)
STEPPED_DIRECTLY = Cause(
    "stepped-directly",
    lambda seen: "weight" in seen and seen.get("direct_steps", 0) > 0,
    "optimizer.step() was called directly ({direct_steps}x)",
    _fixed("the training loop"),
    (
        Advice(
            "Call scaler.step(optimizer) instead of optimizer.step(): it unscales the "
            "gradients and skips the step if they are not finite."
        ),
        Advice("Load a checkpoint from before step {since}."),
    ),
)
FLOAT16_WEIGHTS = Cause(
    "fp16-weights",
    lambda seen: "weight" in seen and seen.get("float16_params", 0) > 0,
    "{float16_params} weights are float16 and the optimizer has no float32 copies",
    _culprit,
    (
        Advice(
            "Use an optimizer with float32 master weights: from gradscale.torch.optim "
            "import AdamW, or gradscale.torch.master_weights(optimizer). Or keep the "
            "weights in float32 and compute under torch.autocast."
        ),
        Advice("Load a checkpoint from before step {since}."),
    ),
)
WEIGHTS = Cause(
    "weights-written",
    lambda seen: "weight" in seen,
    "",
    lambda seen: _culprit(seen) or str(seen["weight"]),
    (
        Advice(
            "Load a checkpoint from before step {since}: no scale and no batch "
            "restores these weights."
        ),
        Advice(
            "The scaler skips every step with non-finite gradients, so other code "
            "wrote them: an in-place edit, such as a weight divided by its norm, a "
            "clamp or a copy without gradients, an optimizer stepped without the "
            "scaler, weights kept in float16, a learning rate that is not finite.",
            lambda seen: seen.get("steps_before", 0) > 0,
        ),
        Advice(
            "They were not finite before the first step: check how they are "
            "initialised or loaded.",
            lambda seen: seen.get("steps_before") == 0,
        ),
    ),
)
RESET_BUFFERS = Advice(
    "Reset {buffers}, or load a checkpoint from before step {since}: a running "
    "statistic keeps a NaN for good.",
    lambda seen: bool(seen.get("buffers")),
)
BUFFERS = Cause(
    "weights-written",
    # A run that goes on although they are not finite does not depend on them.
    lambda seen: (
        forward(seen) and bool(seen.get("buffers")) and not seen.get("recovered")
    ),
    "the buffer {buffers} is not finite",
    lambda seen: str(seen["buffers"]),
    (
        RESET_BUFFERS,
        Advice(
            "A forward pass in training mode updates running statistics even if the "
            "step is skipped: find the batch of step {since}."
        ),
    ),
)
BATCH = Cause(
    "bad-batch",
    _batch_is_bad,
    "the batch contains {place_word}",
    _fixed("the batch"),
    (
        Advice(
            "The batch of step {place_step} contains {place_word} before the forward "
            "pass ({place}): check the data of that step and its preprocessing.",
            lambda seen: seen.get("place_tensor") != "target",
        ),
        Advice(
            "The targets of step {place_step} contain {place_word}: check the data and "
            "how targets are computed, such as a division by a standard deviation of "
            "0. Mask them before the loss: after it, their gradients are still NaN.",
            lambda seen: seen.get("place_tensor") == "target",
        ),
        RESET_BUFFERS,
        FOR_NOTHING,
    ),
)
CAST = Cause(
    "input-range",
    _batch_left_float16,
    "values beyond 65504, the largest float16, are infinite since a cast to float16",
    _fixed("the batch"),
    (
        Advice(
            "Normalise the data of step {place_step} before they become float16, or "
            "keep them in float32: {place}, and all finite values are float16 values."
        ),
        RESET_BUFFERS,
        FOR_NOTHING,
    ),
)
INPUT_RANGE = Cause(
    "input-range",
    _input_is_large,
    "inputs of up to {place_peak:.3g} are beyond 65504, the largest float16",
    lambda seen: (
        "the batch"
        if seen.get("place_given_peak", 0.0) > LARGEST
        else _module(seen) or "the batch"
    ),
    (
        Advice(
            "Normalise the data: a value of {place_peak:.3g} becomes infinite when it "
            "is cast to float16. Or compute {place_at} in float32."
        ),
    ),
)
SCALE = Cause(
    "scale-too-high",
    lambda seen: bool(seen.get("scale_blamed")) and not forward(seen),
    "the scale is too high for them",
    # The first in the order of backward, also if all are hit.
    lambda seen: str(seen.get("place_module") or seen.get("culprit", "")),
    (
        Advice(
            "S = {scale} is the lowest the policy allows, so it cannot back off. Lower "
            "min_scale, or keep the module that overflows in float32.",
            lambda seen: bool(seen.get("at_floor")),
        ),
        Advice(
            "None of the last {of} steps was applied: lower the scale from {scale} by "
            "2^8, or let the scaler find it: {how_settings}, without setting the scale "
            "afterwards.",
            lambda seen: bool(seen.get("fixed")) and seen["steps"] >= seen["of"],
        ),
        Advice(
            "Some steps fit: lower the scale from {scale} by a factor of 2 to 16.",
            lambda seen: bool(seen.get("fixed")) and seen["steps"] < seen["of"],
        ),
        Advice(
            "The scale fell by {bits:.0f} bits in {steps} skipped steps and still does "
            "not fit: start at a lower scale ({how_settings} are the defaults), and "
            "leave the backoff factor at 0.5.",
            lambda seen: bool(seen.get("slow")),
        ),
        Advice(
            "The scale was raised {growths} times in these steps: a larger "
            "{how_interval} (2000 is the default) raises it less often.",
            lambda seen: bool(seen.get("growths")),
        ),
        KNOWN_PATTERN,
        IN_FLOAT32,
        Advice(
            "Single batches have larger gradients than the others: gradscale's policy "
            "DynamicScale(tolerance=0.01) does not lower the scale for rare outliers.",
            lambda seen: (
                not any(map(seen.get, ("at_floor", "fixed", "growths", "slow")))
            ),
        ),
    ),
)
REPLACED = Cause(
    "weights-written",
    lambda seen: weights_grown(seen) and bool(seen.get("beyond_rate")),
    "weights were written by other code than the optimizer: up to {weight_to:.3g}",
    lambda seen: str(seen.get("weight_name") or "the weights"),
    (
        Advice(
            "The largest weight went from {weight_from:.3g} to {weight_to:.3g}, more "
            "than the optimizer can have moved it{at_rate}: look for code that copies, "
            "averages or rescales weights before step {since}."
        ),
        Advice("Load a checkpoint from before step {since}."),
    ),
)
LEARNING_RATE = Cause(
    "learning-rate",
    lambda seen: diverged(seen) or weights_grown(seen),
    "the updates are too large{at_rate}",
    _fixed("the optimizer"),
    (
        Advice(
            "The largest weight grew from {weight_from:.3g} to {weight_to:.3g}"
            "{at_rate}: lower the learning rate, or warm it up.",
            weights_grown,
        ),
        Advice(
            "The loss rose from {loss_start:.4g} to {loss_last:.4g} within its first "
            "steps: the run diverges. Start again with a lower learning rate or "
            "with a warm-up.",
            lambda seen: "loss_last" in seen,
        ),
        Advice(
            "The loss rose from {loss_low:.4g} to {loss_mean:.4g} before: the run "
            "diverges. Load a checkpoint from before step {usual_before} and continue "
            "with a lower learning rate.",
            lambda seen: diverged(seen) and "loss_low" in seen,
        ),
        Advice("{how_clip}"),
    ),
)
DIVERGED = LEARNING_RATE._replace(
    when=lambda seen: (
        seen.get("loss_mean", 0.0) >= DIVERGED_FAR * seen.get("loss_start", 0.0) > 0.0
    )
)
AMPLIFIED = Cause(
    "gradient-growth",
    lambda seen: "amplified_bits" in seen,
    "they grow on the way back through the model",
    # The first in the order of backward, also if all are hit.
    lambda seen: str(seen.get("culprit", "")),
    (
        Advice(
            "A loss of {loss_value:.3g} has gradients 2^{amplified_bits:.0f} times as "
            "large: shorten the sequences that are unrolled, lower the gain of the "
            "initial weights, or add normalisation."
        ),
    ),
)
LARGE_WEIGHTS = Cause(
    "weights-written",
    _weights_are_large,
    "the weights of {place_at} multiply their inputs by {place_gain:.3g}",
    lambda seen: str(seen.get("place_module") or "the weights"),
    (
        Advice(
            "The weights are as large as they were before the first step (up to "
            "{weight_to:.3g}): check how they are initialised or loaded. The usual "
            "standard deviation is about 1 / sqrt(inputs)."
        ),
    ),
)
GROWTH = Cause(
    "gradient-growth",
    lambda seen: grown(seen) and not (forward(seen) or seen.get("nan")),
    "gradients have grown by {gradients_grown_bits:.0f} bits",
    # The first in the order of backward, also if all are hit.
    lambda seen: str(seen.get("culprit", "")),
    (
        Advice(
            "Gradients had grown by {gradients_grown_bits:.0f} bits before: lower the "
            "clipping norm or the learning rate; in a recurrent model, shorten the "
            "sequences that are unrolled."
        ),
        CHECKPOINT,
    ),
)
FORWARD = Cause(
    "forward-op",
    _place_is("forward", module=True),
    "{place_at} makes the first {place_word}",
    _module,
    (
        KNOWN_PATTERN,
        Advice(
            "The input of {place_at} contains {place_word} ({place}): check the "
            "computation before it, outside any module.",
            _input_is_bad,
        ),
        Advice(
            "Look at {place_at}, whose output is the first that is NaN: 0/0; a value "
            "above 65504 or a log of 0, then infinity/infinity, infinity - infinity or "
            "0 * infinity; a fully masked row; the log or root of a negative number.",
            lambda seen: _kind("nan")(seen) and not _input_is_bad(seen),
        ),
        Advice(
            "Look at {place_at}, whose output is the first that is infinite: a log or "
            "a division near 0, a sum or product above 65504. Compute it "
            "{how_float32}.",
            lambda seen: _kind("inf")(seen) and not _input_is_bad(seen),
        ),
        APPLIED,
        FOR_NOTHING,
    ),
)
LOSS = Cause(
    "loss-op",
    _place_is("forward", module=False),
    "{place_at} makes the first {place_word}",
    _fixed("the loss"),
    (
        KNOWN_PATTERN,
        Advice(
            "Check the loss computation after the last module: compute it in float32, "
            "from logits instead of probabilities, with eps above 6e-8."
        ),
        APPLIED,
        FOR_NOTHING,
    ),
)
LOSS_VALUE = Cause(
    "loss-op",
    _is_loss_alone,
    "the loss is not finite and its gradients are",
    _fixed("the loss"),
    (
        Advice(
            "Compute the loss in float32, and as a mean instead of a sum.",
            lambda seen: seen.get("loss") != "nan",
        ),
        Advice(
            "Look for a mean over no elements, 0/0: a batch whose labels are all "
            "ignored, or whose mask is empty.",
            lambda seen: seen.get("loss") != "inf",
        ),
        APPLIED,
    ),
)
BACKWARD = Cause(
    "backward-op",
    lambda seen: seen.get("place_direction") == "backward",
    "the derivative of {place_at} is {place_word}",
    lambda seen: str(seen.get("place_module") or "the loss"),
    (
        KNOWN_PATTERN,
        Advice(
            "Look at {place_at}, whose gradient is the first that is NaN: an undefined "
            "derivative, such as that of a root, a norm or a power at 0. Keep the "
            "argument away from 0 before the operation, not after it.",
            _kind("nan"),
        ),
        Advice(
            "Look at {place_at}, whose gradient is the first that is infinite: compute "
            "it {how_float32}.",
            _kind("inf"),
        ),
        FOR_NOTHING,
    ),
)
RECURRING = Cause(
    "bad-batch",
    lambda seen: bool(seen.get("every")),
    "the same batch fails every {every} steps",
    _fixed("the batch"),
    (
        Advice(
            "Steps fail every {every} steps, as a batch does that comes back in every "
            "epoch: check the batch of step {since} for NaN, infinity, empty masks and "
            "labels out of range."
        ),
        RESET_BUFFERS,
        FOR_NOTHING,
    ),
)
ONE_BATCH = Cause(
    "bad-batch",
    lambda seen: (
        forward(seen)
        and bool(seen.get("recovered"))
        and seen.get("steps", 1) <= FEW_BATCHES
    ),
    "of single batches",
    _fixed("the batch"),
    (
        Advice(
            "The run recovered by itself, so single batches are the cause: check those "
            "of these steps for NaN, infinity, empty masks and labels out of range."
        ),
        RESET_BUFFERS,
        APPLIED,
        FOR_NOTHING,
    ),
)
DERIVATIVE = Cause(
    "backward-op",
    lambda seen: not forward(seen) and bool(seen.get("nan")),
    "",
    _culprit,
    (
        IN_FLOAT32,
        NEAR_LOSS,
        Advice(
            "NaN gradients of a finite loss come from an undefined derivative: a root, "
            "a norm or a power at 0, 0/0, a mask of infinity. Keep the argument away "
            "from 0 before the operation, not after it."
        ),
        FIND_TENSORS,
        FOR_NOTHING,
    ),
)
UNKNOWN = Cause(
    "",
    always,
    "",
    lambda seen: "" if forward(seen) else _culprit(seen),
    (
        Advice(
            "No step of this run had a finite loss: check the first batch, labels and "
            "masks included, and the initial weights.",
            lambda seen: forward(seen) and not seen.get("finite_before"),
        ),
        Advice(
            "Infinity: look for log or division near 0 and for values above 65504; "
            "compute the loss in float32 from logits.",
            lambda seen: seen.get("loss") == "inf",
        ),
        Advice(
            "NaN: look for 0/0, infinity/infinity, infinity - infinity, 0 * infinity, "
            "the log or root of a negative number, in the first module with a NaN "
            "output.",
            lambda seen: seen.get("loss") == "nan",
        ),
        Advice(
            "Find the first module whose output is not finite.",
            lambda seen: seen.get("loss") == "not finite",
        ),
        IN_FLOAT32,
        NEAR_LOSS,
        Advice(
            "Infinity and no NaN: the backward pass exceeds 65504 even at S = {scale}. "
            "Train in bfloat16, which has the range for it.",
            lambda seen: not forward(seen) and seen.get("nan") is False,
        ),
        FIND_TENSORS,
        APPLIED,
        FOR_NOTHING,
    ),
)

# In the order of evidence: causes that exclude the others come first.
EPISODES = (
    NEVER_CLEARED,
    STEPPED_DIRECTLY,
    FLOAT16_WEIGHTS,
    WEIGHTS,
    CAST,
    BATCH,
    BUFFERS,
    INPUT_RANGE,
    SCALE,
    REPLACED,
    LEARNING_RATE,
    GROWTH,
    LARGE_WEIGHTS,
    FORWARD,
    LOSS,
    LOSS_VALUE,
    BACKWARD,
    RECURRING,
    ONE_BATCH,
    DERIVATIVE,
)


def _row(
    name: str,
    *advice: Advice,
    because: str = "",
    where: Callable[[Evidence], str] = _nowhere,
) -> tuple[Cause, ...]:
    return (Cause(name, always, because, where, advice),)


def _misuse(name: str, text: str) -> tuple[Cause, ...]:
    return _row(name, Advice(text), where=_fixed("the training loop"))


# Codes that name one cause.
BY_CODE: dict[str, tuple[Cause, ...]] = {
    "GS001": _row("calibration"),
    "GS103": _row(
        "no-gradients",
        Advice(
            "The gradients of backward were gone at the step: zero_grad() is called "
            "between backward and step. Move it before backward or after the step.",
            lambda seen: bool(seen.get("cleared_early")),
        ),
        Advice(
            "No step of this run had a gradient: create the optimizer after the model "
            "was moved, wrapped or replaced, and check requires_grad.",
            lambda seen: not (seen["gradients_before"] or seen.get("cleared_early")),
        ),
        Advice(
            "There were gradients before step {since}: look for a change at that step, "
            "such as frozen parameters, another branch, a zero_grad() between backward "
            "and step.",
            lambda seen: seen["gradients_before"] and not seen.get("cleared_early"),
        ),
    ),
    "GS204": (
        DIVERGED,
        GROWTH,
        LEARNING_RATE,
        *_row(
            "norm-overflow",
            Advice(
                "Neither the loss nor the gradients grew before: check the batch of "
                "this step, and look for a sum that should be a mean."
            ),
        ),
    ),
    "GS206": _row(
        "loss-overflow",
        Advice("{how_loss}", lambda seen: not seen.get("above_float32")),
        Advice(
            "Loss times scale is above 3.4e38, the largest float32: a loss of "
            "{value:.4g} allows a scale of {fits}. Set max_scale to it or lower, or "
            "return a smaller loss, such as a mean instead of a sum.",
            lambda seen: bool(seen.get("above_float32")),
        ),
        Advice(
            "In float16, a loss of {value:.4g} limits the scale to {fits}, although "
            "the gradients may allow more.",
            lambda seen: "fits" in seen and not seen.get("above_float32"),
        ),
    ),
    "GS209": _row(
        "scale-too-low",
        Advice(
            "{how_scaling}: otherwise they are {scale} times too small.",
            lambda seen: bool(seen.get("perhaps_unscaled")),
        ),
        Advice(
            "There are {headroom_bits:.0f} bits of headroom: raise the scale from "
            "{scale} to {room}.",
            lambda seen: seen.get("headroom_bits", 0.0) >= 4.0,
        ),
        Advice(
            "Only {headroom_bits:.0f} bits of headroom are left, so a higher scale "
            "would overflow: raise the weight of the loss that {layer} belongs to, or "
            "compute that part of the model in float32.",
            lambda seen: seen.get("headroom_bits", 4.0) < 4.0 and "layer" in seen,
        ),
        Advice(
            "Only {headroom_bits:.0f} bits of headroom are left, so a higher scale "
            "would overflow: the gradients span more than the float16 range. Train in "
            "bfloat16, or keep the layers with the largest gradients in float32.",
            lambda seen: seen.get("headroom_bits", 4.0) < 4.0 and "layer" not in seen,
        ),
        Advice(
            "Every gradient was exactly 0: check whether the loss depends on the "
            "parameters, then start from a scale above {scale}.",
            lambda seen: "headroom_bits" not in seen,
        ),
        Advice(
            "The scale had fallen from {scale_from} before: find the cause of the "
            "fall first.",
            lambda seen: seen["fallen"],
        ),
        where=lambda seen: str(seen.get("layer", "")),
    ),
    "GS210": (
        AMPLIFIED,
        DIVERGED,
        GROWTH,
        LEARNING_RATE,
        *_row(
            "falling-scale",
            KNOWN_PATTERN,
            Advice(
                "Keep a checkpoint from before step {since}: in runs that were lost, "
                "the scale fell before the loss rose.",
                lambda seen: not rising(seen),
            ),
            Advice(
                "The last overflow was in {culprit}, one of {culprits}: monitor that "
                "module, or run it in float32.",
                lambda seen: named(seen) and not everywhere(seen),
            ),
            where=_culprit,
        ),
    ),
    "GS301": _row(
        "scaler-made-anew",
        Advice(
            "Save scaler.state_dict() with the checkpoint and load it when you resume."
        ),
        where=_fixed("the checkpoint"),
    ),
    "GS112": _misuse(
        "clipped-scaled",
        "Unscale before you clip: scaler.unscale_(optimizer), then "
        "torch.nn.utils.clip_grad_norm_(...); or call "
        "scaler.clip_grad_norm_(optimizer, max_norm) of gradscale's scaler, which "
        "does both.",
    ),
    "GS113": _misuse(
        "unscaled-twice",
        "Remove the division by the scale from your code: scaler.step() or "
        "scaler.unscale_() does it. To divide by hand, call optimizer.step() "
        "yourself and skip steps that are not finite.",
    ),
    "GS114": _row(
        "backward-unscaled",
        Advice(
            "Call backward() on what scaler.scale() returns: "
            "scaler.scale(loss).backward(). Every loss that reaches these parameters "
            "needs it."
        ),
        where=_fixed("the loss"),
    ),
    "GS104": _misuse(
        "unscaled-twice",
        "Call scaler.unscale_(optimizer) once, after the last backward() of the "
        "accumulation window and before the step.",
    ),
    "GS115": _row(
        "stepped-directly",
        *STEPPED_DIRECTLY.advice[:1],
        where=_fixed("the training loop"),
    ),
    "GS116": _row("never-zeroed", *NEVER_CLEARED.advice, where=NEVER_CLEARED.where),
    "GS117": _misuse(
        "zeroed-early",
        "Move zero_grad() before backward or after the step: between them it "
        "discards the gradients.",
    ),
    "GS118": _misuse(
        "scaler-made-anew",
        "Create the scaler once, before the first epoch, and let a job that "
        "resumes load its state: a new one begins at init_scale again and loses "
        "the steps until the scale fits.",
    ),
    "GS122": _row(
        "update-too-often",
        Advice(
            "Call scaler.update() once per iteration, after the steps of all "
            "optimizers.",
            lambda seen: bool(seen.get("repeated_updates")),
        ),
        Advice(
            "Call scaler.step() and scaler.update() once for each window of "
            "micro-batches, after its last backward(); or clear the gradients after "
            "each step.",
            lambda seen: not seen.get("repeated_updates"),
        ),
        where=_fixed("the training loop"),
    ),
    "GS123": _misuse(
        "update-missing",
        "Call scaler.step(optimizer) and scaler.update() in every iteration, also "
        "if the gradients are not finite: the scaler skips such a step itself and "
        "lowers the scale.",
    ),
    "GS119": _row(
        "not-in-optimizer",
        Advice(
            "Create the optimizer after the model is complete, or add the parameters: "
            "optimizer.add_param_group(...). If they are to stay fixed, call "
            "requires_grad_(False)."
        ),
        where=lambda seen: str(seen.get("parameter", "")),
    ),
    "GS120": _row(
        "fp16-weights",
        *FLOAT16_WEIGHTS.advice[:1],
        where=lambda seen: str(seen.get("parameter", "")),
    ),
    "GS121": _row(
        "no-float16",
        Advice(
            "Run the forward pass under torch.autocast(device, dtype=torch.float16) "
            "to train in float16; in float32 or bfloat16 no scaler is needed."
        ),
        where=_fixed("the forward pass"),
    ),
}
