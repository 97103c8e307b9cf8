"""Eight devices: all take or leave out a step together, and agree with one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.jax.devices import (
    COUNT,
    GROUPS,
    LAYOUTS,
    LENGTHS,
    MAX_NORM,
    POLICY,
    SEATS,
    SOME,
    STEPS,
    bad_elements,
    expected_scales,
    finite_flags,
    run_alone,
)

ROOT = Path(__file__).parents[2]
EIGHT = f"--xla_force_host_platform_device_count={COUNT}"
# As parts of the norm, and of how far the weights have moved.
TOLERANCES = {
    # At most 136 + 128 squares are added one after the other, half a unit in the last
    # place for each, and the root halves what is lost.
    "norm": (136 + 128) / 4 * 2.0**-23,
    # Factors of 1 / scale, clip and learning rate, fused in another order: each of the
    # steps may round three times.
    "weights": STEPS * 3 * 2.0**-24,
}
HALVED = POLICY.init_scale / 2
SEAT = pytest.mark.parametrize("seat", SEATS)


def cases_of(group, folder):
    """Run the cases of a group on eight devices; return what they showed."""
    file = folder / f"{group}.json"
    # Appended: what the machine needs stays, and the last flag wins.
    flags = f"{os.environ.get('XLA_FLAGS', '')} {EIGHT}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.jax.devices", group, str(file)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    # A crash takes the cases after it along, and leaves those before.
    shown = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    lost = {"failed": f"the process ended with {done.returncode}:\n{done.stderr}"}
    return {name: shown.get(name, lost) for name in GROUPS[group]}


# One process after the other: eight devices keep few cores busy.
@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """Return what the cases of pmap showed."""
    return cases_of("replicas", tmp_path_factory.mktemp("devices"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Return what the cases of shard_map showed."""
    return cases_of("shards", tmp_path_factory.mktemp("devices"))


@pytest.fixture(scope="module")
def automatic(tmp_path_factory):
    """Return what the cases showed that leave the sharding to the compiler."""
    return cases_of("automatic", tmp_path_factory.mktemp("devices"))


def shown(cases, name):
    seen = cases[name]
    assert "failed" not in seen, seen["failed"]
    return seen


def distances(run, other):
    """Return how far two runs are apart: their norms, and each of their weights."""
    norms = np.array([run["norms"], other["norms"]])
    applied = norms[1] > 0.0
    apart = {"norm": np.max(np.abs(norms[0] - norms[1])[applied] / norms[1][applied])}
    for name, weights in other["weights"].items():
        there = np.array(weights)
        moved = np.abs(there - 0.5).max()
        apart[name] = np.abs(np.array(run["weights"][name]) - there).max() / moved
    return apart


def close(run, other):
    """Return True if two runs differ by no more than rounding."""
    apart = distances(run, other)
    return apart.pop("norm") <= TOLERANCES["norm"] and all(
        apart[name] <= TOLERANCES["weights"] for name in other["weights"]
    )


# --- the helpers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["table", "bias", "row", "big"])
def test_a_weight_that_is_off_is_not_close(name):
    run = run_alone(STEPS)
    off = (np.array(run["weights"][name]) * (1.0 + 2.0**-14)).tolist()
    assert not close({**run, "weights": {**run["weights"], name: off}}, run)


def test_a_norm_that_is_off_is_not_close():
    run = run_alone(STEPS)
    off = [norm * (1.0 + 2.0**-14) for norm in run["norms"]]
    assert not close({**run, "norms": off}, run)


def test_a_run_is_close_to_itself():
    assert close(run_alone(STEPS), run_alone(STEPS))


def test_the_run_on_one_device_is_that_of_the_reference():
    run = run_alone(STEPS)
    assert (run["scales"], run["applied"]) == (expected_scales(), finite_flags())


def test_the_run_meets_both_bounds():
    scales = run_alone(STEPS)["scales"]
    assert {min(scales), max(scales)} == {2.0**5, 2.0**12}


@pytest.mark.parametrize("steps", [SOME, STEPS])
def test_the_run_clips_some_of_its_steps(steps):
    run = run_alone(steps)
    assert 0 < sum(norm > MAX_NORM for norm in run["norms"]) < sum(run["applied"])


def test_a_gather_is_counted(automatic):
    assert shown(automatic, "gathering")["all-gather"] == 1


# --- pmap -----------------------------------------------------------------------------


@SEAT
@pytest.mark.parametrize("how", ["mean", "agreed"])
def test_an_overflow_on_one_replica_is_a_skip_on_all(replicas, how, seat):
    seen = shown(replicas, f"{how}-{seat}")
    assert seen["applied"] == [False] * COUNT
    assert seen["scale"] == [HALVED] * COUNT
    assert seen["weights"] == [0.5] * COUNT


@SEAT
def test_replicas_that_neither_reduce_nor_agree_drift_apart(replicas, seat):
    seen = shown(replicas, f"apart-{seat}")
    others = [other for other in SEATS if other != seat]
    assert seen["applied"] == [other != seat for other in SEATS]
    assert seen["scale"][seat] == HALVED
    assert {seen["scale"][other] for other in others} == {POLICY.init_scale}
    assert seen["weights"][seat] == 0.5
    assert all(seen["weights"][other] < 0.5 for other in others)


def test_all_replicas_have_the_scales_of_one_device(replicas):
    scales = shown(replicas, "run")["scales"]
    assert scales == [[scale] * COUNT for scale in expected_scales()]


def test_all_replicas_skip_the_steps_that_one_device_skips(replicas):
    applied = shown(replicas, "run")["applied"]
    assert applied == [[flag] * COUNT for flag in finite_flags()]


@SEAT
def test_a_replica_has_the_weights_of_one_device(replicas, seat):
    run = shown(replicas, "run")
    mine = {name: leaf[seat] for name, leaf in run["weights"].items()}
    norms = [norms[seat] for norms in run["norms"]]
    assert close({"norms": norms, "weights": mine}, run_alone(STEPS))


@pytest.mark.parametrize("name", ["table", "bias", "row", "big"])
def test_a_weight_is_the_same_on_all_replicas(replicas, name):
    weights = shown(replicas, "run")["weights"][name]
    assert weights == [weights[0]] * COUNT


def test_replicas_try_again_together(replicas):
    seen = shown(replicas, "retry")
    assert seen["retried"] == [2] * COUNT
    assert seen["applied"] == [True] * COUNT
    assert seen["scale"] == [2.0**8] * COUNT


def test_replicas_that_tried_again_take_the_exact_step(replicas):
    mean = (7 * 1.0 + 2.0**7) / COUNT
    assert shown(replicas, "retry")["weights"] == [1.0 - 0.5 * mean] * COUNT


# --- shard_map ------------------------------------------------------------------------


@SEAT
@pytest.mark.parametrize("how", ["tracked", "untracked"])
def test_an_overflow_in_one_shard_is_a_skip_on_all(shards, how, seat):
    seen = shown(shards, f"{how}-{seat}")
    assert seen["mine"] == [other != seat for other in SEATS]
    assert seen["applied"] is False
    assert seen["scale"] == HALVED
    assert seen["unchanged"]


RUN = pytest.mark.parametrize(
    ("name", "steps"), [("run-line", STEPS), ("run-line-gpu", SOME), ("run-grid", SOME)]
)


@RUN
def test_shards_have_the_scales_of_one_device(shards, name, steps):
    assert shown(shards, name)["scales"] == expected_scales()[:steps]


@RUN
def test_shards_skip_the_steps_that_one_device_skips(shards, name, steps):
    assert shown(shards, name)["applied"] == finite_flags()[:steps]


@RUN
def test_shards_have_the_norms_and_weights_of_one_device(shards, name, steps):
    assert close(shown(shards, name), run_alone(steps))


def test_shards_without_an_axis_name_are_refused_when_they_are_traced(shards):
    assert "require replication" in shown(shards, "alone")["error"]


@pytest.mark.parametrize("name", ["line", "grid"])
def test_every_sharded_array_is_donated(shards, name):
    seen = shown(shards, f"donation-{name}")
    assert seen["aliased"] == seen["deleted"] == seen["leaves"]


@pytest.mark.parametrize("how", ["tracked", "untracked"])
def test_shards_try_again_together(shards, how):
    seen = shown(shards, f"retry-{how}")
    assert (seen["retried"], seen["applied"], seen["scale"]) == (2, True, 2.0**8)


@pytest.mark.parametrize("how", ["tracked", "untracked"])
def test_shards_that_tried_again_take_the_exact_step(shards, how):
    weights = shown(shards, f"retry-{how}")["weights"]
    assert weights == [1.0 - 0.5 * (2.0**10 if s == 5 else 1.0) for s in SEATS]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_an_axis_that_is_left_to_the_compiler_is_not_gathered(shards, backend):
    found = shown(shards, f"partly-manual-{backend}")["collectives"]
    assert found.pop("all-reduce") > 0
    assert set(found.values()) == {0}


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_an_axis_that_is_left_to_the_compiler_is_read(shards, backend):
    seen = shown(shards, f"partly-manual-{backend}")
    norm = (1024 * 136 - 1 + 64) ** 0.5
    assert (seen["finite"], seen["amax"]) == (True, 8.0)
    assert seen["norm"] == pytest.approx(norm, rel=TOLERANCES["norm"])


# --- automatic sharding ---------------------------------------------------------------

LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
SHARDED = pytest.mark.parametrize("layout", ["first", "last", "both"])


@LAYOUT
def test_a_layout_has_the_scales_of_one_device(automatic, layout):
    scales = shown(automatic, f"run-{layout}")["scales"]
    assert scales == expected_scales()[: LENGTHS[layout]]


@LAYOUT
def test_a_layout_skips_the_steps_that_one_device_skips(automatic, layout):
    applied = shown(automatic, f"run-{layout}")["applied"]
    assert applied == finite_flags()[: LENGTHS[layout]]


@LAYOUT
def test_a_layout_has_the_norms_and_weights_of_one_device(automatic, layout):
    assert close(shown(automatic, f"run-{layout}"), run_alone(LENGTHS[layout]))


@LAYOUT
def test_every_array_of_a_layout_is_donated(automatic, layout):
    seen = shown(automatic, f"donation-{layout}")
    assert seen["aliased"] == seen["deleted"] == seen["leaves"]


@pytest.mark.parametrize(
    "name", ["observe-first", "observe-last", "observe-both", "update-both"]
)
def test_gradients_are_reduced_and_never_moved(automatic, name):
    found = shown(automatic, name)
    moved = ("all-gather", "all-to-all", "collective-permute")
    assert found["all-reduce"] > 0
    assert [found[name] for name in moved] == [0, 0, 0]


@SHARDED
def test_gradients_without_a_bad_element_are_finite(automatic, layout):
    assert shown(automatic, f"observe-{layout}")["finite"] is True


@pytest.mark.parametrize(("layout", "leaf", "word", "seat"), bad_elements())
def test_one_bad_element_in_one_shard_is_seen(automatic, layout, leaf, word, seat):
    seen = shown(automatic, f"{layout}-{leaf}-{word}-{seat}")
    assert len(seen["bad_shards"]) == 1
    assert seen["finite"] is False
    assert seen["culprits"] == [leaf]


MIXED = pytest.mark.parametrize("size", ["small", "large"])


@MIXED
@pytest.mark.parametrize("mesh", ["Auto", "Explicit"])
def test_arrays_of_one_shape_may_lie_in_several_ways(automatic, mesh, size):
    seen = shown(automatic, f"mixed-{mesh}-{size}")
    elements = {"small": 3 * 16 * 8, "large": 3 * 1024 * 136}[size]
    assert seen["applied"] is True
    assert seen["norm"] == pytest.approx(elements**0.5, rel=TOLERANCES["norm"])


@MIXED
@pytest.mark.parametrize("mesh", ["Auto", "Explicit"])
def test_arrays_of_one_shape_are_not_moved_to_be_read_together(automatic, mesh, size):
    found = shown(automatic, f"mixed-{mesh}-{size}")["collectives"]
    moved = ("all-gather", "all-to-all", "collective-permute")
    assert [found[name] for name in moved] == [0, 0, 0]
