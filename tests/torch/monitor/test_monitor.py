"""A scaler judges its steps as their rows arrive, and reports the findings."""

import gc
import json
import logging
import math

import pytest
import torch
from torch import nn

from gradscale import HopelessRun
from gradscale.runfile import open_run
from gradscale.torch import GradScaler, optim
from gradscale.torch.locate import module_hooks
from tests.torch.training import INF, NAN, parameter, planted


def train(scaler, steps, *, nan_from=math.inf):
    """Train a small model whose loss is NaN from some step on."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        x = torch.full((8, 4), NAN if step >= nan_from else 1.0)
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


@pytest.fixture
def logged(caplog):
    """Return the text that the scaler has logged so far."""
    caplog.set_level(logging.INFO, "gradscale")
    return lambda: "\n".join(caplog.messages)


def codes(text):
    """Return the codes of the findings in a log."""
    return [line.split()[0] for line in text.splitlines() if line[:2] == "GS"]


# The scale grows after 2000 steps and falls back; twice in the first run.
@pytest.mark.parametrize(("exponent", "steps"), [(24, 5000), (32, 2500)])
def test_a_healthy_run_prints_exactly_one_line(exponent, steps, logged):
    scaler, param = GradScaler("cpu", init_scale=2.0**exponent), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1e-6, fused=True)
    for step in range(steps):
        optimizer.zero_grad()
        # A loss scale of 2**15 is the largest that fits, with a little noise.
        fits = scaler.get_scale() <= 2.0 ** (15 + (step % 7 == 0))
        scaler.scale(planted(param, 1.0 if fits else INF)).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.close()
    [line] = logged().splitlines()
    skips = exponent - 15
    expected = f"GS001 calibrated: S 2^{exponent} -> 2^15 after {skips} skips"
    assert expected in line


@pytest.mark.parametrize("nan_from", [97, 98, 99, 100])
def test_a_loss_that_stays_nan_stops_the_run_within_sixteen_steps(
    logged, tmp_path, nan_from
):
    scaler = GradScaler("cpu", guard="raise")
    with pytest.raises(HopelessRun, match="lower scale can help") as caught:
        train(scaler, 200, nan_from=nan_from)
    assert caught.value.code == "GS203"
    assert scaler.last.step - nan_from < 16
    assert scaler.get_scale() == 2.0**16
    [bundle] = tmp_path.glob("gradscale-bundle-*")
    assert f"bundle {bundle}" in str(caught.value)
    names = {path.name for path in bundle.iterdir()}
    assert names == {
        "finding.json",
        "steps.json",
        "scaler.json",
        "versions.json",
        "manifest.json",
    }
    steps = json.loads((bundle / "steps.json").read_text())
    # Earlier if the module hooks have observed a location by then.
    assert [step["step"] for step in steps][-1] - nan_from in (7, 8, 9)
    assert not steps[-1]["loss_finite"]
    assert "none" in json.loads((bundle / "manifest.json").read_text())["user data"]
    # The error has the text.
    assert codes(logged()) == []


def test_losses_and_gradients_that_fail_by_turns_stop_the_run_within_sixteen_steps():
    param = parameter(2)
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = GradScaler("cpu", guard="raise")

    def run():
        for step in range(1, 100):
            optimizer.zero_grad()
            bad = (step >= 30) * (1 + step % 2)
            loss = planted(param, INF if bad else 1.0)
            scaler.scale(loss * NAN if bad == 2 else loss).backward()
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(HopelessRun, match="in 5 of 10 steps") as caught:
        run()
    assert caught.value.code == "GS203"
    assert scaler.last.step - 30 < 16


def test_by_default_a_hopeless_run_is_only_reported_and_the_scale_is_torchs(
    logged, tmp_path
):
    ours, theirs = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    train(ours, 116, nan_from=100)
    train(theirs, 116, nan_from=100)
    assert ours.get_scale() == theirs.get_scale() < 2.0**16
    assert codes(logged()).count("GS203") == 1
    assert list(tmp_path.glob("gradscale-bundle-*")) == []


def test_every_step_is_in_the_run_file_with_its_loss(tmp_path):
    path = tmp_path / "run.gs"
    scaler = GradScaler("cpu", record=path, guard="report")
    train(scaler, 40, nan_from=30)
    scaler.close()
    with open_run(path) as run:
        rows = list(run.steps())
        events = [event.code for event in run.events()]
    assert [row.step for row in rows] == list(range(1, 41))
    assert [row.verdict for row in rows[:29]] == ["GS000"] * 29
    assert {row.verdict for row in rows[29:]} == {"GS203"}
    assert all(math.isfinite(row.loss) for row in rows[:29])
    assert all(math.isnan(row.loss) for row in rows[29:])
    assert "GS203" in events


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_run_of_a_few_steps_is_recorded_whole(tmp_path, steps):
    scaler = GradScaler("cpu", record=tmp_path / "run.gs")
    train(scaler, steps)
    scaler.close()
    with open_run(tmp_path / "run.gs") as run:
        assert [row.step for row in run.steps()] == list(range(1, steps + 1))


def test_close_judges_the_last_steps_without_a_run_file_too():
    scaler = GradScaler("cpu")
    train(scaler, 7)
    assert len(scaler._monitor._run.records) == 4
    scaler.close()
    assert len(scaler._monitor._run.records) == 7


class Block(nn.Module):
    """A layer that goes wrong after a while, in one direction."""

    def __init__(self, bad):
        super().__init__()
        self.layer, self.bad, self.calls = nn.Linear(8, 8), bad, 0

    def forward(self, x):
        y = self.layer(x).tanh()
        self.calls += 1
        if self.calls > 20 and self.bad == "forward":
            y = y * INF
        if self.calls > 20 and self.bad == "backward":
            # Finite, and its derivative is 0 / 0.
            y = y + torch.sqrt((y * 0.0).abs())
        return x + y


@pytest.mark.parametrize("place", [0, 13, 23])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("named", [True, False])
def test_the_one_poisoned_layer_of_24_is_named(place, direction, named, logged):
    torch.manual_seed(0)
    bad = [direction if i == place else None for i in range(24)]
    net = nn.Sequential(*map(Block, bad))
    optimizer = optim.AdamW(net.parameters())
    scaler = GradScaler("cpu", model=net if named else None)
    for _ in range(32):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(4, 8)).square().mean()).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    scaler.close()
    assert f"  where  {place}\n" in logged()
    assert f": {direction} of {place} (Block)" in logged()


def test_a_healthy_twin_names_no_layer(logged):
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(None) for _ in range(24)))
    optimizer = optim.AdamW(net.parameters())
    scaler = GradScaler("cpu", model=net)
    for _ in range(32):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(4, 8)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    # The model is float32.
    assert codes(logged()) == []
    assert not scaler._monitor.module_hooks.enabled


def test_diagnose_replays_the_batch_that_failed():
    net = nn.Sequential(*(Block("backward" if i == 2 else None) for i in range(4)))
    for block in net:
        block.calls = 100
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler, x = GradScaler("cpu", model=net), torch.randn(4, 8)
    scaler.scale(net(x).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    seen = scaler.diagnose(lambda: net(x).square().mean())
    assert (seen.direction, seen.module, seen.operation) == ("backward", "2", "sqrt")


def test_without_a_log_handler_a_finding_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda logger: False)
    train(GradScaler("cpu"), 116, nan_from=100)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "gradscale GS203 step 107: the loss is NaN before scaling" in printed.err


def failing(scaler, model, steps=12):
    """Train a model on batches that are not finite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        scaler.scale(model(torch.full((1, 4), NAN)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def test_a_scaler_that_is_gone_leaves_no_hooks_behind():
    scaler, model = GradScaler("cpu"), train(GradScaler("cpu"), 1)
    failing(scaler, model)
    assert scaler._monitor.module_hooks.enabled
    assert model._forward_hooks
    del scaler
    gc.collect()
    assert not model._forward_hooks


def test_a_failure_of_the_module_hooks_is_reported_once(monkeypatch, logged):
    def fail(tensor):
        raise LookupError("no statistics")

    monkeypatch.setattr(module_hooks, "device_stats_of", fail)
    scaler, model = GradScaler("cpu"), train(GradScaler("cpu"), 1)
    failing(scaler, model, steps=20)
    assert logged().count("LookupError: no statistics") == 1
    assert not scaler._monitor.module_hooks.enabled
    assert not model._forward_hooks


def test_hooks_that_cannot_be_registered_are_reported_once(monkeypatch, logged):
    model = train(GradScaler("cpu"), 1)
    scaler = GradScaler("cpu", model=model)
    monkeypatch.setattr(model, "register_forward_hook", None)
    failing(scaler, model, steps=20)
    assert logged().count("TypeError: 'NoneType' object is not callable") == 1
    assert not model._forward_pre_hooks


def test_a_second_trouble_has_a_place_of_its_own(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", record=tmp_path / "run.gs")
    for step in range(1, 61):
        optimizer.zero_grad()
        bad = step in range(11, 21) or step in range(41, 51)
        batch = torch.full((2, 4), NAN if bad else 1.0)
        scaler.scale(model(batch).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.close()
    with open_run(tmp_path / "run.gs") as run:
        places = [event.step for event in run.events() if "direction" in event.data]
    assert [step // 30 for step in places] == [0, 1]


def bundled(folder, name):
    return json.loads((folder / name).read_text())


def test_a_bundle_is_written_on_request_and_lists_its_contents(tmp_path):
    scaler = GradScaler("cpu")
    train(scaler, 30, nan_from=20)
    folder = scaler.write_bundle(tmp_path)
    assert folder.parent == tmp_path
    assert bundled(folder, "finding.json")["code"] == "GS203"
    # The row of step 28 was copied then, and read two updates later.
    assert [step["step"] for step in bundled(folder, "steps.json")][-1] == 28
    names = {path.name for path in folder.iterdir()} - {"manifest.json"}
    manifest = bundled(folder, "manifest.json")
    assert manifest.keys() == names | {"user data", "run file"}
    assert manifest["user data"].startswith("none")
    assert scaler.write_bundle(tmp_path) != folder


def test_a_batch_is_in_a_bundle_only_if_it_was_given(tmp_path):
    scaler, batch = GradScaler("cpu"), {"x": torch.arange(3)}
    train(scaler, 5)
    folder = scaler.write_bundle(tmp_path, batch=batch)
    kept = torch.load(folder / "batch.pt", weights_only=True)
    assert torch.equal(kept["x"], batch["x"])
    assert "batch.pt" in bundled(folder, "manifest.json")["user data"]
    assert not (folder / "finding.json").exists()


def test_a_bundle_that_cannot_be_written_leaves_nothing(tmp_path):
    scaler = GradScaler("cpu")
    train(scaler, 5)
    with pytest.raises(Exception, match="pickle"):
        scaler.write_bundle(tmp_path, batch=lambda: None)
    assert list(tmp_path.iterdir()) == []
