"""The JAX examples, run as a user runs them, with few steps."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from gradscale.cli import app
from gradscale.runfile import open_run

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("jax_nnx", "jax_linen", "jax_equinox")
STEPS = 40


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs an example.

    A second run of the same example takes its compiled programs from disk: compiling
    takes two thirds of a run.
    """
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_LOG_COMPILES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def ended(name, *arguments):
        script = EXAMPLES / f"{name}.py"
        return subprocess.run(
            [sys.executable, script, "--steps", str(STEPS), *arguments],
            capture_output=True,
            text=True,
            env=env,
        )

    return ended


@pytest.fixture
def refused(monkeypatch, capsys):
    """Return a function that runs an example here, where it ends with an error."""

    def ended(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        with pytest.raises(SystemExit) as end:
            module(name).main()
        return end.value.code, capsys.readouterr().err

    return ended


def module(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def results_of(operation, jaxpr):
    """Return the dtypes that an operation gives in a traced function."""
    return set(re.findall(rf":(\w+)\[[^]]*\] = {operation}\b", str(jaxpr)))


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def done(run, name):
    return run(name, "--json")


@pytest.fixture(scope="module")
def figures(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_loss_on_held_out_text_falls(figures):
    assert figures["loss_after"] < 0.95 * figures["loss_before"]


def test_every_step_is_applied_or_skipped(figures):
    assert figures["applied"] + figures["skipped"] == STEPS


def test_every_skipped_step_is_seen_and_its_culprits_are_named(figures):
    assert len(figures["skips"]) == figures["skipped"] > 0
    assert all(skip["culprits"] for skip in figures["skips"])


def test_the_step_is_compiled_once(figures, done):
    assert done.stderr.count("Compiling jit(train_step)") == 1


def test_the_same_seed_prints_the_same_figures_as_text(run, name, figures):
    line = run(name).stdout.splitlines()[-1]
    assert line == (
        f"loss {figures['loss_before']:.2f} -> {figures['loss_after']:.2f}, "
        f"{figures['applied']} steps applied, {figures['skipped']} skipped, "
        f"scale 2^{np.log2(figures['scale']):g}"
    )


def test_no_steps_are_refused_with_the_remedy(refused, name):
    code, errors = refused(name, "--steps", "0")
    assert code == 2
    assert "--steps 0 trains nothing. Pass 1 or more." in errors


@pytest.mark.parametrize("name", ["jax_nnx"], indirect=True)
def test_a_scale_that_is_too_high_is_halved_until_it_fits(figures):
    first = [s["scale"] for s in figures["skips"] if s["verdict"] == "calibrating"]
    assert len(first) > 3
    assert first == [2.0 ** (24 - halvings) for halvings in range(len(first))]


@pytest.mark.parametrize("name", ["jax_equinox"], indirect=True)
def test_the_batch_that_is_not_finite_is_told_from_an_overflow(figures):
    verdicts = {skip["step"]: skip["verdict"] for skip in figures["skips"]}
    assert verdicts[STEPS // 2 + 1] == "forward_nonfinite"


@pytest.mark.parametrize("name", ["jax_linen"], indirect=True)
def test_a_nan_loss_in_the_first_step_of_a_train_state_is_not_calibrating(figures):
    first = figures["skips"][0]
    assert (first["step"], first["verdict"]) == (1, "forward_nonfinite")


@pytest.mark.parametrize("name", ["jax_linen"], indirect=True)
def test_batch_norm_keeps_its_statistics_on_a_skip(figures):
    # With NaN in them, the loss after training would be NaN.
    assert np.isfinite(figures["loss_after"])


def test_a_product_in_f32_would_be_found():
    traced = jax.make_jaxpr(jnp.dot)(jnp.ones(2), jnp.ones(2))
    assert results_of("dot_general", traced) == {"f32"}


def test_the_nnx_model_multiplies_in_f16_and_normalises_in_f32():
    example = module("jax_nnx")
    graph, state = nnx.split(example.Model(nnx.Rngs(0)))
    text = np.zeros((2, example.CONTEXT + 1), np.int32)
    traced = jax.make_jaxpr(
        jax.grad(lambda state: example.loss_of(nnx.merge(graph, state), text))
    )(state)
    assert results_of("dot_general", traced) == {"f16"}
    assert results_of("rsqrt", traced) == {"f32"}


def test_the_equinox_model_multiplies_in_f16_and_normalises_in_f32():
    example = module("jax_equinox")
    batch = np.ones((2, 128), np.float32), np.zeros(2, np.int32)
    model = example.Model(jax.random.key(0))
    traced = eqx.filter_make_jaxpr(eqx.filter_grad(example.loss_of))(model, batch)[0]
    assert results_of("dot_general", traced) == {"f16"}
    assert results_of("rsqrt", traced) == {"f32"}


def test_the_linen_model_multiplies_in_f16_and_normalises_in_f32():
    example = module("jax_linen")
    model, points = example.Model(), jnp.ones((4, 2))
    variables = model.init(jax.random.key(0), points, train=False)

    def total(params):
        applied = {**variables, "params": params}
        return model.apply(applied, points, train=True, mutable=["batch_stats"])[
            0
        ].sum()

    traced = jax.make_jaxpr(jax.grad(total))(variables["params"])
    assert results_of("dot_general", traced) == {"f16"}
    assert results_of("rsqrt", traced) == {"f32"}


# --- the recorded run -----------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(run, tmp_path_factory):
    """Return the file and the output of the recorded example."""
    file = tmp_path_factory.mktemp("recorded") / "run.gs"
    done = run("jax_recorded", "-o", str(file))
    assert done.returncode == 0, done.stderr
    return file, done


def test_every_step_of_the_recorded_run_is_in_its_file(recorded):
    with open_run(recorded[0]) as run:
        rows = list(run.steps())
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1].loss < rows[0].loss


def test_the_corrupt_batch_is_recorded_and_reported(recorded):
    file, done = recorded
    with open_run(file) as run:
        row = next(run.steps(after_step=STEPS // 2))
    assert (row.applied, row.verdict) == (False, "GS203")
    assert f"since  step {STEPS // 2 + 1}" in done.stderr


def test_the_recorded_run_ends_with_the_command_that_reads_it(recorded):
    file, done = recorded
    command = done.stdout.splitlines()[-1].partition("gradscale ")[2].split()
    assert command == ["report", str(file)]
    report = CliRunner().invoke(app, command)
    assert report.exit_code == 0
    assert f"{STEPS} steps" in report.stdout


def test_the_recorded_step_is_compiled_once(recorded):
    assert recorded[1].stderr.count("Compiling jit(train_step)") == 1


def test_the_recorded_model_multiplies_in_f16():
    example = module("jax_recorded")
    x = np.ones((2, 1), np.float32)
    params = example.init(jax.random.key(0))
    traced = jax.make_jaxpr(jax.grad(example.loss_of))(params, x, x)
    assert results_of("dot_general", traced) == {"f16"}


def test_an_existing_file_is_refused_with_the_remedy(refused, recorded):
    code, errors = refused("jax_recorded", "-o", str(recorded[0]))
    assert code == 2
    assert "exists. Delete it, or pass -o" in errors
