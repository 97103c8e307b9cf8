"""watch() records a scaler of another library and changes nothing."""

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale.errors import ConfigError
from gradscale.judge.judge import Judge
from gradscale.runfile import open_run
from gradscale.torch import GradScaler, Recorder, watch
from gradscale.torch.attach.watch import _gradients_of, named_peaks
from gradscale.torch.device_state import update as updating
from gradscale.torch.grads import stats
from gradscale.torch.grads.stats import read
from tests.torch.attach.loops import await_end, net, train

SETTINGS = {"init_scale": 2.0**10, "growth_interval": 4}


def rows(path):
    """Return step, scale, applied and verdict of each row."""
    with open_run(path) as run:
        return [row[:1] + row[2:5] for row in run.steps()]


def bits(model):
    """Return all weights as bytes."""
    return [param.detach().numpy().tobytes() for param in model.parameters()]


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_weights_losses_and_scales_are_the_same_as_without_watch(
    tmp_path, fused, unscale
):
    how = {"fused": fused, "unscale": unscale, "bad": (3, 9)}
    alone, seen = net(), net()
    torch.manual_seed(1)
    expected = train(torch.amp.GradScaler("cpu", **SETTINGS), alone, **how)
    torch.manual_seed(1)
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    with watch(scaler, seen, record=tmp_path / "run.gs"):
        got = train(scaler, seen, **how)
    assert got == expected
    assert bits(seen) == bits(alone)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_scales_skips_and_verdicts_are_recorded(tmp_path, fused):
    model, scaler = net(), torch.amp.GradScaler("cpu", **SETTINGS)
    with watch(scaler, model, record=tmp_path / "run.gs"):
        train(scaler, model, fused=fused, steps=7, bad=(6,))
    scales = [1024.0, 1024.0, 1024.0, 1024.0, 2048.0, 2048.0, 1024.0]
    seen = rows(tmp_path / "run.gs")
    assert [row[:3] for row in seen] == [
        (step, scale, step != 6) for step, scale in enumerate(scales, start=1)
    ]
    assert [row[3] for row in seen].count("GS000") == 6


def test_the_peaks_of_a_skipped_step_are_recorded_by_name(tmp_path):
    model, scaler = net(), torch.amp.GradScaler("cpu", **SETTINGS)
    with watch(scaler, model, record=tmp_path / "run.gs"):
        train(scaler, model, steps=6, bad=(4,))
    with open_run(tmp_path / "run.gs") as run:
        assert run.peak_steps() == [4]
        peaks = run.peaks(4)
        assert [event.where for event in run.events()] == ["2.weight"]
    assert list(peaks) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [name for name, peak in peaks.items() if peak == math.inf] == ["2.weight"]


def watched_steps(path, factors):
    """Take a step for each pair of factors of the parameters a and b."""
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.ones(1)) for name in ("a", "b")}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with watch(scaler, model, record=path):
        for a, b in factors:
            optimizer.zero_grad()
            scaler.scale((model["a"] * a + model["b"] * b).sum()).backward()
            scaler.step(optimizer)
            scaler.update()


def test_the_peaks_of_a_step_are_its_own(tmp_path):
    watched_steps(tmp_path / "run.gs", [(1, 1), (3, math.nan), (5, 1), (7, 1)])
    with open_run(tmp_path / "run.gs") as run:
        assert [row.applied for row in run.steps()] == [True, False, True, True]
        assert run.peak_steps() == [2]
        assert run.peaks(2)["a"] == 6.0
        first = next(iter(run.events()))
    assert (first.step, first.where) == (2, "b")


@pytest.mark.parametrize(("factor", "nan"), [(math.inf, False), (math.nan, True)])
def test_a_nan_among_the_gradients_reaches_the_judge(
    tmp_path, monkeypatch, factor, nan
):
    judged, judge = [], Judge.see

    def see(self, record, culprits=()):
        judged.append((record.nan, list(culprits)))
        return judge(self, record, culprits)

    monkeypatch.setattr(Judge, "see", see)
    watched_steps(tmp_path / "run.gs", [(1, factor)])
    assert judged == [(nan, ["b"])]


def test_the_largest_magnitude_is_that_of_the_scaled_gradients(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with watch(scaler, record=tmp_path / "run.gs"):
        scaler.scale((weight * torch.tensor([3.0, -5.0])).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    with open_run(tmp_path / "run.gs") as run:
        assert [row.amax for row in run.steps()] == [1280.0]


def test_a_loss_that_is_not_finite_is_distinguished_from_an_overflow(tmp_path):
    model, scaler = net(), torch.amp.GradScaler("cpu", **SETTINGS)
    with watch(scaler, model, record=tmp_path / "run.gs"):
        train(scaler, model, steps=8, dead=(4,))
    verdicts = [row[3] for row in rows(tmp_path / "run.gs")]
    assert [n for n, v in enumerate(verdicts, start=1) if v == "GS203"] == [4]


def test_no_host_sync_is_added(tmp_path, monkeypatch):
    # The operations of an accelerator: those of a CPU read host memory.
    monkeypatch.setattr(updating, "_ops_for", updating._on_device)
    monkeypatch.setattr(
        stats, "read_on_host", lambda grads, norm, _: stats.read_on_device(grads, norm)
    )

    class Reads(TorchDispatchMode):
        """Counts the operators by which a host waits for a device."""

        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += "_local_scalar_dense" in str(func)
            return func(*args, **(kwargs or {}))

    def reads(watched):
        model, scaler = net(), torch.amp.GradScaler("cpu", **SETTINGS)
        watching = watch(scaler, record=tmp_path / "run.gs") if watched else None
        with Reads() as mode:
            train(scaler, model, fused=True)
        if watching is not None:
            watching.detach()
        return mode.count

    assert reads(watched=True) == reads(watched=False)


def test_detach_restores_the_scaler(tmp_path):
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    before = set(vars(scaler))
    watching = watch(scaler, record=tmp_path / "run.gs")
    train(scaler, net(), steps=3)
    watching.detach()
    train(scaler, net(), steps=3)
    assert set(vars(scaler)) == before
    assert len(rows(tmp_path / "run.gs")) == 3


def test_a_copy_of_a_watched_scaler_is_not_watched(tmp_path):
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    with watch(scaler, record=tmp_path / "run.gs"):
        train(scaler, net(), steps=3)
        for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
            assert twin.get_scale() == scaler.get_scale()
            train(twin, net(), steps=2)
    assert len(rows(tmp_path / "run.gs")) == 3


def test_a_deleted_scaler_leaves_a_complete_file(tmp_path):
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    watch(scaler, record=tmp_path / "run.gs")
    train(scaler, net(), steps=5)
    del scaler
    await_end(tmp_path / "run.gs")
    assert len(rows(tmp_path / "run.gs")) == 5
    with open_run(tmp_path / "run.gs") as run:
        assert run.meta["end"]["state"] == "closed"


def test_an_object_with_a_scaler_attribute_is_accepted(tmp_path):
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    with watch(SimpleNamespace(scaler=scaler), record=tmp_path / "run.gs"):
        train(scaler, net(), steps=3)
    assert len(rows(tmp_path / "run.gs")) == 3


def test_the_file_names_the_class_of_the_scaler(tmp_path):
    scaler = ShardedGradScaler("cpu", init_scale=2.0**7)
    with (
        watch(scaler, record=tmp_path / "run.gs"),
        pytest.raises(ValueError, match="process group"),
    ):
        train(scaler, net(), steps=1)
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    with watch(scaler, record=tmp_path / "run.gs"):
        train(scaler, net(), steps=1)
    with open_run(tmp_path / "run.gs") as run:
        assert run.meta["watched"] == "torch.amp.grad_scaler.GradScaler"
        assert run.meta["policy"]["growth_interval"] == 4


def test_a_disabled_scaler_is_not_recorded(tmp_path):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with watch(scaler, record=tmp_path / "run.gs"):
        train(scaler, net(), steps=2)
    assert list(tmp_path.iterdir()) == []


def test_two_optimizers_are_one_row(tmp_path):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watch(scaler, record=tmp_path / "run.gs"):
        scaler.scale(weights[0].sum() * 2.0 + weights[1].sum() * 8.0).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    with open_run(tmp_path / "run.gs") as run:
        assert [(row.applied, row.amax) for row in run.steps()] == [(True, 32.0)]


def test_setting_the_scale_is_not_a_step(tmp_path):
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    with watch(scaler, record=tmp_path / "run.gs"):
        train(scaler, net(), steps=1)
        scaler.update(64.0)
        train(scaler, net(), steps=1)
    assert [row[1] for row in rows(tmp_path / "run.gs")] == [1024.0, 64.0]


def test_a_gradscale_scaler_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Pass record= to the scaler"):
        watch(GradScaler("cpu"), record=tmp_path / "run.gs")


def test_an_object_that_is_no_scaler_is_refused_by_its_type(tmp_path):
    with pytest.raises(ConfigError, match=r"given a Linear.*Pass the scaler itself"):
        watch(torch.nn.Linear(1, 1), record=tmp_path / "run.gs")


def test_losses_of_one_step_are_recorded_as_their_sum(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watch(scaler, record=tmp_path / "run.gs"):
        for loss in scaler.scale([weight.sum(), weight.sum() * 3.0]):
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
    with open_run(tmp_path / "run.gs") as run:
        assert [row.loss for row in run.steps()] == [8.0]


def test_an_overflow_right_after_a_growth_is_a_probe(tmp_path):
    model, scaler = net(), torch.amp.GradScaler("cpu", **SETTINGS)
    with watch(scaler, model, record=tmp_path / "run.gs"):
        train(scaler, model, steps=45, bad=(41,))
    verdicts = [row[3] for row in rows(tmp_path / "run.gs")]
    assert [(n, v) for n, v in enumerate(verdicts, 1) if v != "GS000"] == [
        (41, "GS003")
    ]


def test_gradients_that_were_unscaled_before_are_not_read_as_scaled(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with watch(scaler, record=tmp_path / "run.gs"):
        scaler.step(optimizer)
        scaler.update()
    with open_run(tmp_path / "run.gs") as run:
        assert [(row.applied, row.amax) for row in run.steps()] == [(True, 0.0)]


# --- reading gradients ---------------------------------------------------------------


def stats_of(**grads):
    """Return the statistics of these gradients, None without any, and the peaks."""
    model = torch.nn.Module()
    for name, grad in grads.items():
        shape = () if grad is None else grad.shape
        dtype = torch.float32 if grad is None else grad.dtype
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = grad
        model.register_parameter(name, param)
    gradients = _gradients_of(torch.optim.SGD(model.parameters(), lr=0.1))
    if not gradients.tensors:
        return None, {}
    stats = read(gradients, torch.device("cpu"))
    return stats, named_peaks([(stats, (model,))])


def test_the_largest_magnitude_of_all_and_of_each_gradient_is_read():
    grads = {"a": torch.tensor([1.0, -5.0]), "b": torch.tensor([math.inf, 0.0])}
    stats, named = stats_of(**grads)
    assert stats.amax().item() == math.inf
    assert named == {"a": 5.0, "b": math.inf}


def test_a_nan_gives_a_nan_peak():
    grads = {"a": torch.tensor([math.inf, math.nan]), "b": torch.tensor([2.0])}
    stats, named = stats_of(**grads)
    assert math.isnan(stats.amax().item())
    assert math.isnan(named["a"])
    assert named["b"] == 2.0


def test_real_and_imaginary_parts_count_each():
    grad = torch.tensor([3.0 - 7.0j], dtype=torch.complex64)
    assert stats_of(a=grad)[0].amax().item() == 7.0


def test_a_sparse_gradient_is_not_coalesced():
    grad = torch.sparse_coo_tensor([[1, 1]], [2.0, math.inf], (4,))
    assert stats_of(a=grad)[1] == {"a": math.inf}
    assert not grad.is_coalesced()


def test_gradients_of_different_dtypes_have_one_peak():
    half = torch.tensor([math.inf], dtype=torch.float16)
    stats, named = stats_of(a=torch.tensor([9.0], dtype=torch.float64), b=half)
    assert stats.amax().item() == math.inf
    assert named == {"b": math.inf}


def test_missing_and_empty_gradients_are_ignored():
    assert stats_of(a=None, b=torch.zeros(0)) == (None, {})


def test_nothing_is_written_to_the_gradients():
    grad = torch.tensor([1.0, math.inf])
    version = grad._version
    stats_of(a=grad)
    assert grad._version == version


@pytest.mark.parametrize("inside", [{1, 2, 3, 4, 5, 6}, {1, 2}, {3, 5}])
def test_steps_in_inference_mode_are_recorded(tmp_path, inside):
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(scaler, model, record=tmp_path / "run.gs"):
        for step in range(1, 7):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
            with torch.inference_mode(step in inside):
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
    with open_run(tmp_path / "run.gs") as run:
        assert [row.applied for row in run.steps()] == [True] * 6


def test_a_layer_that_underflows_is_known_to_the_live_judge(tmp_path, monkeypatch):
    seen, judge = [], Judge.see
    monkeypatch.setattr(
        Judge, "see", lambda *given: (seen.append(given[1]), judge(*given))[1]
    )
    model = torch.nn.ParameterDict({n: torch.zeros(256) for n in ("head", "tail")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    recorder = Recorder(tmp_path / "run.gs", sample_every=1)
    with watch(scaler, model, record=recorder):
        for _ in range(4):
            optimizer.zero_grad()
            loss = model["head"].sum() + 2.0**-26 * model["tail"].sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert {(record.lost, record.lost_layer) for record in seen} == {(0.5, "tail")}
