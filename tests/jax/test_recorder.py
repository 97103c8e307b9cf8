"""A JAX run is recorded: no row lost or doubled, the verdicts those of PyTorch."""

import functools
import json
import logging
import math
import os
import random
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from typer.testing import CliRunner

from gradscale import (
    ConfigError,
    DynamicScale,
    GradscaleWarning,
    OrderError,
    StateError,
)
from gradscale.cli import app
from gradscale.jax import MultiSteps, Recorder, last, loss_scaled, record_step
from gradscale.runfile import open_run
from gradscale.sinks import CallableSink
from gradscale.torch import GradScaler

POLICY = DynamicScale(init_scale=8.0, growth_interval=4)
PARAMS = {"head": jnp.ones(2), "tail": jnp.ones(3)}
# The gradients of a step in units of the scale: finite, inf or NaN in "tail".
FINE, OVERFLOWS, NAN = 1.0, math.inf, math.nan
TRACE = [FINE, FINE, OVERFLOWS, FINE, NAN, FINE, FINE, FINE, FINE, FINE, FINE]


def optimizer(**options):
    return loss_scaled(optax.sgd(0.1), POLICY, **options)


def scaled_grads(state, value):
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    grads["tail"] = grads["tail"].at[1].set(value)
    return jax.tree.map(lambda grad: grad * state.rule.scale, grads)


def rows_of(path):
    with open_run(path) as run:
        return [(row.step, row.scale, row.applied, row.verdict) for row in run.steps()]


def expected_rows(trace):
    """Return step, scale and applied of a trace, by the rule in plain Python."""
    optimizer_, rows = optimizer(), []
    state = optimizer_.init(PARAMS)
    for step, value in enumerate(trace, start=1):
        rows.append((step, float(state.rule.scale), math.isfinite(value)))
        _, state = optimizer_.update(scaled_grads(state, value), state, PARAMS)
    return rows


def on_host(recorder, trace, losses=None, *, donate=False):
    """Record a run outside jit; by default a loss is the number of its step."""
    optimizer_, losses = optimizer(), losses or map(float, range(len(trace)))

    @functools.partial(jax.jit, donate_argnums=(0,) if donate else ())
    def train_step(state, value):
        _, state = optimizer_.update(scaled_grads(state, value), state, PARAMS)
        return state

    state = optimizer_.init(PARAMS)
    for value, loss in zip(trace, losses, strict=True):
        state = train_step(state, value)
        recorder.step(last(state), params=PARAMS, loss=jnp.float32(loss))


def in_jit(recorder, trace, *, donate=False):
    """Record a run from inside jit."""
    optimizer_ = optimizer()

    @functools.partial(jax.jit, donate_argnums=(0,) if donate else ())
    def train_step(state, value, loss):
        _, state = optimizer_.update(scaled_grads(state, value), state, PARAMS)
        record_step(recorder, state, params=PARAMS, loss=loss)
        return state

    state = optimizer_.init(PARAMS)
    for number, value in enumerate(trace):
        state = train_step(state, value, float(number))


def in_scan(recorder, trace):
    """Record a run that is one computation."""
    optimizer_ = optimizer()

    def body(state, inputs):
        value, loss = inputs
        _, state = optimizer_.update(scaled_grads(state, value), state, PARAMS)
        record_step(recorder, state, params=PARAMS, loss=loss)
        return state, None

    inputs = jnp.array(trace), jnp.arange(len(trace), dtype=jnp.float32)
    jax.jit(lambda state: jax.lax.scan(body, state, inputs)[0])(optimizer_.init(PARAMS))


WAYS = {
    "host": on_host,
    "host, donated": functools.partial(on_host, donate=True),
    "jit": in_jit,
    "jit, donated": functools.partial(in_jit, donate=True),
    "scan": in_scan,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_update_has_one_row_with_its_own_facts(tmp_path, way):
    path = tmp_path / "run.gs"
    with Recorder(path, policy=POLICY) as recorder:
        WAYS[way](recorder, TRACE)
    assert [row[:3] for row in rows_of(path)] == expected_rows(TRACE)
    with open_run(path) as run:
        rows = list(run.steps())
        assert [row.loss for row in rows] == [float(n) for n in range(len(TRACE))]
        assert [row.amax is not None and math.isfinite(row.amax) for row in rows] == [
            math.isfinite(value) for value in TRACE
        ]
        assert run.meta["parameters"] == ["head", "tail"]
        assert run.meta["policy"]["growth_interval"] == 4
        assert run.meta["frameworks"]["jax"] == jax.__version__
        assert run.meta["end"]["state"] == "closed"


@pytest.mark.parametrize("way", ["host", "jit"])
def test_culprits_and_peaks_of_a_skipped_step_are_named(tmp_path, way):
    with Recorder(tmp_path / "run.gs") as recorder:
        WAYS[way](recorder, [FINE] * 2 + [OVERFLOWS])
    with open_run(tmp_path / "run.gs") as run:
        assert [(event.step, event.where) for event in run.events()] == [(3, "tail")]
        assert run.peaks(3) == {"head": 8.0, "tail": math.inf}
        # The first steps are sampled as well.
        assert run.peak_steps() == [1, 2, 3]


def test_without_params_no_tensor_is_named(tmp_path):
    state = optimizer().init(PARAMS)
    _, state = optimizer().update(scaled_grads(state, OVERFLOWS), state, PARAMS)
    with Recorder(tmp_path / "run.gs") as recorder:
        recorder.step(last(state))
    with open_run(tmp_path / "run.gs") as run:
        assert run.tensors == ()
        assert run.last_step == 1


@pytest.mark.parametrize("inside", [False, True])
def test_accumulation_has_one_row_an_update(tmp_path, inside):
    optimizer_ = MultiSteps(optimizer(), every_k_schedule=3)

    @jax.jit
    def train_step(state, value):
        grads = scaled_grads(last_state(state), value)
        _, state = optimizer_.update(grads, state, PARAMS)
        if inside:
            record_step(recorder, state, params=PARAMS)
        return state

    def last_state(state):
        return state.inner_opt_state

    with Recorder(tmp_path / "run.gs") as recorder:
        state = optimizer_.init(PARAMS)
        for value in [FINE] * 4 + [NAN] + [FINE] * 6:
            state = train_step(state, value)
            if not inside:
                recorder.step(last(state), params=PARAMS)
    assert [row[:3] for row in rows_of(tmp_path / "run.gs")] == [
        (1, 8.0, True),
        (2, 8.0, False),
        (3, 4.0, True),
    ]


def test_a_run_that_goes_back_replaces_the_steps_after_it(tmp_path):
    optimizer_, states = optimizer(), [optimizer().init(PARAMS)]
    with Recorder(tmp_path / "run.gs") as recorder:
        for _ in range(5):
            grads = scaled_grads(states[-1], FINE)
            states.append(optimizer_.update(grads, states[-1], PARAMS)[1])
            recorder.step(last(states[-1]))
        state = states[2]
        _, state = optimizer_.update(scaled_grads(state, NAN), state, PARAMS)
        recorder.step(last(state))
    rows = rows_of(tmp_path / "run.gs")
    assert [(step, applied) for step, _, applied, _ in rows] == [
        (1, True),
        (2, True),
        (3, False),
    ]


def test_a_run_goes_on_in_its_file(tmp_path):
    path, state = tmp_path / "run.gs", optimizer().init(PARAMS)
    for resume in (False, True):
        with Recorder(path, resume=resume) as recorder:
            for _ in range(3):
                grads = scaled_grads(state, FINE)
                _, state = optimizer().update(grads, state, PARAMS)
                recorder.step(last(state))
    assert [row[0] for row in rows_of(path)] == [1, 2, 3, 4, 5, 6]


# --- the same verdicts as PyTorch -----------------------------------------------------


class Kept:
    """A sink that keeps records, verdicts and the codes of findings."""

    def __init__(self):
        self.records, self.verdicts, self.found = [], [], []

    def see(self, record, judgement):
        self.records.append(record)
        self.verdicts.append(judgement.verdict)
        self.found += [(record.step, finding.code) for finding in judgement.findings]


# What both frameworks know of every step. PyTorch computes a norm on request only.
SHARED = ("step", "scale", "applied", "finite", "loss_finite", "calibrated", "grown")
SHARED += ("floor_steps", "nan", "loss", "read", "norm_finite")


def shared(sink):
    return [tuple(getattr(record, name) for name in SHARED) for record in sink.records]


def torch_run(policy, trace):
    """Return what a sink of PyTorch's scaler receives for (gradient, loss) pairs."""
    sink = Kept()
    weight = torch.nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD([weight], lr=0.0)
    scaler = GradScaler("cpu", policy=policy, sinks=[sink])
    for grad, loss in trace:
        sgd.zero_grad()
        factor = torch.tensor([1.0, grad, 1.0])
        # The loss is a constant beside the gradient that is asked for.
        scaler.scale((weight * factor).nan_to_num().sum() + loss).backward()
        weight.grad = factor * scaler.get_scale()
        scaler.step(sgd)
        scaler.update()
    scaler.close()
    return sink


def jax_run(policy, trace):
    """Return what a sink of the recorder receives for (gradient, loss) pairs."""
    sink, params = Kept(), jnp.zeros(3)
    optimizer_ = loss_scaled(optax.sgd(0.0), policy)

    @jax.jit
    def train_step(state, grad, loss):
        grads = jnp.array([1.0, grad, 1.0]) * state.rule.scale
        _, state = optimizer_.update(grads, state, params)
        return state, last(state)

    with Recorder(None, sinks=[sink], quiet=True) as recorder:
        state = optimizer_.init(params)
        for grad, loss in trace:
            state, step = train_step(state, grad, loss)
            recorder.step(step, loss=loss)
    return sink


def random_trace(rng, interval):
    """Return (gradient, loss) pairs: trouble of several kinds, each then made up for.

    The scale comes back to its start each time: PyTorch's underflow meter, which JAX
    has not, finds nothing to report.
    """
    trace = []
    while len(trace) < 80:
        grad, loss = rng.choice(
            [(math.inf, 2.0), (math.nan, 2.0), (math.nan, math.nan)]
        )
        length = rng.choice([1, 2, 5, 15])
        trace += [(grad, loss)] * length + [(0.5, 2.0)] * (length * interval)
    return trace


@pytest.mark.filterwarnings("ignore::gradscale.GradscaleWarning")
# Each interval, and each kind of trouble for 15 steps.
@pytest.mark.parametrize("seed", [0, 4, 5])
def test_records_verdicts_and_findings_are_those_of_pytorch(seed):
    rng = random.Random(seed)
    policy = DynamicScale(growth_interval=rng.choice([1, 2, 3]))
    trace = random_trace(rng, policy.growth_interval)
    ours, theirs = jax_run(policy, trace), torch_run(policy, trace)
    assert list(map(str, shared(ours))) == list(map(str, shared(theirs)))
    assert ours.verdicts == theirs.verdicts
    # PyTorch also looks at weights and at the calls of the loop.
    numeric = [
        [found for found in run.found if not found[1].startswith("GS1")]
        for run in (ours, theirs)
    ]
    assert numeric[0] == numeric[1]


# --- what is printed, and what the commands make of the file --------------------------


@pytest.fixture
def sick(tmp_path, capfd, monkeypatch):
    """Return the file and the stderr of a run whose loss becomes NaN for good."""
    # pytest sets log handlers of its own.
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda logger: False)
    path = tmp_path / "run.gs"
    trace = [FINE] * 40 + [NAN] * 20
    with Recorder(path, policy=POLICY) as recorder:
        on_host(recorder, trace, losses=trace)
    return path, capfd.readouterr().err


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_a_finding_is_printed_once(sick):
    assert sick[1].count("GS203 step") == 1


@pytest.mark.parametrize("name", ["run.gs", None])
def test_a_quiet_recorder_prints_nothing(tmp_path, caplog, name):
    sink = Kept()
    path = None if name is None else tmp_path / name
    with Recorder(path, sinks=[sink], quiet=True) as recorder:
        on_host(recorder, [FINE] * 40 + [NAN] * 20)
    assert sink.found
    assert caplog.records == []


def test_doctor_finds_what_was_printed(sick):
    done = call("doctor", sick[0], "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["verdict"]) == (2, "collapse")
    assert "GS203" in [finding["code"] for finding in told["findings"]]


def test_report_counts_every_step(sick):
    done = call("report", sick[0])
    assert done.exit_code == 0
    assert "60" in done.stdout


def test_tail_shows_the_end_of_a_run(sick):
    done = call("tail", sick[0], "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout.splitlines()[-1])


# --- errors ---------------------------------------------------------------------------


def test_a_folder_that_does_not_exist_is_refused_by_the_constructor(tmp_path):
    with pytest.raises(StateError, match=r"none does not exist.*GS308"):
        Recorder(tmp_path / "none" / "run.gs")


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    Recorder(tmp_path / "run.gs").close()
    with Recorder(tmp_path / "run.gs", quiet=True) as recorder:
        on_host(recorder, [FINE])
    assert recorder.path == tmp_path / "run.2.gs"


def test_a_resumed_run_that_goes_back_keeps_the_earlier_file(tmp_path):
    for resume in (False, True):
        with Recorder(tmp_path / "run.gs", resume=resume) as recorder:
            on_host(recorder, [FINE] * (3 if resume else 5))
    lengths = []
    for name in ("run.gs", "run.2.gs"):
        with open_run(tmp_path / name) as run:
            lengths.append(run.last_step)
    assert lengths == [3, 5]


def test_a_sink_that_raises_does_not_stop_the_training(tmp_path, capsys):
    def send(step, figures):
        raise ConnectionError("no server")

    path = tmp_path / "run.gs"
    with Recorder(path, sinks=[CallableSink(send)], quiet=True) as recorder:
        on_host(recorder, [FINE] * 3)
    with open_run(path) as run:
        assert run.last_step == 3


def test_a_file_that_vanishes_does_not_stop_the_training(tmp_path):
    recorder = Recorder(tmp_path / "run.gs")
    os.unlink(tmp_path / "run.gs")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_host(recorder, TRACE)
        recorder.close()
    assert [warning.category for warning in caught] == [GradscaleWarning]
    assert caught[0].message.code == "GS308"


def test_the_error_that_ends_the_block_is_the_end_of_the_run(tmp_path):
    def train():
        with Recorder(tmp_path / "run.gs") as recorder:
            on_host(recorder, [FINE])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    with open_run(tmp_path / "run.gs") as run:
        assert run.last_step == 1
        assert (run.meta["end"]["state"], run.meta["end"]["error"]) == (
            "error",
            "ZeroDivisionError",
        )


def test_a_step_inside_jit_is_refused_with_the_remedy():
    recorder, state = Recorder(None), optimizer().init(PARAMS)
    with pytest.raises(OrderError, match=r"inside jit.*record_step\(recorder"):
        jax.jit(lambda state: recorder.step(last(state)))(state)


def test_a_loss_that_is_no_scalar_is_refused():
    state = optimizer().init(PARAMS)
    with pytest.raises(ConfigError, match=r"shape \(2,\).*mean"):
        Recorder(None).step(last(state), loss=jnp.ones(2))
    with pytest.raises(ConfigError, match=r"shape \(2,\).*mean"):
        record_step(Recorder(None), state, loss=jnp.ones(2))


def test_parameters_of_another_model_are_refused():
    state = optimizer().init(PARAMS)
    with pytest.raises(ConfigError, match=r"params has 1 leaves.*2 gradients"):
        Recorder(None).step(last(state), params={"other": jnp.ones(2)})


def test_an_ensemble_is_refused():
    states = jax.vmap(lambda _: optimizer().init(PARAMS))(jnp.arange(3))
    with pytest.raises(StateError, match=r"ensemble of shape \(3,\)"):
        Recorder(None).step(last(states))


def test_steps_in_flight_are_written_at_the_end_of_the_process(tmp_path):
    script = f"""
        import jax.numpy as jnp, optax
        from gradscale import DynamicScale
        from gradscale.jax import Recorder, last, loss_scaled

        optimizer = loss_scaled(optax.sgd(0.1), DynamicScale())
        params = jnp.ones(2)
        recorder = Recorder({os.fspath(tmp_path / "run.gs")!r})
        _, state = optimizer.update(params, optimizer.init(params), params)
        recorder.step(last(state))
    """
    run_script(script)
    with open_run(tmp_path / "run.gs") as run:
        assert (run.last_step, run.meta["end"]["state"]) == (1, "exit")


# --- several devices ------------------------------------------------------------------

SHARDED = """
    import sys, jax, jax.numpy as jnp, numpy as np, optax
    from jax.sharding import NamedSharding, PartitionSpec as P
    from gradscale import DynamicScale
    from gradscale.jax import Recorder, loss_scaled, record_step

    mesh = jax.make_mesh((4,), ("data",))
    params = {"w": jnp.ones(8)}
    values = [1.0, 1.0, float("nan"), 1.0, 1.0]

    def run(path, axis_name, wrap):
        policy = DynamicScale(init_scale=8.0)
        optimizer = loss_scaled(optax.sgd(0.1), policy, axis_name=axis_name)
        with Recorder(path, policy=policy) as recorder:
            def step(state, batch):
                grads = {"w": batch * state.rule.scale}
                _, state = optimizer.update(grads, state, params)
                record_step(recorder, state, params=params)
                return state
            step = jax.jit(wrap(step))
            state = optimizer.init(params)
            for value in values:
                batch = jnp.ones(8).at[5].set(value)
                batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
                state = step(state, batch)

    def mapped(step):
        params["w"] = jnp.ones(2)
        return jax.shard_map(
            step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )

    run(sys.argv[1] + "/jit.gs", None, lambda step: step)
    run(sys.argv[1] + "/shard_map.gs", "data", mapped)
"""


def run_script(script, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    flags = f"{os.environ.get('XLA_FLAGS', '')} "
    flags += "--xla_force_host_platform_device_count=4"
    run_script(SHARDED, os.fspath(folder), XLA_FLAGS=flags)
    return folder


@pytest.mark.parametrize("name", ["jit", "shard_map"])
def test_four_devices_write_one_row_an_update(sharded, name):
    rows = rows_of(sharded / f"{name}.gs")
    assert [row[:3] for row in rows] == [
        (1, 8.0, True),
        (2, 8.0, True),
        (3, 8.0, False),
        (4, 4.0, True),
        (5, 4.0, True),
    ]
