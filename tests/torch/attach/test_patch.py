"""Patched torch classes return recording scalers that behave like torch's."""

import gc
import json
import pickle
import warnings

import pytest
import torch

from gradscale.errors import ScaleCollapsed
from gradscale.runfile import open_run
from gradscale.torch import GradScaler
from gradscale.torch.attach.patch import install
from tests.torch.attach.loops import await_rows, net, train

ORIGINAL = torch.amp.GradScaler.__init__
SETTINGS = {"init_scale": 2.0**10, "growth_interval": 4}


@pytest.fixture
def place(tmp_path):
    """Install the patch for one test; return the folder of the run file."""
    (tmp_path / "notes").touch()
    environment = {
        "GRADSCALE_RUN_FILE": str(tmp_path / "run.gs"),
        "GRADSCALE_RUN_NOTES": str(tmp_path / "notes"),
    }
    undo = install(environment)
    yield tmp_path
    undo()


def torchs_own(*args, **kwargs):
    """Return an unpatched torch scaler."""
    scaler = object.__new__(torch.amp.GradScaler)
    ORIGINAL(scaler, *args, **kwargs)
    return scaler


def noted(folder):
    """Return the lines of the notes."""
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_losses_scales_and_weights_are_torchs_bit_by_bit(tmp_path, fused, unscale):
    how = {"fused": fused, "unscale": unscale, "bad": (3, 9), "dead": (6,)}
    ends = []
    for installed in (False, True):
        notes = tmp_path / "notes"
        notes.touch()
        names = ("GRADSCALE_RUN_FILE", "GRADSCALE_RUN_NOTES")
        paths = dict(zip(names, map(str, (tmp_path / "run.gs", notes)), strict=True))
        undo = install(paths) if installed else None
        model = net()
        torch.manual_seed(1)
        scaler = torch.amp.GradScaler("cpu", **SETTINGS)
        assert isinstance(scaler, GradScaler) == installed
        seen = train(scaler, model, **how)
        weights = [p.detach().numpy().tobytes() for p in model.parameters()]
        ends.append((repr(seen), weights))
        if undo is not None:
            undo()
    assert ends[0] == ends[1]


def test_a_deleted_scaler_leaves_a_complete_file(place):
    model = net()
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    train(scaler, model, steps=7, bad=(4,))
    del scaler
    await_rows(place / "run.gs", 7)
    with open_run(place / "run.gs") as run:
        assert [row.applied for row in run.steps()] == [n != 4 for n in range(1, 8)]
        # Open for a scaler that the script may make later.
        assert run.meta["end"]["state"] == "running"
        assert run.meta["parameters"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        named = [event for event in run.events() if "culprits" in event.data]
        assert [event.where for event in named] == ["2.weight"]


def test_a_run_of_one_step_is_recorded(place):
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    train(scaler, net(), steps=1)
    del scaler
    await_rows(place / "run.gs", 1)
    with open_run(place / "run.gs") as run:
        assert [row.scale for row in run.steps()] == [1024.0]


def test_scalers_and_files_are_reported_in_the_notes(place):
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    torch.amp.GradScaler("cpu", enabled=False)
    train(scaler, net(), steps=1)
    assert noted(place) == [
        {"made": "GradScaler", "enabled": True},
        {"made": "GradScaler", "enabled": False},
        {"file": str(place / "run.gs")},
    ]


def test_warnings_are_written_into_the_file_and_not_issued(place):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    with warnings.catch_warnings():
        # A script may turn every warning into an error.
        warnings.simplefilter("error")
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        # The optimizer has state and the scaler has none, which is worth a warning.
        scaler.step(optimizer)
        scaler.update()
    scaler.close()
    with open_run(place / "run.gs") as run:
        assert [event.code for event in run.events()] == ["GS301"]


@pytest.mark.parametrize("kind", ["fused, torch's", "ours"])
def test_a_step_without_gradients_is_accepted_where_torch_accepts_it(place, kind):
    params = [torch.nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.SGD(params, lr=0.1, fused=kind != "ours")
    scaler = (GradScaler if kind == "ours" else torch.amp.GradScaler)("cpu")
    scaler.scale(torch.ones(1))
    assert scaler.step(optimizer) is None


def test_a_step_without_gradients_raises_where_torch_raises(place):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    ours, theirs = torch.amp.GradScaler("cpu", **SETTINGS), torchs_own("cpu")
    messages = []
    for scaler in (ours, theirs):
        scaler.scale(torch.ones(1))
        with pytest.raises(AssertionError) as caught:
            scaler.step(optimizer)
        messages.append(str(caught.value))
    ours.close()
    assert messages[0] == messages[1]
    with open_run(place / "run.gs") as run:
        assert [event.code for event in run.events()] == ["GS103"]


def test_a_file_that_cannot_be_created_does_not_stop_the_run(place):
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    scaler._record._wanted = place / "none" / "run.gs"
    assert len(train(scaler, net(), steps=4)) == 4
    [trouble] = [line["failed"] for line in noted(place) if "failed" in line]
    assert "GS308" in trouble


def test_a_gradscale_scaler_is_recorded_too(place):
    scaler = GradScaler("cpu", **SETTINGS, guard="raise")
    train(scaler, net(), steps=3)
    del scaler
    await_rows(place / "run.gs", 3)
    with open_run(place / "run.gs") as run:
        assert len(list(run.steps())) == 3


def test_a_record_that_the_script_asks_for_is_not_replaced(place):
    scaler = GradScaler("cpu", **SETTINGS, record=place / "own.gs")
    train(scaler, net(), steps=4)
    scaler.close()
    assert not (place / "run.gs").exists()
    assert {"file": str(place / "own.gs")} in noted(place)


def test_without_the_patch_torchs_classes_create_torchs_scalers(tmp_path):
    names = ("GRADSCALE_RUN_FILE", "GRADSCALE_RUN_NOTES")
    install(dict.fromkeys(names, str(tmp_path / "none")))()
    scaler = torch.amp.GradScaler("cpu", 8.0, growth_interval=3)
    assert type(scaler) is torch.amp.GradScaler
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 3)


def both(work):
    """Return what `work` returns with torch's scaler and with a recorded one."""
    return work(torchs_own), work(torch.amp.GradScaler)


@pytest.mark.parametrize(
    "settings",
    [
        {"growth_interval": 0},
        {"growth_interval": 10**10},
        {"init_scale": torch.tensor(8.0)},
        {"init_scale": 0.0},
    ],
    ids=str,
)
def test_settings_that_only_torch_accepts_work_and_are_recorded(place, settings):
    def work(kind):
        torch.manual_seed(1)
        scaler = kind("cpu", **settings)
        return repr((scaler.get_scale(), train(scaler, net(), bad=(2,)))), scaler

    (theirs, _), (ours, scaler) = both(work)
    assert ours == theirs
    del scaler
    await_rows(place / "run.gs", 12)
    with open_run(place / "run.gs") as run:
        assert len(list(run.steps())) == 12


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.set_growth_factor(1.0),
        lambda s: s.set_backoff_factor(1.5),
        lambda s: s.set_growth_interval(0),
        lambda s: s.set_growth_interval(10**10),
        lambda s: s.load_state_dict({**s.state_dict(), "growth_interval": -1}),
        lambda s: s.load_state_dict({**s.state_dict(), "growth_factor": 0.5}),
    ],
)
def test_settings_that_torch_takes_later_work_as_there(place, change):
    def work(kind):
        torch.manual_seed(1)
        scaler, model = kind("cpu", growth_interval=2), net()
        first = train(scaler, model, steps=3)
        change(scaler)
        second = train(scaler, model, bad=(5,))
        state = {name: scaler.state_dict()[name] for name in scaler.state_dict()}
        state.pop("gradscale", None)
        return repr((first, second, state, scaler.get_growth_interval()))

    theirs, ours = both(work)
    assert ours == theirs


def fail(scaler, weight, steps):
    """Take steps whose gradients are infinite; return the scales."""
    optimizer, scales = torch.optim.SGD([weight], lr=0.5), []
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale((weight * torch.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_at_the_floor_a_replaced_scaler_goes_on_skipping_and_records_it(place):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-22)
    weight = torch.nn.Parameter(torch.ones(1))
    scales = fail(scaler, weight, steps=20)
    assert scales == [2.0**-23, *[2.0**-24] * 19]
    assert weight.item() == 1.0
    weight.grad = None
    scaler.scale(weight.sum()).backward()
    scaler.step(torch.optim.SGD([weight], lr=0.5))
    scaler.update()
    assert weight.item() == 0.5
    scaler.close()
    with open_run(place / "run.gs") as run:
        assert [row.applied for row in run.steps()] == [*[False] * 20, True]
        assert "GS202" in [event.code for event in run.events()]


def test_at_the_floor_a_scaler_of_gradscale_raises_as_without_the_patch(place):
    scaler = GradScaler("cpu", init_scale=2.0**-22)
    with pytest.raises(ScaleCollapsed):
        fail(scaler, torch.nn.Parameter(torch.ones(1)), steps=20)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (0.0, 2.0**-24),
        (-1.0, 2.0**-24),
        (torch.tensor(2.0**-30), 2.0**-24),
        (float("inf"), 2.0**126),
        (float("nan"), 2.0**10),
    ],
)
def test_a_scale_that_only_torch_takes_becomes_the_nearest_bound(place, given, taken):
    scaler, model = torch.amp.GradScaler("cpu", **SETTINGS), net()
    train(scaler, model, steps=1)
    scaler.load_state_dict({**scaler.state_dict(), "scale": float(given)})
    assert scaler.get_scale() == taken
    scaler.scale(model(torch.ones(1, 4)).sum())
    scaler.update(given)
    assert scaler.get_scale() == taken
    scaler.close()
    with open_run(place / "run.gs") as run:
        assert [event.code for event in run.events()] == ["GS109"]


def rows_of(path):
    """Return the steps, scales and the data of the scalers' events in a run file."""
    with open_run(path) as run:
        steps = [(row.step, row.scale) for row in run.steps()]
        begun = [
            (e.step, e.data)
            for e in run.events()
            if e.code == "GS118" and "observed" in e.data
        ]
    return steps, begun


def anew(number, *, alive=0, same=False):
    """Return the data of the event of a further scaler."""
    return {
        "observed": "scaler",
        "number": number,
        "alive": alive,
        "same_optimizer": same,
    }


def take_steps(scaler, optimizer, steps=1):
    """Take finite steps of one parameter."""
    [weight] = optimizer.param_groups[0]["params"]
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def test_scalers_that_follow_one_another_are_one_run(place):
    optimizer = sgd()
    for epoch in range(3):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**epoch)
        take_steps(scaler, optimizer, 7)
    del scaler
    await_rows(place / "run.gs", 21)
    steps, begun = rows_of(place / "run.gs")
    assert steps == [(n + 1, 2.0 ** (n // 7)) for n in range(21)]
    assert begun == [(8, anew(2, same=True)), (15, anew(3, same=True))]
    assert not (place / "run.2.gs").exists()


def test_rows_of_scalers_side_by_side_are_in_the_order_of_updates(place):
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**n) for n in (3, 5)]
    optimizers = [sgd(), sgd()]
    for _ in range(11):
        # Two steps of the first for one of the second.
        for which in (0, 1, 0):
            take_steps(scalers[which], optimizers[which])
    for scaler in scalers:
        scaler.close()
    steps, begun = rows_of(place / "run.gs")
    assert steps == list(enumerate([8.0, 32.0, 8.0] * 11, start=1))
    assert begun == [(2, anew(2, alive=1))]


def test_a_scaler_that_pauses_holds_up_few_rows(place):
    first, second = (torch.amp.GradScaler("cpu", init_scale=s) for s in (8.0, 32.0))
    one, other = sgd(), sgd()
    take_steps(first, one, 3)
    take_steps(second, other, 100)
    second._record.writer.flush()
    steps, _ = rows_of(place / "run.gs")
    assert len(steps) > 90
    take_steps(first, one, 3)
    first.close()
    second.close()
    steps, _ = rows_of(place / "run.gs")
    scales = [8.0] * 3 + [32.0] * 100 + [8.0] * 3
    assert steps == list(enumerate(scales, start=1))


def test_a_scaler_that_is_unpickled_continues_the_file(place):
    scaler, optimizer = torch.amp.GradScaler("cpu", **SETTINGS), sgd()
    take_steps(scaler, optimizer, 3)
    scaler = pickle.loads(pickle.dumps(scaler))
    take_steps(scaler, optimizer, 3)
    del scaler
    await_rows(place / "run.gs", 6)
    _, begun = rows_of(place / "run.gs")
    assert begun == [(4, anew(2, same=True))]


def test_a_scaler_that_is_only_watched_continues_the_file(place):
    class Derived(torch.amp.GradScaler):
        pass

    optimizer = sgd()
    take_steps(torch.amp.GradScaler("cpu", init_scale=8.0), optimizer, 3)
    take_steps(Derived("cpu", init_scale=32.0), optimizer, 3)
    gc.collect()
    await_rows(place / "run.gs", 6)
    steps, begun = rows_of(place / "run.gs")
    assert steps == list(enumerate([8.0] * 3 + [32.0] * 3, start=1))
    assert begun == [(4, anew(2, same=True))]


def test_a_resumed_run_keeps_its_numbers_and_a_later_scaler_counts_on(place):
    scaler, optimizer = GradScaler("cpu", record=place / "own.gs"), sgd()
    take_steps(scaler, optimizer, 5)
    state = scaler.state_dict()
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(state)
    take_steps(scaler, optimizer, 2)
    take_steps(torch.amp.GradScaler("cpu"), optimizer, 2)
    scaler.close()
    steps, _ = rows_of(place / "run.gs")
    assert [number for number, _ in steps] == [6, 7, 8, 9]


def test_findings_of_a_later_scaler_have_the_numbers_of_the_file(place):
    optimizer = sgd()
    take_steps(torch.amp.GradScaler("cpu"), optimizer, 10)
    [weight] = optimizer.param_groups[0]["params"]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-22)
    fail(scaler, weight, steps=12)
    scaler.close()
    with open_run(place / "run.gs") as run:
        [found] = [e for e in run.events() if e.code == "GS202" and "what" in e.data]
    # The fifth bad step is the third at the floor.
    assert (found.step, found.data["step"]) == (15, 15)


def test_a_run_file_of_the_scripts_own_is_noted_under_its_number(place):
    (place / "own.gs").touch()
    scaler = GradScaler("cpu", **SETTINGS, record=place / "own.gs")
    train(scaler, net(), steps=1)
    scaler.close()
    assert {"file": str(place / "own.2.gs")} in noted(place)


def test_a_recording_that_stops_is_noted_and_not_raised(place):
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    train(scaler, net(), steps=1)
    scaler._record.writer.flush()
    (place / "run.gs").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler._record.writer.flush()
        train(scaler, net(), steps=5)
    [trouble] = [line["failed"] for line in noted(place) if "failed" in line]
    assert "GS308" in trouble


class _Unhashable(torch.optim.SGD):
    def __eq__(self, other):
        raise TypeError("not comparable")


class _Wrapper(torch.optim.SGD):
    """Wraps another optimizer, without groups of its own."""

    def __init__(self, inner):
        self.inner = inner


class _Nameless(torch.nn.Linear):
    def named_parameters(self, *args, **kwargs):
        raise ValueError("no names")


def _scaled_twice(scaler, model, optimizer):
    take(scaler, scaler.scale(model(torch.ones(1, 2)).sum()), optimizer)


def _disabled_in_between(scaler, model, optimizer):
    train_once(scaler, model, optimizer)
    scaler._enabled = False
    train_once(scaler, model, optimizer)
    scaler._enabled = True
    train_once(scaler, model, optimizer)


def _scale_loaded_as_a_tensor(scaler, model, optimizer):
    state = scaler.state_dict()
    scaler.load_state_dict({**state, "scale": torch.tensor(4.0)})
    train_once(scaler, model, optimizer)


def _beside_a_wrapper(scaler, model, optimizer):
    wrapper = _Wrapper(optimizer)
    train_once(scaler, model, wrapper.inner, steps=5)


def _failing(scaler, model, optimizer):
    for step in range(30):
        optimizer.zero_grad()
        factor = torch.nan if 3 < step < 20 else 1.0
        take(scaler, model(torch.ones(1, 2)).sum() * factor, optimizer)


def take(scaler, loss, optimizer):
    """Take a step by a loss."""
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def train_once(scaler, model, optimizer, steps=1):
    """Take finite steps of a model."""
    for _ in range(steps):
        optimizer.zero_grad()
        take(scaler, model(torch.ones(1, 2)).sum(), optimizer)


@pytest.mark.parametrize(
    ("script", "model", "optimizer"),
    [
        (_scaled_twice, torch.nn.Linear, torch.optim.SGD),
        (_disabled_in_between, torch.nn.Linear, torch.optim.SGD),
        (_scale_loaded_as_a_tensor, torch.nn.Linear, torch.optim.SGD),
        (_beside_a_wrapper, torch.nn.Linear, torch.optim.SGD),
        (_failing, torch.nn.Linear, _Unhashable),
        (_failing, _Nameless, torch.optim.SGD),
    ],
)
def test_odd_loops_and_objects_end_as_under_torch(place, script, model, optimizer):
    def work(kind):
        torch.manual_seed(1)
        net, scaler = model(2, 1), kind("cpu", init_scale=2.0**10)
        params = [net.weight, net.bias]
        script(scaler, net, optimizer(params, lr=0.1))
        return [param.tolist() for param in params], scaler.get_scale()

    theirs, ours = both(work)
    assert ours == theirs
