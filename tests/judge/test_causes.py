"""A cause is named on its evidence alone, and advice follows from evidence."""

import re
import string

import pytest

from gradscale.judge import causes
from gradscale.judge.causes import BY_CODE, EPISODES, UNKNOWN, advice_of, cause_of
from gradscale.judge.verdict_table import SEVERITY

BATCH = {
    "place": "forward of the model itself (Net), input: 16 of 128 NaN",
    "place_step": 95,
    "place_at": "the model",
    "place_module": "",
    "place_direction": "forward",
    "place_tensor": "input",
    "place_given": True,
    "place_kind": "nan",
    "place_word": "NaN",
    "place_instead": "",
}
PLACE = {
    **BATCH,
    "place": "forward of pool (Pool), output: 512 of 512 NaN",
    "place_at": "module 'pool' (Pool)",
    "place_module": "pool",
    "place_tensor": "output",
    "place_given": False,
}
LOSS = {"since": 90, "loss": "nan", "steps": 10, "applied": 0, "finite_before": True}
GRADIENTS = {"since": 90, "nan": False, "scale": "2^8"}
GREW = {"weight_from": 1.0, "weight_to": 8.0, "at_rate": ""}
LARGE = {**PLACE, "place_gain": 8.0, "weight_from": 1.0, "weight_to": 1.5}
# Each cause, evidence that shows it, and a change after which it shows no more.
SHOWN = [
    (causes.NEVER_CLEARED, {"uncleared": True}, {"uncleared": False}),
    (causes.NEVER_CLEARED, {"uncleared": True}, LOSS),
    (causes.STEPPED_DIRECTLY, {"weight": "a", "direct_steps": 1}, {"direct_steps": 0}),
    (
        causes.FLOAT16_WEIGHTS,
        {"weight": "a", "float16_params": 1},
        {"float16_params": 0},
    ),
    (causes.BUFFERS, {**LOSS, "buffers": "bn.running_mean"}, {"buffers": ""}),
    (causes.BATCH, BATCH, {"place_given": False}),
    (causes.BATCH, BATCH, {"place_was_float16": True}),
    (
        causes.BATCH,
        {**BATCH, **LOSS, "place_tensor": "target", "buffers": ""},
        {"buffers": "teacher.bn.running_mean"},
    ),
    (
        causes.BATCH,
        {**BATCH, **LOSS, "buffers": "bn.running_mean", "recovered": True},
        {"place_given": False},
    ),
    (causes.CAST, {**BATCH, "place_was_float16": True}, {"place_was_float16": False}),
    (causes.LARGE_WEIGHTS, LARGE, {"place_gain": 7.9}),
    (causes.LARGE_WEIGHTS, LARGE, {"weight_to": 1.6}),
    (causes.INPUT_RANGE, {**PLACE, "place_peak": 65520.0}, {"place_peak": 65504.0}),
    (
        causes.INPUT_RANGE,
        {**PLACE, "place_peak": 65520.0, "scale_blamed": True},
        {"place_direction": "backward"},
    ),
    (causes.SCALE, {"scale_blamed": True}, {"scale_blamed": False}),
    (causes.SCALE, {"scale_blamed": True}, LOSS),
    (causes.REPLACED, {**GREW, "beyond_rate": True}, {"beyond_rate": False}),
    (causes.REPLACED, {**GREW, "beyond_rate": True}, {"weight_to": 7.9}),
    (causes.LEARNING_RATE, GREW, {"weight_to": 7.9}),
    (causes.LEARNING_RATE, GREW, {"weight_from": 0.0}),
    (
        causes.LEARNING_RATE,
        {"loss_low": 2.0, "loss_mean": 9.1, "loss_start": 6.0},
        {"loss_mean": 9.0},
    ),
    (causes.GROWTH, {"gradients_grown_bits": 3.0}, {"gradients_grown_bits": 2.9}),
    (causes.GROWTH, {"gradients_grown_bits": 3.0}, LOSS),
    (causes.GROWTH, {"gradients_grown_bits": 3.0}, {"nan": True}),
    (causes.FORWARD, PLACE, {"place_module": ""}),
    (causes.LOSS, {**PLACE, "place_module": ""}, {"place_module": "pool"}),
    (causes.LOSS_VALUE, {**LOSS, "loss": "inf", "applied": 1}, {"applied": 0}),
    (causes.LOSS_VALUE, {**LOSS, "loss": "inf", "applied": 1}, {"loss": "nan"}),
    (causes.LOSS_VALUE, {**LOSS, "applied": 10}, {"applied": 9}),
    (
        causes.BACKWARD,
        {**PLACE, "place_direction": "backward"},
        {"place_direction": "forward"},
    ),
    (causes.RECURRING, {"every": 8}, {"every": 0}),
    (causes.ONE_BATCH, {**LOSS, "recovered": True, "steps": 1}, {"recovered": False}),
    (causes.DERIVATIVE, {"nan": True}, {"nan": False}),
    (causes.DERIVATIVE, {"nan": True}, LOSS),
]


@pytest.mark.parametrize(("cause", "seen", "change"), SHOWN)
def test_a_cause_is_named_on_its_evidence(cause, seen, change):
    assert cause_of("GS208", seen) is cause


@pytest.mark.parametrize(("cause", "seen", "change"), SHOWN)
def test_a_cause_is_not_named_on_a_little_less(cause, seen, change):
    assert cause_of("GS208", {**seen, **change}) is not cause


def test_every_cause_of_an_episode_is_shown_above():
    shown = [cause for cause, _, _ in SHOWN]
    # A weight that is not finite is all that its cause needs.
    assert [row for row in EPISODES if row not in shown] == [causes.WEIGHTS]
    assert cause_of("GS207", {"weight": "a"}) is causes.WEIGHTS


def test_without_evidence_no_cause_is_named():
    assert cause_of("GS208", GRADIENTS) is UNKNOWN
    assert UNKNOWN.name == ""


@pytest.mark.parametrize("code", BY_CODE)
def test_a_code_that_names_its_cause_needs_no_evidence(code):
    assert cause_of(code, {}).name != ""


def test_every_code_of_a_judge_has_causes():
    shared = {"GS201", "GS202", "GS203", "GS205", "GS207", "GS208", "GS211"}
    assert {*SEVERITY, "GS001"} - set(BY_CODE) == shared


# Two kinds of evidence at once, and the cause that made the other.
@pytest.mark.parametrize(
    ("cause", "seen"),
    [
        (causes.NEVER_CLEARED, {"uncleared": True, "scale_blamed": True}),
        (causes.STEPPED_DIRECTLY, {"weight": "a", "direct_steps": 2, **GREW}),
        (causes.BATCH, {**BATCH, **GREW}),
        (causes.SCALE, {"scale_blamed": True, **PLACE, "gradients_grown_bits": 5.0}),
        (causes.LEARNING_RATE, {**LOSS, **PLACE, **GREW}),
        (causes.FORWARD, {**LOSS, **PLACE, "every": 8, "recovered": True}),
        (causes.RECURRING, {**LOSS, "every": 8, "recovered": True}),
        (causes.RECURRING, {"nan": True, "every": 8}),
    ],
)
def test_of_two_causes_the_one_that_made_the_other_is_named(cause, seen):
    assert cause_of("GS208", seen) is cause


@pytest.mark.parametrize(
    ("seen", "where"),
    [
        ({"weight": "a", "culprit": "b"}, "b"),
        ({"weight": "a"}, "a"),
        (BATCH, "the batch"),
        (PLACE, "pool"),
        ({**PLACE, "place_module": ""}, "the loss"),
        ({**LOSS, "buffers": "bn.running_mean"}, "bn.running_mean"),
        (GREW, "the optimizer"),
        ({**GREW, "beyond_rate": True, "weight_name": "a"}, "a"),
        ({"uncleared": True}, "the training loop"),
        ({"uncleared": True, "uncleared_part": "decoder"}, "decoder"),
        ({**PLACE, "place_peak": 1e9, "place_given_peak": 1e9}, "the batch"),
        ({**PLACE, "place_peak": 1e9, "place_given_peak": 1.0}, "pool"),
        ({**GRADIENTS, "culprit": "a", "culprits": 1, "tensors": 4}, "a"),
        ({**GRADIENTS, "culprit": "a", "culprits": 3, "tensors": 4}, ""),
        (
            {"scale_blamed": True, "culprit": "a", "culprits": 4, "tensors": 4},
            "a",
        ),
        ({**LOSS, "culprit": "a", "culprits": 1, "tensors": 4}, ""),
    ],
)
def test_the_location_follows_from_the_cause(seen, where):
    assert cause_of("GS208", seen).where(seen) == where


# --- Advice ---------------------------------------------------------------------------


def texts_of(code, *parts):
    """Return the advice on a finding with this evidence."""
    seen = {name: value for part in parts for name, value in part.items()}
    return advice_of(cause_of(code, seen), seen)


def said(code, *parts):
    return " ".join(texts_of(code, *parts))


ALL = {*EPISODES, UNKNOWN, *(cause for rows in BY_CODE.values() for cause in rows)}
TEXTS = sorted({each.text for cause in ALL for each in cause.advice})


class Gaps(dict):
    """Fills the words of a framework into a text, and leaves evidence as it is."""

    def __missing__(self, name):
        return f"{{{name}}}"


def worded(text, framework):
    words = {**causes.NEUTRAL, **causes.WORDS.get(framework, {})}
    plain = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", text)
    return plain.format_map(Gaps({f"how_{name}": each for name, each in words.items()}))


@pytest.mark.parametrize("framework", ["", *causes.WORDS])
@pytest.mark.parametrize("text", TEXTS)
def test_advice_is_made_of_full_sentences(text, framework):
    text = worded(text, framework)
    # The safe form of a pattern is a sentence of its own.
    assert text.endswith((".", "{place_instead}"))
    assert text[0].isupper() or text[0] == "{"


def test_advice_and_reasons_are_filled_in_with_evidence_that_findings_have():
    reasons = [cause.because for cause in ALL]
    parsed = [string.Formatter().parse(text) for text in [*TEXTS, *reasons]]
    names = {name for parts in parsed for _, name, _, _ in parts} - {None}
    words = {f"how_{name}" for name in causes.NEUTRAL}
    assert names & words == words
    assert names - words == {
        *("applied", "at_rate", "buffers", "culprit", "culprits", "direct_steps"),
        *("amplified_bits", "bits", "loss_value", "place_gain"),
        *("every", "fits", "float16_params", "gradients_grown_bits", "growths"),
        "layer",
        *("headroom_bits", "loss_last", "loss_low", "loss_mean", "loss_start", "of"),
        *("place", "place_at", "place_instead", "place_peak", "place_step"),
        *("place_word", "room", "scale", "scale_from", "since", "steps", "tensors"),
        *("usual_before", "value", "weight_from", "weight_to"),
    }


@pytest.mark.parametrize("framework", causes.WORDS)
def test_a_framework_words_what_is_worded_for_all(framework):
    assert causes.WORDS[framework].keys() <= causes.NEUTRAL.keys()


# Causes that need no observation: a run of any framework may have them.
UNOBSERVED = (
    *(causes.SCALE, causes.LEARNING_RATE, causes.GROWTH, causes.RECURRING),
    *(causes.ONE_BATCH, causes.DERIVATIVE, UNKNOWN),
    *(row for code in ("GS204", "GS209", "GS210") for row in BY_CODE[code]),
)


@pytest.mark.parametrize("framework", ["", "jax", "keras"])
@pytest.mark.parametrize(
    "text", sorted({a.text for row in UNOBSERVED for a in row.advice})
)
def test_advice_to_a_run_of_another_framework_names_no_call_of_torch(text, framework):
    calls = ("torch.", "scaler.", "GradScaler(", "clip_grad_norm_")
    assert not any(call in worded(text, framework) for call in calls)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"fixed": True, "steps": 10, "of": 10}, "lower the scale from 2^15 by 2^8"),
        ({"fixed": True, "steps": 7, "of": 10}, "by a factor of 2 to 16"),
        ({"at_floor": True}, "Lower min_scale"),
        ({"growths": 5}, "The scale was raised 5 times in these steps"),
        ({}, "DynamicScale(tolerance=0.01)"),
    ],
)
def test_a_scale_that_is_too_high_is_lowered_as_the_skips_suggest(seen, words):
    first, *others = texts_of("GS201", {"scale_blamed": True, "scale": "2^15"}, seen)
    assert words in first
    assert others == []


def test_a_known_pattern_states_its_safe_form_and_its_module():
    known = {"place_at": "log in module 'head'", "place_instead": "Use log_softmax."}
    first, *_ = texts_of("GS203", LOSS, PLACE, known)
    assert first == "Look at log in module 'head'. Use log_softmax."


@pytest.mark.parametrize(
    ("direction", "kind", "words"),
    [
        ("forward", "nan", "fully masked row"),
        ("forward", "inf", "near 0"),
        ("backward", "nan", "undefined derivative"),
        ("backward", "inf", "gradient is the first that is infinite"),
    ],
)
def test_a_place_without_a_pattern_states_what_to_look_for(direction, kind, words):
    made = {"place_direction": direction, "place_kind": kind}
    assert words in texts_of("GS208", GRADIENTS, PLACE, made)[0]


def test_a_bad_input_of_a_module_comes_from_the_computation_before_it():
    text = said("GS203", LOSS, PLACE, {"place_tensor": "input"})
    assert "The input of module 'pool' (Pool) contains NaN" in text
    assert "fully masked" not in text


def test_a_batch_that_is_not_finite_is_to_be_checked():
    first, *_ = texts_of("GS203", LOSS, BATCH)
    assert first.startswith("The batch of step 95 contains NaN before the forward")


@pytest.mark.parametrize(("bits", "told"), [(1.0, True), (0.0, False)])
def test_a_scale_that_fell_for_nothing_is_told(bits, told):
    seen = {**LOSS, "bits": bits, "scale_from": "2^16", "scale": "2^7"}
    assert ("fell from 2^16 to 2^7 for nothing" in said("GS203", seen)) is told


@pytest.mark.parametrize(
    ("loss", "words"),
    [("nan", "0/0"), ("inf", "above 65504"), ("not finite", "Find the first module")],
)
def test_nan_and_infinity_in_the_loss_have_different_advice(loss, words):
    others = {"0/0", "above 65504", "Find the first module"} - {words}
    text = said("GS203", LOSS, {"loss": loss})
    assert words in text
    assert [other for other in others if other in text] == []


def test_a_run_without_a_finite_loss_is_pointed_at_its_first_batch():
    assert "first batch" in said("GS203", LOSS, {"finite_before": False})
    assert "first batch" not in said("GS203", LOSS)


def test_steps_that_were_applied_make_the_loss_useless_and_not_the_run():
    text = said("GS203", LOSS, {"applied": 6, "steps": 8})
    assert "6 of 8 steps were applied" in text
    assert "if it rose, load a checkpoint from before that step" in text


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({}, "Find the tensors at the next skip"),
        ({"culprit": "a", "culprits": 1, "tensors": 4}, "Run the module of a in"),
        ({"culprit": "a", "culprits": 4, "tensors": 4}, "All 4 tensors are hit"),
    ],
)
def test_the_tensors_that_are_hit_tell_where_to_begin(seen, words):
    told = [
        *("Find the tensors at the next skip", "Run the module of a in"),
        "All 4 tensors are hit",
    ]
    text = said("GS208", GRADIENTS, {"nan": True}, seen)
    assert [each for each in told if each in text] == [words]


def test_infinity_without_nan_points_at_the_range():
    assert "even at S = 2^8" in said("GS208", GRADIENTS)


def test_a_loss_that_rose_at_once_is_lowered_by_the_learning_rate():
    first, *_ = texts_of("GS203", LOSS, {"loss_start": 8.0, "loss_last": 6795.0})
    assert "from 8 to 6795 within its first steps" in first
    assert "lower learning rate" in first


def test_a_loss_that_rose_slowly_goes_back_to_a_checkpoint():
    rose = {"loss_low": 2.0, "loss_mean": 9.1, "loss_start": 6.0, "usual_before": 80}
    first, *_ = texts_of("GS203", LOSS, rose)
    assert "from 2 to 9.1" in first
    assert "before step 80 and continue with a lower learning rate" in first


# --- Advice of single codes -----------------------------------------------------------

LOW = {"scale": "2^0", "scale_from": "2^0", "fallen": False}


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (
            {"headroom_bits": 14.0, "room": "2^12"},
            "There are 14 bits of headroom: raise the scale from 2^0 to 2^12.",
        ),
        (
            {"headroom_bits": 2.0, "room": "2^0"},
            "Only 2 bits of headroom are left, so a higher scale would overflow: the "
            "gradients span more than the float16 range. Train in bfloat16, or keep "
            "the layers with the largest gradients in float32.",
        ),
        (
            {},
            "Every gradient was exactly 0: check whether the loss depends on the "
            "parameters, then start from a scale above 2^0.",
        ),
    ],
)
def test_gradients_that_vanish_get_a_higher_scale_if_there_is_room(seen, text):
    assert texts_of("GS209", LOW, seen) == (text,)


def test_a_scale_that_fell_before_is_told_to_those_whose_gradients_vanish():
    seen = {"scale_from": "2^16", "fallen": True, "headroom_bits": 9.0, "room": "2^6"}
    assert "fallen from 2^16 before" in said("GS209", LOW, seen)


def test_tiny_gradients_at_a_high_scale_point_at_a_loss_that_was_not_scaled():
    first, *_ = texts_of("GS209", LOW, {"scale": "2^16", "perhaps_unscaled": True})
    assert "the loss was multiplied by the scale" in first
    assert "2^16 times too small" in first


def test_a_loss_that_is_known_states_which_scale_it_leaves():
    text = said("GS206", {"scale": "2^16", "value": 3.5, "fits": "2^14"})
    assert "a loss of 3.5 limits the scale to 2^14" in text


def test_a_float32_loss_is_not_to_be_computed_in_float32():
    seen = {"scale": "2^126", "value": 3.5, "fits": "2^126", "above_float32": True}
    (text,) = texts_of("GS206", seen)
    assert "a loss of 3.5 allows a scale of 2^126. Set max_scale" in text
    assert "loss.float()" not in text


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"gradients_before": False}, "No step of this run had a gradient"),
        ({"gradients_before": True}, "There were gradients before step 90"),
        (
            {"gradients_before": True, "cleared_early": True},
            "zero_grad() is called between",
        ),
    ],
)
def test_missing_gradients_are_new_or_were_never_there_or_were_cleared(seen, words):
    (text,) = texts_of("GS103", {"since": 90}, seen)
    assert words.casefold() in text.casefold()


def test_a_norm_without_growth_points_at_the_batch():
    assert "batch of this step" in said("GS204", {"scale": "2^16"})


@pytest.mark.parametrize(
    ("steps", "words"), [(0, "before the first step"), (5, "an in-place edit")]
)
def test_weights_that_are_gone_were_so_before_or_were_written(steps, words):
    seen = {"since": 6, "weight": "a", "steps_before": steps}
    assert words in said("GS207", seen)


def test_a_falling_scale_asks_for_a_checkpoint():
    assert "checkpoint from before step 90" in said("GS210", {"since": 90})


def test_a_bad_batch_is_named_before_the_statistics_that_it_poisoned():
    seen = {**LOSS, **BATCH, "buffers": "norm.running_mean", "bits": 0.0}
    cause = cause_of("GS203", seen)
    assert cause is causes.BATCH
    assert any(text.startswith("Reset norm.r") for text in advice_of(cause, seen))


def test_advice_for_an_apex_run_names_its_calls():
    seen = {**LOSS, "bits": 9.0, "scale": "2^7", "scale_from": "2^16"}
    advice = advice_of(cause_of("GS203", seen), seen, "apex")
    assert any('amp.initialize(..., guard="raise")' in text for text in advice)
    assert not any("GradScaler" in text for text in advice)
