"""A run that is stopped and resumed goes on as if it had not been stopped."""

from itertools import pairwise

import pytest

from tests.torch.parallel.launch import all_saw, seen_by
from tests.torch.parallel.resume_runs import (
    FOLLOWING,
    FROM_FOUR,
    FROM_TWO,
    KINDS,
    OFTEN,
    OVERFLOWS,
)

# bf16 gradients are rounded to 8 bits after they were summed in another order.
TOLERANCE = {"fsdp2-own-bf16": 2e-2}
OTHER_RANKS = 1e-4
IN_F16 = "fsdp2-own-f16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def on(folder):
    """Return a function that runs a module on some ranks, with what was kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSCALE_RESUME_FOLDER", str(folder))

        def launched(module, ranks, name):
            own = folder / name
            own.mkdir()
            return seen_by(f"tests.torch.parallel.{module}", ranks, own)

        yield launched


@pytest.fixture(scope="module")
def two(on):
    return on("resume_first_cases", 2, "two")


@pytest.fixture(scope="module")
def four(on, two):
    return on("resume_cases", 4, "four")


@pytest.fixture(scope="module")
def two_later(on, four):
    return on("resume_later_cases", 2, "two_later")


def decided(steps):
    """Return what all ranks must have in common, whatever their number."""
    names = ("applied", "verdict", "scaler", "counts")
    return [{name: step[name] for name in names} for step in steps]


def after(steps, name):
    """Return the steps that are compared after the last stop of a kind of run."""
    stop = KINDS[name].stops[-1]
    return steps[stop : stop + FOLLOWING]


@pytest.mark.parametrize(("name", "count"), [*zip(OFTEN, (25, 8), strict=True)])
def test_runs_are_stopped_at_random_steps_among_them_one_that_overflows(name, count):
    stops = OFTEN[name].stops
    assert len(stops) == count
    assert set(stops) & set(OVERFLOWS)


def nearly(weights, name):
    """Return weights whose gradients were summed in another order."""
    return pytest.approx(weights, abs=TOLERANCE.get(name, OTHER_RANKS))


def skipped(steps):
    return {i for i, step in enumerate(steps) if not step["applied"]}


@pytest.mark.parametrize("name", sorted(set(KINDS) - {IN_F16}))
def test_the_planted_overflows_and_no_other_steps_are_skipped(four, name):
    for seen in all_saw(four, name):
        assert skipped(seen["run"]) == {i for i in OVERFLOWS if i < KINDS[name].steps}


def test_f16_gradients_overflow_by_themselves_too(four):
    for seen in all_saw(four, IN_F16):
        assert skipped(seen["run"]) > {i for i in OVERFLOWS if i < KINDS[IN_F16].steps}


@pytest.mark.parametrize("name", KINDS)
def test_the_scale_moves_both_ways(four, name):
    for seen in all_saw(four, name):
        scales = [step["scaler"]["scale"] for step in seen["run"]]
        moves = [b > a for a, b in pairwise(scales) if b != a]
        assert set(moves) == {True, False}


@pytest.mark.parametrize("name", KINDS)
def test_the_state_of_the_scaler_is_the_same_on_all_ranks(four, name):
    ranks = [decided(seen["run"]) for seen in all_saw(four, name)]
    assert all(one == ranks[0] for one in ranks)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_goes_on_bit_for_bit_from_its_stop(four, name):
    for seen in all_saw(four, name):
        assert {int(stop) for stop in seen["again"]} == set(KINDS[name].stops)
        for stop, steps in seen["again"].items():
            assert steps == seen["run"][int(stop) : int(stop) + FOLLOWING]


@pytest.mark.parametrize("name", OFTEN)
def test_a_run_goes_on_bit_for_bit_from_each_of_many_stops(two, name):
    for seen in all_saw(two, name):
        assert skipped(seen["run"]) == set(OVERFLOWS)
        assert {int(stop) for stop in seen["again"]} == set(OFTEN[name].stops)
        for stop, steps in seen["again"].items():
            assert steps == seen["run"][int(stop) : int(stop) + FOLLOWING]


@pytest.mark.parametrize("name", FROM_TWO)
def test_other_processes_go_on_bit_for_bit(two, two_later, name):
    before, now = all_saw(two, name), all_saw(two_later, f"from-2-{name}")
    for seen, again in zip(before, now, strict=True):
        assert again["run"] == after(seen["run"], name)
        assert again["weights"] == seen["weights"]


@pytest.mark.parametrize("name", FROM_FOUR)
def test_two_ranks_go_on_from_four(four, two_later, name):
    before, now = all_saw(four, name), all_saw(two_later, f"from-4-{name}")
    for again in now:
        assert decided(again["run"]) == decided(after(before[0]["run"], name))
        assert again["weights"] == nearly(before[0]["weights"], name)


@pytest.mark.parametrize("name", FROM_TWO)
def test_four_ranks_go_on_from_two(two, four, name):
    before, now = all_saw(two, name), all_saw(four, f"from-2-{name}")
    for again in now:
        assert decided(again["run"]) == decided(after(before[0]["run"], name))
        assert again["weights"] == nearly(before[0]["weights"], name)


def test_a_run_stopped_between_two_parts_of_a_batch_goes_on_bit_for_bit(two):
    for seen in all_saw(two, "between-two-parts-of-a-batch"):
        assert not all(step["applied"] for step in seen["run"])
        assert seen["again"] == seen["run"]


@pytest.mark.parametrize(
    "name",
    ["object", "state-dict", "async", "into-torch", "from-torch", "disabled"],
)
def test_a_scaler_comes_back_from_a_distributed_checkpoint(two, name):
    for kept, read in all_saw(two, f"dcp-{name}"):
        assert read == kept


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cut-short", "CheckpointException"),
        ("bad-scale", "StateError: The checkpoint has scale=0.0, which is not"),
        ("newer", "StateError: The checkpoint has format 99."),
        ("foreign", "Missing key in checkpoint state_dict: scaler."),
        ("not-there", "CheckpointException"),
        (
            "into-static",
            "Missing key in checkpoint state_dict: scaler.gradscale.policy",
        ),
        ("into-none", "StateError: The checkpoint lacks init_scale, min_scale"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused_and_changes_nothing(
    two, name, words
):
    for seen in all_saw(two, f"dcp-{name}"):
        assert words in seen["error"]
        assert seen["after"] == seen["before"]
