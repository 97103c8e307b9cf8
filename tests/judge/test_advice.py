"""Advice follows from the evidence, and only from it."""

import pytest

from gradscale.judge.advice import ADVICE, LOCATION, advice_for
from gradscale.judge.verdict_table import SEVERITY
from tests.judge.advised import (
    BACKWARD,
    GREW,
    LOSS,
    NAMED,
    PLACE,
    ROSE,
    SKIPS,
    SOARED,
    said,
)


def test_every_code_that_is_found_has_advice():
    assert set(ADVICE) == {*SEVERITY, "GS001"}


@pytest.mark.parametrize("code", ["GS202", "GS208"])
def test_nan_under_a_finite_loss_points_at_a_derivative(code):
    assert "derivative" in said(code, BACKWARD)
    assert "derivative" not in said(code, BACKWARD, {"nan": False})


@pytest.mark.parametrize("code", ["GS202", "GS208"])
def test_infinity_without_nan_points_at_the_range(code):
    assert "even at S = 2^8" in said(code, BACKWARD, {"nan": False})
    assert "65504" not in said(code, BACKWARD)


def test_a_collapse_under_a_bad_loss_points_at_the_forward_pass_alone():
    text = said("GS202", BACKWARD, NAMED, {"loss_finite": False})
    assert text.startswith("The loss itself was not finite")


def test_a_tolerance_is_for_a_scale_that_holds_its_place():
    assert "tolerance" in said("GS201", SKIPS)
    assert "tolerance" not in said("GS201", SKIPS, {"falling": True})
    assert "tolerance" not in said("GS201", SKIPS, {"at_floor": True})
    assert "tolerance" not in said("GS201", SKIPS, GREW)


def test_skips_at_the_floor_point_at_the_floor():
    assert "min_scale" in said("GS201", SKIPS, {"at_floor": True})
    assert "min_scale" not in said("GS201", SKIPS)


def test_a_loss_that_was_never_finite_points_at_the_first_batch():
    assert "first batch" in said("GS203", LOSS, {"finite_before": False})
    assert "first batch" not in said("GS203", LOSS)


def test_a_loss_that_recovered_points_at_its_batches():
    assert "batches of these steps" in said("GS203", LOSS, {"over": True})
    assert "batches of these steps" not in said("GS203", LOSS)


def test_a_loss_that_recovered_before_points_at_its_batches_too():
    again = {"times": 3, "steps": 1}
    assert "batches of these steps" in said("GS203", LOSS, again)
    assert "batches of these steps" not in said("GS203", LOSS, {"times": 3})


def test_steps_that_were_taken_make_the_loss_useless_and_not_the_run():
    text = said("GS203", LOSS, {"applied": 6, "steps": 8, "scale": "2^7"})
    assert "6 of 8 steps were applied" in text
    assert "if it rose, load a checkpoint from before that step" in text
    assert "without effect" not in text


@pytest.mark.parametrize(
    ("loss", "words"),
    [("nan", "0/0"), ("inf", "above 65504"), ("not finite", "Find the first module")],
)
def test_nan_and_infinity_in_the_loss_have_different_causes(loss, words):
    others = {"0/0", "above 65504", "Find the first module"} - {words}
    text = said("GS203", LOSS, {"loss": loss})
    assert words in text
    assert [other for other in others if other in text] == []


def test_a_scale_that_fell_for_a_loss_points_at_the_guard():
    assert "from 2^16 to 2^7" in said("GS203", LOSS, {"scale": "2^7"})
    assert "guard" not in said("GS203", LOSS)


def test_with_headroom_the_scale_to_use_is_named():
    seen = {"scale": "2^0", "scale_from": "2^0", "fallen": False}
    text = said("GS209", seen, {"headroom_bits": 14.0, "room": "2^12"})
    assert text == "There are 14 bits of headroom: raise the scale from 2^0 to 2^12."


def test_without_headroom_a_higher_scale_is_not_advised():
    seen = {"scale": "2^0", "scale_from": "2^0", "fallen": False}
    text = said("GS209", seen, {"headroom_bits": 2.0, "room": "2^0"})
    assert "would overflow" in text
    assert "raise" not in text


def test_a_scale_that_fell_before_comes_first():
    seen = {"scale": "2^0", "scale_from": "2^16", "fallen": True}
    assert "fallen from 2^16" in said("GS209", seen)


def test_a_loss_that_is_known_says_which_scale_it_leaves():
    text = said("GS206", {"scale": "2^16", "loss": 3.5, "fits": "2^14"})
    assert "a loss of 3.5 limits the scale to 2^14" in text


def test_a_float32_loss_is_not_to_be_computed_in_float32():
    seen = {"scale": "2^126", "loss": 3.5, "fits": "2^126", "above_float32": True}
    (text,) = advice_for("GS206", seen)
    assert "above 3.4e38" in text
    assert "a loss of 3.5 allows a scale of 2^126. Set max_scale" in text
    assert "loss.float()" not in text


def test_tiny_gradients_at_a_high_scale_point_at_a_loss_that_was_not_scaled():
    seen = {"scale": "2^16", "scale_from": "2^16", "fallen": False}
    first, *_ = advice_for("GS209", {**seen, "perhaps_unscaled": True})
    assert "scaled_value_and_grad instead of jax.grad" in first
    assert "2^16 times too small" in first
    assert "jax.grad" not in said("GS209", seen)


# Codes that no run of JAX gets, and advice on what module hooks observed.
TORCH_ALONE = {"GS103", "GS206", "GS207"}


@pytest.mark.parametrize("code", sorted(set(ADVICE) - TORCH_ALONE))
def test_advice_that_a_run_of_jax_may_get_names_the_framework_of_its_calls(code):
    texts = [advice.text for advice in ADVICE[code] if advice not in LOCATION]
    calls = ("torch.", "scaler.", "GradScaler(")
    named = [text for text in texts if any(call in text for call in calls)]
    assert [text for text in named if "PyTorch" not in text] == []


def test_a_norm_without_growth_points_at_the_batch():
    assert "batch of this step" in said("GS204", {"scale": "2^16"})
    assert "batch of this step" not in said("GS204", {"scale": "2^16"}, ROSE)


@pytest.mark.parametrize(
    ("steps", "words"), [(10, "by 2^8"), (7, "by a factor of 2 to 16")]
)
def test_a_fixed_scale_is_lowered_by_as_much_as_it_failed(steps, words):
    assert words in said("GS205", {**SKIPS, "steps": steps, "of": 10})


@pytest.mark.parametrize(
    ("steps", "words"), [(0, "before the first step"), (5, "an in-place edit")]
)
def test_weights_that_are_gone_were_so_before_or_were_written(steps, words):
    assert words in said("GS207", {"since": 6, "steps_before": steps})


@pytest.mark.parametrize(
    ("before", "words"), [(False, "No step of this run"), (True, "before step 90")]
)
def test_missing_gradients_are_new_or_were_never_there(before, words):
    assert words in said("GS103", {"since": 90, "gradients_before": before})


def test_a_falling_scale_asks_for_a_checkpoint():
    assert "checkpoint from before step 90" in said("GS210", {"since": 90})


def test_one_tensor_of_many_is_a_local_fault():
    text = said("GS208", BACKWARD, NAMED, {"tensors": 211})
    assert "1 of 211 tensors, first decoder.3.wo.weight" in text


def test_one_tensor_of_few_is_named_and_not_called_local():
    text = said("GS208", BACKWARD, NAMED, {"tensors": 4})
    assert "module of decoder.3.wo.weight" in text
    assert "local" not in text


def test_all_tensors_point_at_the_loss_function():
    text = said("GS208", BACKWARD, NAMED, {"culprits": 4, "tensors": 4})
    assert "All 4 tensors are hit" in text
    assert "module of" not in text


def test_most_tensors_point_at_no_module():
    text = said("GS205", SKIPS, NAMED, {"culprits": 3, "tensors": 4})
    assert "module of" not in text


def test_all_tensors_under_a_fixed_scale_point_at_the_scale_alone():
    text = said("GS205", SKIPS, NAMED, {"culprits": 4, "tensors": 4, "steps": 60})
    assert text.startswith("None of the last 60 steps was applied")
    assert "where backward begins" not in text


PLACED = [("GS201", SKIPS), ("GS203", LOSS), ("GS208", BACKWARD), ("GS202", BACKWARD)]


@pytest.mark.parametrize(("code", "seen"), PLACED)
def test_a_place_that_is_known_comes_first(code, seen):
    first, *_ = advice_for(code, {**seen, **PLACE})
    assert first.startswith("Look at module pool, whose output is the first that is")


@pytest.mark.parametrize(("code", "seen"), PLACED)
def test_a_known_pattern_says_its_safe_form_and_its_module(code, seen):
    known = {"place_at": "log in module head", "place_instead": "Use log_softmax."}
    first, *_ = advice_for(code, {**seen, **PLACE, **known})
    assert first == "Look at log in module head. Use log_softmax."


def test_a_loss_that_rose_far_comes_before_a_place():
    first, second, *_ = advice_for("GS203", {**LOSS, **SOARED, **PLACE})
    assert "learning rate" in first
    assert "module pool" in second


@pytest.mark.parametrize(("kind", "word"), [("nan", "NaN"), ("inf", "infinity")])
def test_a_batch_that_is_not_finite_is_to_be_checked(kind, word):
    batch = {"place_module": "", "place_tensor": "input", "place": "input: 16 of 128"}
    first, *_ = advice_for("GS203", {**LOSS, **PLACE, **batch, "place_kind": kind})
    assert first.startswith(f"The batch of step 95 contains {word} before the forward")
    assert "input: 16 of 128" in first


@pytest.mark.parametrize(("kind", "word"), [("nan", "NaN"), ("inf", "infinity")])
def test_a_bad_input_of_a_module_comes_from_the_computation_before_it(kind, word):
    text = said("GS203", LOSS, PLACE, {"place_tensor": "input", "place_kind": kind})
    assert f"The input of module pool contains {word}" in text
    assert "The batch" not in text


@pytest.mark.parametrize(
    ("direction", "kind", "words"),
    [
        ("forward", "nan", "fully masked row"),
        ("forward", "inf", "near 0"),
        ("backward", "nan", "derivative"),
        ("backward", "inf", "gradient is the first that is infinite"),
    ],
)
def test_a_place_without_a_pattern_says_what_to_look_for(direction, kind, words):
    made = {"place_direction": direction, "place_kind": kind}
    assert words in advice_for("GS208", {**BACKWARD, **PLACE, **made})[0]


def test_what_would_be_tried_without_a_place_is_not_tried_with_one():
    text = said("GS208", BACKWARD, PLACE, NAMED, {"culprits": 4, "tensors": 4})
    assert "where backward begins" not in text
    assert "NaN gradients of a finite loss" not in text
    assert "module of" not in said("GS201", SKIPS, PLACE, NAMED, {"tensors": 4})
    assert "0/0, infinity minus infinity, the log" not in said("GS203", LOSS, PLACE)


def test_without_names_the_first_thing_is_to_get_them():
    assert "scaler.last.culprits" in said("GS208", BACKWARD)
    assert "scaler.last.culprits" not in said("GS208", BACKWARD, NAMED)


@pytest.mark.parametrize(
    ("code", "seen"),
    [("GS201", SKIPS), ("GS203", LOSS), ("GS208", BACKWARD), ("GS210", BACKWARD)],
)
def test_a_learning_rate_is_named_only_after_a_rise(code, seen):
    assert "learning rate" not in said(code, seen)
    text = said(code, seen, ROSE)
    assert "from 2 to 8" in text
    assert "before step 80 and continue with a lower learning rate" in text


@pytest.mark.parametrize(
    ("code", "seen"),
    [("GS201", SKIPS), ("GS203", LOSS), ("GS208", BACKWARD), ("GS210", BACKWARD)],
)
def test_a_rise_at_once_names_the_learning_rate_and_no_checkpoint(code, seen):
    first, *_ = advice_for(code, {**seen, **SOARED})
    assert "from 8 to 6795" in first
    assert "lower learning rate" in first
    assert "checkpoint" not in first


@pytest.mark.parametrize(
    ("code", "seen"),
    [("GS201", SKIPS), ("GS203", LOSS), ("GS208", BACKWARD), ("GS210", BACKWARD)],
)
def test_a_rise_that_stays_below_the_start_is_a_condition_and_comes_last(code, seen):
    *before, last = advice_for(code, {**seen, **ROSE, "loss_start": 6.0})
    assert "not above its initial 6. If the batches did not get harder" in last
    assert "learning rate" not in " ".join(before)


def test_a_rise_is_far_above_the_start_from_half_as_much_again():
    assert "If the batches" in said("GS203", LOSS, ROSE, {"loss_start": 5.34})
    assert "If the batches" not in said("GS203", LOSS, ROSE, {"loss_start": 5.33})


def test_gradients_that_grew_everywhere_point_at_the_learning_rate():
    assert "grown by 5 bits" in said("GS208", BACKWARD, GREW)


def test_gradients_that_grew_in_one_tensor_do_not():
    text = said("GS208", BACKWARD, GREW, NAMED, {"tensors": 211})
    assert "learning rate" not in text


def test_a_little_growth_is_none():
    text = said("GS208", BACKWARD, GREW, {"gradients_grown_bits": 2.0})
    assert "grown" not in text
