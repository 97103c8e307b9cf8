"""Samples, peaks and weights of single tensors in the run file of a scaler."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from gradscale import HopelessRun
from gradscale.diagnosis import diagnose_run
from gradscale.recording.recorder import Recorder
from gradscale.runfile import open_run
from gradscale.torch import GradScaler, optim, watch
from gradscale.torch.monitor.evidence import WeightCheck, weights_of
from tests.torch.training import INF, NAN, planted

# One element of each fate at the scale of 4 that the tests use: zero, lost, kept.
GRADIENT = (0.0, 2.0**-30, 2.0**-20, 1.0)


class Twig(nn.Module):
    """A parameter inside a module inside a module."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.ones(4))

    def forward(self, gradient):
        return planted(self.inner.weight, gradient)


def unscaled(scaler, optimizer, model):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)


def clipped(scaler, optimizer, model):
    scaler.clip_grad_norm_(optimizer, 1e-3)
    scaler.step(optimizer)


def clipped_bare(scaler, optimizer, model):
    scaler.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)


def stepped(scaler, optimizer, model):
    scaler.step(optimizer)


OPTIMIZERS = {
    "own": lambda params: optim.AdamW(params, lr=1e-3),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "flag": lambda params: torch.optim.SGD(params, lr=1e-3),
}


def run(path, gradients, way=stepped, optimizer="fused", model=None, **options):
    """Train on these gradients one after the other, and record it."""
    model = Twig() if model is None else model
    chosen = OPTIMIZERS[optimizer](model.parameters())
    scaler = GradScaler("cpu", init_scale=4.0, record=path, **options)
    for gradient in gradients:
        chosen.zero_grad()
        scaler.scale(model(gradient)).backward()
        way(scaler, chosen, model)
        scaler.update()
    scaler.close()
    return scaler


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", [stepped, unscaled, clipped, clipped_bare])
def test_the_gradients_that_backward_left_are_sampled(tmp_path, way, optimizer):
    run(tmp_path / "run.gs", [GRADIENT] * 3, way, optimizer)
    with open_run(tmp_path / "run.gs") as file:
        assert file.sampled_steps() == [1, 2]
        [row] = file.samples(2)
    assert (row.tensor, row.sample.total) == ("inner.weight", 4)
    assert (row.sample.zeros, row.sample.below) == (1, 1)
    # 4 * 2**-20 and 4 * 1; bins begin at 2**-24.
    assert [place - 24 for place, n in enumerate(row.sample.histogram) if n] == [-18, 2]


@pytest.mark.parametrize("way", [stepped, clipped, unscaled])
def test_a_sampled_step_has_the_peak_of_each_tensor(tmp_path, way):
    run(tmp_path / "run.gs", [GRADIENT] * 3, way)
    with open_run(tmp_path / "run.gs") as file:
        assert file.peak_steps() == [1, 2]
        assert file.peaks(2) == {"inner.weight": 4.0}


def test_a_step_that_was_skipped_has_the_peak_of_each_tensor(tmp_path):
    run(tmp_path / "run.gs", [GRADIENT] * 4 + [INF, GRADIENT, NAN, GRADIENT])
    with open_run(tmp_path / "run.gs") as file:
        assert file.peaks(5) == {"inner.weight": INF}
        assert math.isnan(file.peaks(7)["inner.weight"])


def test_two_clips_of_bare_parameters_are_one_sample(tmp_path):
    def twice(scaler, optimizer, model):
        scaler.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.clip_grad_norm_(model.parameters(), 1e-4)
        scaler.step(optimizer)

    run(tmp_path / "run.gs", [GRADIENT] * 3, twice)
    with open_run(tmp_path / "run.gs") as file:
        [row] = file.samples(1)
    assert (row.sample.total, row.sample.zeros) == (4, 1)


def test_steps_of_two_optimizers_are_one_sample(tmp_path):
    models = nn.ModuleDict({"left": Twig(), "right": Twig()})
    first, second = (torch.optim.SGD(m.parameters(), 0.1) for m in models.values())
    scaler = GradScaler("cpu", init_scale=4.0, record=tmp_path / "run.gs")
    for _ in range(3):
        for model in models.values():
            scaler.scale(model(GRADIENT)).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    scaler.close()
    with open_run(tmp_path / "run.gs") as file:
        names = {row.tensor for row in file.samples(1)}
    assert names == {"left.inner.weight", "right.inner.weight"}


def test_an_abandoned_step_is_not_sampled_and_its_successor_is(tmp_path):
    model = Twig()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = GradScaler("cpu", init_scale=4.0, record=tmp_path / "run.gs")
    scaler.scale(model(64.0)).backward()
    scaler.unscale_(optimizer)
    scaler.reset()
    optimizer.zero_grad()
    scaler.scale(model(1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.close()
    with open_run(tmp_path / "run.gs") as file:
        assert file.peaks(1) == {"inner.weight": 4.0}
        [row] = file.samples(1)
    assert row.sample.total == 4


def test_a_resumed_run_samples_at_the_steps_of_the_whole_run(tmp_path):
    before = run(tmp_path / "first.gs", [GRADIENT] * 97)
    model = Twig()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = GradScaler("cpu", record=tmp_path / "second.gs")
    scaler.load_state_dict(before.state_dict())
    for _ in range(6):
        scaler.scale(model(GRADIENT)).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.close()
    with open_run(tmp_path / "second.gs") as file:
        assert [row.step for row in file.steps()] == [98, 99, 100, 101, 102, 103]
        assert file.sampled_steps() == [100]


def test_the_distance_of_samples_can_be_chosen(tmp_path):
    recorder = Recorder(tmp_path / "run.gs", sample_every=3)
    run(recorder, [GRADIENT] * 8)
    with open_run(tmp_path / "run.gs") as file:
        assert file.sampled_steps() == [1, 2, 3, 6]


def test_a_scale_that_loses_gradients_is_found(tmp_path):
    scattered = (2.0**-30, 2.0**-31, 2.0**-29, 1.0)
    run(tmp_path / "run.gs", [scattered] * 8)
    run(tmp_path / "twin.gs", [(2.0**-20, 2.0**-21, 2.0**-19, 1.0)] * 8)
    with open_run(tmp_path / "run.gs") as file:
        [event] = [event for event in file.events() if event.code == "GS209"]
        assert "about 75 % of the gradient elements" in event.data["what"]
    with open_run(tmp_path / "twin.gs") as file:
        assert list(file.events()) == []


def test_without_a_run_file_or_sinks_nothing_is_sampled(monkeypatch):
    sampled = []
    monkeypatch.setattr(
        "gradscale.torch.underflow.meter.Meter.sample",
        lambda *given: sampled.append(given),
    )
    run(None, [GRADIENT] * 3)
    assert sampled == []


def test_sinks_get_the_share_that_is_lost():
    class Sink:
        def see(self, record, judged):
            heard.append((record.step, record.lost))

    heard = []
    run(None, [GRADIENT] * 5, sinks=[Sink()])
    assert heard == [(1, 1 / 3), (2, 1 / 3), (3, None), (4, 1 / 3), (5, None)]


# --- weights ---------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def ruined(scaler, at, spoil, steps=12):
    """Train a net, one weight of which is spoilt before a step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        if step == at:
            with torch.no_grad():
                spoil(model)
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.close()


def one_weight_is_nan(model):
    model[2].weight[0, 1] = NAN


def one_weight_is_infinite(model):
    model[0].bias[2] = INF


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (one_weight_is_nan, "2.weight"),
        (one_weight_is_infinite, "0.bias"),
    ],
)
def test_a_weight_that_is_not_finite_is_named(tmp_path, spoil, name):
    ruined(GradScaler("cpu", record=tmp_path / "run.gs"), 5, spoil)
    with open_run(tmp_path / "run.gs") as file:
        verdicts = [row.verdict for row in file.steps()]
        found = [event for event in file.events() if event.code == "GS207"]
    assert verdicts == ["GS000"] * 4 + ["GS207"] * 8
    assert found[0].where == name
    assert found[0].data["step"] == 5


def test_a_run_with_a_ruined_weight_is_stopped_at_once():
    with pytest.raises(HopelessRun, match=r"2\.weight") as caught:
        ruined(GradScaler("cpu", guard="raise"), 5, one_weight_is_nan)
    assert caught.value.code == "GS207"


def test_a_loss_that_is_not_finite_over_finite_weights_is_no_finding_on_weights(
    tmp_path,
):
    def spoil(model):
        model.register_forward_hook(lambda module, inputs, output: output * INF)

    ruined(GradScaler("cpu", record=tmp_path / "run.gs"), 5, spoil)
    with open_run(tmp_path / "run.gs") as file:
        verdicts = [row.verdict for row in file.steps()]
    assert verdicts == ["GS000"] * 4 + ["GS203"] * 8


def test_weights_of_any_kind_are_checked_or_ignored():
    spoilt = torch.tensor([1.0, NAN])
    weights = {
        "f32": spoilt,
        "f16": spoilt.half(),
        "f64": spoilt.double(),
        "complex": torch.complex(spoilt, torch.zeros(2)),
        "conjugated": torch.complex(spoilt, torch.zeros(2)).conj(),
        "empty": torch.empty(0),
        "integer": torch.arange(2),
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "lazy": nn.LazyLinear(2).weight,
        "sound": torch.ones(2),
    }
    bad = WeightCheck(weights.items()).not_finite()
    assert sorted(bad) == ["complex", "conjugated", "f16", "f32", "f64"]


def test_the_largest_finite_weight_is_named():
    weights = {"a": torch.tensor([1.0, -9.0]), "b": torch.tensor([NAN, 2.0])}
    assert WeightCheck(weights.items()).peak() == (9.0, "a")
    assert WeightCheck([("b", weights["b"])]).peak() == (0.0, "")


def test_buffers_are_checked_apart_from_weights():
    bad = torch.tensor([1.0, INF])
    check = WeightCheck([("a", torch.ones(2))], [("mean", bad), ("n", torch.arange(2))])
    assert (check.not_finite(), check.bad_buffers()) == ([], ["mean"])
    assert check.peak() == (1.0, "a")


def look_of(path):
    """Return the last look at the weights that a run file has."""
    with open_run(path) as file:
        looks = [e.data for e in file.events() if e.data.get("observed") == "weights"]
    return looks[-1]


def test_running_statistics_that_a_batch_has_ruined_are_the_cause(tmp_path):
    def poison(model):
        model.eval()
        model[1].running_mean.fill_(NAN)

    ruined(GradScaler("cpu", record=tmp_path / "run.gs"), 5, poison, steps=20)
    assert look_of(tmp_path / "run.gs")["buffer"] == "1.running_mean"
    with open_run(tmp_path / "run.gs") as file:
        [finding] = [f for f in diagnose_run(file).serious if f.code == "GS203"]
    assert (finding.cause, finding.where) == ("weights-written", "1.running_mean")


@pytest.mark.parametrize(
    ("rate", "cause"), [(30.0, "learning-rate"), (1e-3, "loss-op")]
)
def test_weights_that_have_grown_since_the_first_step_blame_the_learning_rate(
    tmp_path, rate, cause
):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    options = {"init_scale": 2.0**8, "model": model, "record": tmp_path / "run.gs"}
    scaler = GradScaler("cpu", **options)
    for step in range(1, 21):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(torch.full((8, 4), 10.0))
            # Well, the loss fails at the same step.
            loss = out.square().mean() * (INF if step >= 5 and rate < 1.0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.close()
    look = look_of(tmp_path / "run.gs")
    assert look["rates"] == [rate]
    assert (look["peak"] >= 8.0 * look["first_peak"]) is (rate == 30.0)
    with open_run(tmp_path / "run.gs") as file:
        [finding] = [f for f in diagnose_run(file).serious if f.code == "GS203"]
    assert finding.cause == cause


def test_a_weight_beyond_the_reach_of_an_adaptive_optimizer_was_written(tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", model=model, record=tmp_path / "run.gs")
    for step in range(1, 21):
        if step == 5:
            with torch.no_grad():
                model.weight.fill_(3e38)
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(8, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.close()
    look = look_of(tmp_path / "run.gs")
    assert (look["beyond_rate"], look["largest"]) == (True, "weight")
    with open_run(tmp_path / "run.gs") as file:
        [finding] = [f for f in diagnose_run(file).serious if f.code == "GS203"]
    assert (finding.cause, finding.where) == ("weights-written", "weight")


def test_a_mask_and_running_statistics_are_no_weights(tmp_path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()
            self.register_buffer("mask", torch.tensor([0.0, -INF]))

        def forward(self, x):
            return self.inner(x)

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", guard="raise", record=tmp_path / "run.gs")
    for step in range(1, 31):
        optimizer.zero_grad()
        x = torch.randn(8, 4) * (NAN if step == 21 else 1.0)
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.close()
    with open_run(tmp_path / "run.gs") as file:
        assert {row.verdict for row in file.steps()} == {"GS000", "GS203"}


def test_a_weight_of_the_first_of_two_optimizers_is_found(tmp_path):
    spoilt, sound = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in (spoilt, sound)]
    scaler = GradScaler("cpu", record=tmp_path / "run.gs")
    for step in range(1, 16):
        if step == 8:
            with torch.no_grad():
                spoilt.fill_(NAN)
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale((spoilt + sound).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    scaler.close()
    with open_run(tmp_path / "run.gs") as file:
        assert [row.verdict for row in file.steps()][7:] == ["GS207"] * 8


def test_the_weights_of_a_model_that_is_gone_are_not_checked(tmp_path):
    scaler = GradScaler("cpu")
    for fold in range(3):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # All bad steps are judged before the weights are overwritten.
        for step in range(18):
            bad = fold == 0 and 3 < step < 8
            optimizer.zero_grad()
            x = torch.full((1, 2), NAN if bad or step == 8 else 1.0)
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        if fold == 0:
            gone = weakref.ref(model)
            with torch.no_grad():
                model.weight.fill_(NAN)
            del model, optimizer
            scaler._monitor.module_hooks.disable()
    gc.collect()
    assert gone() is None
    assert all(record.weights_finite for record in scaler._monitor._run.records)


def test_weights_are_those_of_the_model_and_of_the_optimizers():
    model, other = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    model.weight.requires_grad = False
    optimizer = torch.optim.SGD([model.bias, other], lr=0.1)
    names, weights = zip(*weights_of(model, [optimizer]), strict=True)
    assert names == ("weight", "bias", "param_groups[0]['params'][1]")
    assert weights[0] is model.weight
    assert [name for name, _ in weights_of(None, [optimizer])] == [
        "param_groups[0]['params'][0]",
        "param_groups[0]['params'][1]",
    ]


# --- foreign scalers, activations --------------------------------------------------


def test_a_watched_scaler_is_sampled_too(tmp_path):
    model = Twig()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watch(scaler, record=tmp_path / "run.gs"):
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(GRADIENT)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    with open_run(tmp_path / "run.gs") as file:
        assert file.sampled_steps() == [1, 2, 4]
        [row] = file.samples(4)
    assert (row.tensor, row.sample.zeros, row.sample.below) == ("inner.weight", 1, 1)


def test_gradients_of_activations_are_counted_on_request(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0, record=tmp_path / "run.gs")
    scaler.meter.watch_activations(model, dtypes=[torch.float32])
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.close()
    with open_run(tmp_path / "run.gs") as file:
        samples = {row.tensor: row.sample for row in file.samples(2)}
    # The gradient of a sum is the scale itself, 2**2.
    assert samples["1 (output)"].histogram[24 + 2] == 1
    assert samples["0 (output)"].total == 2


def test_two_models_with_the_same_names_are_kept_apart(tmp_path):
    models = [nn.Sequential(nn.Linear(1, 1, bias=False)) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    scaler = GradScaler("cpu", init_scale=4.0, record=tmp_path / "run.gs")
    for step in range(1, 6):
        # Beyond what is harmless: then all are written down.
        peaks = (INF if step == 5 else 2.0, 2.0**120)
        for model, peak in zip(models, peaks, strict=True):
            model.zero_grad()
            scaler.scale(planted(model[0].weight, peak)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    scaler.close()
    with open_run(tmp_path / "run.gs") as file:
        assert file.peaks(4) == {"0.weight": 8.0, "0.weight #2": 2.0**122}
        assert {row.tensor for row in file.samples(4)} == file.peaks(4).keys()
        assert file.peaks(5) == {"0.weight": INF, "0.weight #2": 2.0**122}


def test_rows_reach_the_file_in_blocks_and_the_last_ones_at_the_end(tmp_path):
    recorder = Recorder(tmp_path / "run.gs")
    model = Twig()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0, record=recorder)
    for _ in range(60):
        optimizer.zero_grad()
        scaler.scale(model(1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    recorder.writer.flush()
    with open_run(tmp_path / "run.gs") as file:
        # Those of the last copy, which is read two updates later, are missing.
        assert [row.step for row in file.steps()] == list(range(1, 57))
    scaler.close()
    with open_run(tmp_path / "run.gs") as file:
        assert [row.step for row in file.steps()] == list(range(1, 61))


def test_watching_leaves_sparse_gradients_as_they_are(tmp_path):
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watch(scaler, record=tmp_path / "run.gs"):
        scaler.scale(table(torch.tensor([1, 1, 2])).sum()).backward()
        before = table.weight.grad
        scaler._scale.fill_(4.0)
        scaler.unscale_(optimizer)
        assert table.weight.grad is before
        scaler.step(optimizer)
        scaler.update()
