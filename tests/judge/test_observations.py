"""Observations beside the steps: locations, weights, wrong uses of the scaler."""

import math
from itertools import filterfalse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscale.judge.history import Episode
from gradscale.judge.judge import Judge
from gradscale.judge.observations import MISUSES, Observations, place_of
from gradscale.judge.phrases import is_silent
from tests.judge.sick_runs import BAD, GOOD
from tests.judge.test_judge_properties import WORDED

# --- Locations ------------------------------------------------------------------------

PLACE = {
    "found": True,
    "direction": "backward",
    "module": "decoder.3.ffn",
    "module_class": "FeedForward",
    "operation": "log",
    "tensor": "grad_input",
    "kind": "inf",
    "count": 3,
    "elements": 4096,
    "peak": 70000.0,
    "pattern": {"name": "x", "what": "y", "instead": "Use log_softmax."},
}


def test_a_location_is_described_in_one_line():
    place = place_of(9, PLACE)
    assert (place.step, place.module, place.peak) == (9, "decoder.3.ffn", 70000.0)
    assert place.said == (
        "backward of decoder.3.ffn (FeedForward), log, grad_input: 3 of 4,096 inf"
    )
    assert place.instead == "Use log_softmax."


@pytest.mark.parametrize(
    ("module", "operation", "at"),
    [
        ("head", "log", "log in module 'head'"),
        ("head", "", "module 'head'"),
        ("", "log", "log in the model"),
        ("", "", "the model"),
        (None, "log", "log outside any module"),
        (None, "", "the computation outside any module"),
    ],
)
def test_a_location_names_operation_and_module(module, operation, at):
    made = {"module": module, "operation": operation, "module_class": None}
    assert place_of(1, {**PLACE, **made}).at == at


def test_a_loss_outside_any_module_is_a_location_of_its_own():
    loss = {"module": None, "operation": "", "tensor": "loss", "kind": "nan"}
    place = place_of(1, {**PLACE, **loss, "count": 1, "elements": 1})
    assert place.said == "the loss itself, outside any module: 1 of 1 NaN"
    assert place.at == "the loss computation after the last module"


@pytest.mark.parametrize("change", [{"found": False}, {"direction": ""}, {"found": 1}])
def test_an_event_of_another_kind_is_no_location(change):
    assert place_of(1, {**PLACE, **change}) is None


def observed(*events):
    """Return observations of events, the n-th in step n."""
    seen = Observations()
    for step, data in enumerate(events, start=1):
        seen.add(step, data)
    return seen


def episode(since, *records):
    made = Episode(since, 8.0, None, False, False)
    for step, record in enumerate(records, start=since):
        made.add_lost(record._replace(step=step), (), None)
    return made


LOST = BAD._replace(loss_finite=False)


def module_of(seen, made):
    return seen.of_episode(made).get("place_module")


def test_the_location_of_an_episode_is_the_first_within_it():
    places = [{**PLACE, "module": name, "loss_finite": True} for name in "abc"]
    seen = observed(*places)
    assert module_of(seen, episode(1, BAD)) == "a"


def test_a_location_from_before_an_episode_is_that_of_the_last():
    places = [{**PLACE, "module": name, "loss_finite": True} for name in "abc"]
    seen = observed(*places)
    assert module_of(seen, episode(2, BAD)) == "c"


def test_a_location_begins_anew_after_a_step_without_one():
    a, b = ({**PLACE, "module": name, "loss_finite": True} for name in "ab")
    seen = observed(a, {}, b)
    assert module_of(seen, episode(3, BAD)) == "b"


def test_locations_under_a_finite_loss_and_under_a_bad_one_are_kept_apart():
    gradients = {**PLACE, "module": "a", "loss_finite": True}
    loss = {**PLACE, "module": "b", "loss_finite": False}
    seen = observed(gradients, loss)
    assert module_of(seen, episode(1, BAD)) == "a"
    assert module_of(seen, episode(1, LOST)) == "b"


def test_a_location_under_a_bad_loss_is_none_of_gradients():
    seen = observed({**PLACE, "loss_finite": False})
    assert module_of(seen, episode(1, BAD)) is None


@pytest.mark.parametrize(("direction", "bad"), [("backward", BAD), ("forward", LOST)])
def test_where_the_loss_is_not_known_the_direction_tells_whether_it_was_finite(
    direction, bad
):
    seen = observed({**PLACE, "direction": direction})
    assert module_of(seen, episode(1, bad)) == "decoder.3.ffn"
    assert module_of(seen, episode(1, LOST if bad is BAD else BAD)) is None


def test_an_episode_of_both_kinds_takes_the_location_that_there_is():
    seen = observed({**PLACE, "loss_finite": True})
    assert module_of(seen, episode(1, BAD, LOST)) == "decoder.3.ffn"


# --- Weights --------------------------------------------------------------------------

WEIGHTS = {
    "observed": "weights",
    "peak": 900.0,
    "first_peak": 0.5,
    "largest": "head.weight",
    "rates": [0.1, 30.0],
    "beyond_rate": False,
    "buffer": "",
}


def test_the_last_look_at_the_weights_is_evidence():
    seen = observed({**WEIGHTS, "peak": 1.0}, WEIGHTS).of_episode(episode(2, LOST))
    assert (seen["weight_from"], seen["weight_to"]) == (0.5, 900.0)
    assert (seen["rate"], seen["at_rate"]) == (30.0, " (lr=30)")
    assert "buffers" not in seen


def test_a_buffer_that_is_not_finite_is_evidence():
    seen = observed({**WEIGHTS, "buffer": "bn.running_mean"})
    assert seen.of_episode(episode(1, LOST))["buffers"] == "bn.running_mean"


def test_weights_whose_first_size_is_not_known_did_not_grow():
    seen = observed({**WEIGHTS, "first_peak": 0.0}).of_episode(episode(1, LOST))
    assert "weight_to" not in seen


# --- Wrong uses -----------------------------------------------------------------------

LOOP = {"observed": "loop", "looks": 5, "scale": 2.0**16}
CLIPPED = {
    **LOOP,
    "written": 3,
    "norm": 1.0,
    "norm_spread": 1.0,
    "peak": 0.5,
    "peak_spread": 1.5,
}
SCALER = {"observed": "scaler", "same_optimizer": True}
DIVIDED = {**CLIPPED, "norm_spread": 3.0, "norm": 9.0, "shrunk": 2.0**16}
UNCLEARED = {**LOOP, "looks": 9, "uncleared": 9}
# Each code, the events that show it, and a change of the last one after which it does
# not show.
SHOWN = [
    ("GS112", [CLIPPED], {"written": 2}),
    ("GS112", [CLIPPED], {"looks": 6}),
    ("GS112", [CLIPPED], {"norm_spread": 1.02}),
    ("GS112", [CLIPPED], {"norm": 2.0**10 + 1.0}),
    ("GS112", [CLIPPED], {"norm": 0.0, "scale": 0.0}),
    ("GS113", [DIVIDED], {"shrunk": 2.0**14}),
    ("GS113", [DIVIDED], {"shrunk": 2.0**18}),
    ("GS113", [DIVIDED], {"norm_spread": 1.0}),
    ("GS114", [{**LOOP, "unscaled": 3}], {"unscaled": 2}),
    ("GS114", [{**LOOP, "unscaled": 3}], {"looks": 6}),
    ("GS115", [{**LOOP, "direct_steps": 1}], {"direct_steps": 0}),
    ("GS104", [{**LOOP, "late_backward": 1}], {"late_backward": 0}),
    ("GS116", [UNCLEARED], {"looks": 8, "uncleared": 8}),
    ("GS116", [UNCLEARED], {"uncleared": 8}),
    ("GS116", [UNCLEARED], {"renewed": 1}),
    ("GS122", [{**UNCLEARED, "renewed": 1}], {"renewed": 0}),
    ("GS122", [{**LOOP, "looks": 8, "uncleared": 5}], {"uncleared": 4}),
    ("GS113", [{**LOOP, "divided_again": 2}], {"divided_again": 1}),
    ("GS122", [{**LOOP, "repeated_updates": 3}], {"repeated_updates": 2}),
    ("GS104", [{**UNCLEARED, "renewed": 1, "late_backward": 2}], {"late_backward": 0}),
    ("GS122", [{**LOOP, "looks": 8, "uncleared": 5}], {"uncleared": 8}),
    ("GS117", [{**LOOP, "cleared_early": 3}], {"cleared_early": 2}),
    ("GS117", [{**LOOP, "written": 3, "peak": 0.0}], {"peak": 1e-9}),
    ("GS118", [SCALER, SCALER], {"same_optimizer": False}),
    ("GS119", [{"observed": "missing", "names": ["a"]}], {"names": []}),
    ("GS120", [{"observed": "setup", "float16_params": 1}], {"float16_params": 0}),
    ("GS121", [{"observed": "setup", "float16": False}], {"float16": True}),
    ("GS123", [{"observed": "end", "unused_losses": 1}], {"unused_losses": 0}),
]


def words(code, seen):
    """Return what a misuse is, in words."""
    return MISUSES[code].texts(seen)[0]


@pytest.mark.parametrize(("code", "events", "change"), SHOWN)
def test_a_wrong_use_is_shown_by_its_observations(code, events, change):
    seen = observed(*events)
    assert list(seen.misused()) == [code]
    row = MISUSES[code]
    evidence = row.evidence(seen)
    assert seen.since[row.kind] == 1
    assert all(row.texts(seen))
    assert set(filterfalse(is_silent, evidence)) <= WORDED


@pytest.mark.parametrize(("code", "events", "change"), SHOWN)
def test_a_wrong_use_is_not_shown_by_a_little_less(code, events, change):
    *before, last = events
    assert code not in observed(*before, {**last, **change}).misused()


def test_every_wrong_use_is_shown_above():
    assert {code for code, _, _ in SHOWN} == set(MISUSES)


def test_a_second_scaler_may_continue_a_checkpoint():
    assert list(observed(SCALER).misused()) == []


def test_parameters_without_an_optimizer_are_listed_up_to_three():
    names = ["a", "b", "c", "d"]
    missing = {"observed": "missing", "names": names, "count": 40}
    assert (
        words("GS119", observed(missing))
        == "40 parameters have gradients and are in no optimizer: a, b, c, ..."
    )


def test_a_single_parameter_is_written_in_the_singular():
    missing = {"observed": "missing", "names": ["a"]}
    setup = {"observed": "setup", "float16_params": 1}
    seen = observed(missing, setup)
    assert words("GS119", seen) == (
        "1 parameter has a gradient and is in no optimizer: a"
    )
    assert words("GS120", seen) == (
        "1 trainable parameter is float16, without float32 copies"
    )


def test_gradients_that_were_never_cleared_are_reported_at_the_end_of_a_short_run():
    seen = observed({**LOOP, "looks": 6, "uncleared": 6})
    assert (list(seen.misused()), list(seen.misused(ended=True))) == ([], ["GS116"])


@pytest.mark.parametrize(
    ("flushed", "unreached", "amax", "is_flushed"),
    [
        (["head"], [], 1.0, True),
        ([], ["head"], 1.0, False),
        ([], [], 1.0, None),
        (["top"], ["head"], 1.0, False),
        (["top"], ["head"], 0.0, True),
        (["top"], [], 1.0, True),
        ([], ["head"], 0.0, None),
    ],
)
def test_a_layer_is_flushed_by_a_cast_or_was_0_before_it(
    flushed, unreached, amax, is_flushed
):
    casts = {"observed": "casts", "flushed": flushed, "unreached": unreached}
    assert observed(casts).is_flushed("head", amax) is is_flushed


def test_a_target_is_of_the_batch():
    target = {**PLACE, "direction": "forward", "module": None, "operation": ""}
    place = place_of(1, {**target, "tensor": "target", "was_float16": True})
    assert (place.given, place.was_float16) == (True, True)
    assert place.said == "a target of the loss: 3 of 4,096 inf"


def test_the_last_counts_of_the_loop_are_those_that_hold():
    assert (
        list(observed({**LOOP, "unscaled": 3}, {**LOOP, "unscaled": 0}).misused()) == []
    )


# --- Files of any origin --------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, 1, 6])
    | st.floats()
    | st.sampled_from(["", "a", "nan"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.just("instead"), inner)
    ),
    max_leaves=3,
)
KEYS = (
    *("found", "direction", "module", "tensor", "kind", "count", "elements", "peak"),
    *("pattern", "loss_finite", "looks", "written", "uncleared", "unscaled", "norm"),
    *("cleared_early", "late_backward", "direct_steps", "scale", "norm_spread"),
    *("peak_spread", "missing", "missing_count", "float16_params", "float16_param"),
    *("float16", "dtype", "first_peak", "rates", "largest", "buffer", "beyond_rate"),
    *("unused_losses", "same_optimizer"),
)
EVENTS = st.dictionaries(st.sampled_from(KEYS), VALUES).flatmap(
    lambda data: st.sampled_from(
        ["loop", "setup", "weights", "scaler", "end", None, 7]
    ).map(lambda kind: {**data, "observed": kind})
)


@given(st.lists(EVENTS, max_size=4), st.sampled_from([BAD, LOST]))
def test_an_observation_of_any_content_is_judged_without_an_error(events, bad):
    judge = Judge()
    for event in events:
        judge.observe(3, event)
    records = [GOOD, GOOD, *[bad._replace(scale=2.0**-n) for n in range(14)]]
    for step, record in enumerate(records, start=1):
        for finding in judge.see(record._replace(step=step)).findings:
            finding.text()
    for finding in judge.end():
        finding.text()


@pytest.mark.parametrize(
    "rates", [["0.1"], [None], [math.nan], [10**400], "0.1", [[0.1]]]
)
def test_a_learning_rate_that_is_no_number_is_not_evidence(rates):
    seen = observed({**WEIGHTS, "rates": rates}).of_episode(episode(1, LOST))
    assert "rate" not in seen
    assert seen["at_rate"] == ""


def test_a_number_that_is_none_counts_as_0():
    for number in (math.inf, math.nan, 10**400, "3", None):
        assert list(observed({**LOOP, "direct_steps": number}).misused()) == []
