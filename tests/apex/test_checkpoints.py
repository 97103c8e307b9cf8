"""Checkpoints: scales in apex's format, exact resumption, across levels and losses."""

import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradscale.apex import amp
from gradscale.apex.amp import _amp_state
from gradscale.apex.optimizers import FusedAdam, FusedLAMB
from gradscale.errors import GradscaleWarning, HopelessRun, StateError
from gradscale.recording import recorded_run
from gradscale.runfile import open_run
from gradscale.sinks import CallableSink

LEVELS = ["O0", "O1", "O2", "O3"]


class Net(nn.Module):
    """A convolution, a batch norm and a bare parameter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, 1, 1)
        self.bn = nn.BatchNorm2d(2)
        self.param = nn.Parameter(torch.randn(1))

    def forward(self, x):
        return self.bn(F.relu(self.conv(x * self.param)))


def make(level, losses=1, cls=torch.optim.SGD, **settings):
    model = Net()
    given = {"lr": 1e-2} | ({"momentum": 0.9} if cls is torch.optim.SGD else {})
    return amp.initialize(
        model,
        cls(model.parameters(), **given),
        opt_level=level,
        num_losses=losses,
        **{"verbosity": 0, **settings},
    )


def step(model, optimizer, x, losses=1, factor=1.0):
    optimizer.zero_grad()
    for number in range(losses):
        output = model(x * factor)
        with amp.scale_loss(
            output.square().mean() * (number + 1), optimizer, loss_id=number
        ) as scaled:
            scaled.backward()
    optimizer.step()
    return output.detach()


def saved(model, optimizer):
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
    }
    # Through a copy, as a file does.
    return torch.load(_bytes(state), weights_only=True)


def _bytes(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def assert_same(model, other):
    for (name, a), b in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize(
    "cls", [torch.optim.SGD, torch.optim.Adam, FusedAdam, FusedLAMB]
)
@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_run_is_bit_identical(level, cls, losses):
    if level == "O3" and cls is torch.optim.Adam:
        # Its eps is 0 in float16: every weight would be NaN, with apex too.
        return
    data = [torch.randn(2, 1, 3, 3) for _ in range(6)]
    model, optimizer = make(level, losses, cls)
    for x in data[:3]:
        step(model, optimizer, x, losses)
    checkpoint = saved(model, optimizer)
    expected = [step(model, optimizer, x, losses) for x in data[3:]]
    after = amp.state_dict()
    resumed, again = make(level, losses, cls)
    resumed.load_state_dict(checkpoint["model"])
    again.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    for x, output in zip(data[3:], expected, strict=True):
        assert torch.equal(step(resumed, again, x, losses), output)
    assert_same(model, resumed)
    assert amp.state_dict() == after


@pytest.mark.parametrize("before", [True, False], ids=["initialized", "bare"])
@pytest.mark.parametrize("target", LEVELS)
@pytest.mark.parametrize("source", LEVELS)
def test_a_checkpoint_of_any_level_trains_on_at_any_other(source, target, before):
    data = [torch.randn(2, 1, 3, 3) for _ in range(4)]
    model, optimizer = make(source)
    for x in data[:2]:
        step(model, optimizer, x)
    checkpoint = saved(model, optimizer)
    assert {t.dtype for t in checkpoint["model"].values()} <= {
        torch.float32,
        torch.int64,
    }
    other = Net()
    sgd = torch.optim.SGD(other.parameters(), lr=1e-2, momentum=0.9)
    if before:
        other, sgd = amp.initialize(other, sgd, opt_level=target, verbosity=0)
    other.load_state_dict(checkpoint["model"])
    sgd.load_state_dict(checkpoint["optimizer"])
    if not before:
        other, sgd = amp.initialize(other, sgd, opt_level=target, verbosity=0)
    assert_close(model, other)
    _amp_state.loss_scalers[0]._loss_scale = 256.0
    for x in data[2:]:
        step(model, optimizer, x)
        step(other, sgd, x)
    assert_close(model, other)


def assert_close(model, other):
    for (name, a), b in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        # Half precision against f32.
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_decreasing_scales_are_saved_and_restored(level):
    model, optimizer = make(level, losses=3)
    decreases = [0, 1, 2]
    left = list(decreases)
    for _ in range(2):
        optimizer.zero_grad()
        for number in range(3):
            overflow = left[number] > 0
            left[number] -= overflow
            output = model(torch.randn(2, 1, 3, 3))
            # In f32: the gradient of an f16 loss is the scale, 2^16, which is no f16.
            loss = output.float().mean() * (float("inf") if overflow else 1.0)
            with amp.scale_loss(loss, optimizer, loss_id=number) as scaled:
                scaled.backward()
        optimizer.step()
    expected = {
        f"loss_scaler{i}": {"loss_scale": 2.0 ** (16 - n), "unskipped": 2 - n}
        for i, n in enumerate(decreases)
    }
    state = amp.state_dict()
    assert state == expected
    make(level, losses=3)
    amp.load_state_dict(state)
    assert amp.state_dict() == expected


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_model_goes_on_training_after_its_state_was_read(level):
    model, optimizer = make(level, cls=torch.optim.Adam)
    x, target = torch.randn(4, 1, 3, 3), torch.randn(4, 2, 3, 3)
    losses = []
    for _ in range(8):
        assert all(t.dtype is not torch.float16 for t in model.state_dict().values())
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# --- the scales -----------------------------------------------------------------------


def two_losses(**settings):
    make("O2", losses=2, **settings)


@pytest.mark.parametrize("case", ["one", "three"])
def test_fewer_and_more_scales_give_a_warning(golden, case):
    expected = golden["load_state_dict"][case]
    two_losses()
    _amp_state.verbosity = 1
    with pytest.warns(GradscaleWarning, match="num_losses"):
        amp.load_state_dict(expected["in"])
    assert amp.state_dict() == expected["after"]


def test_a_foreign_entry_is_refused_and_nothing_is_changed(golden):
    foreign = golden["load_state_dict"]["foreign"]
    two_losses()
    before = amp.state_dict()
    with pytest.raises(RuntimeError, match="entry 'other'"):
        amp.load_state_dict(foreign["in"])
    assert amp.state_dict() == before


def test_exact_loads_the_entries_before_a_foreign_one(golden):
    foreign = golden["load_state_dict"]["foreign"]
    two_losses(exact=True)
    # The recorded case had loaded the one before.
    amp.load_state_dict(golden["load_state_dict"]["three"]["in"])
    with pytest.raises(RuntimeError, match="entry 'other'"):
        amp.load_state_dict(foreign["in"])
    assert amp.state_dict() == foreign["after"]


@pytest.mark.parametrize(
    "entry",
    [3, {}, {"loss_scale": 0.0, "unskipped": 0}, {"loss_scale": 8.0, "unskipped": 1.5}],
)
def test_an_entry_that_is_no_scale_is_refused(entry):
    make("O2")
    with pytest.raises(StateError, match="loss_scaler0 is"):
        amp.load_state_dict({"loss_scaler0": entry})


def test_a_state_of_apex_loads_without_a_warning():
    make("O2")
    _amp_state.verbosity = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 9}})
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 9}}


# --- masters --------------------------------------------------------------------------


def test_masters_start_from_the_weights_before_they_were_rounded():
    model = nn.Linear(2, 1)
    exact = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert torch.equal(next(amp.master_params(optimizer)), exact)


def test_scripts_find_weights_and_masters_by_group():
    model, optimizer = make("O2")
    stash = optimizer._amp_stash
    (group,) = optimizer.param_groups
    halves = [p for p in model.parameters() if p.dtype is torch.float16]
    masters = [
        p for p in group["params"] if all(p is not q for q in model.parameters())
    ]
    # Equal lists of tensors hold the same ones.
    assert stash.fp16_groups == [halves]
    assert stash.fp32_from_fp16_groups == [masters]
    assert len(masters) == len(halves) > 0
    # Public code asks whether there are masters by `hasattr`.
    assert not hasattr(make("O1")[1]._amp_stash, "fp16_groups")


def test_masters_are_restored_and_rounded_as_in_scripts_for_apex():
    model, optimizer = make("O2")
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    for master in amp.master_params(optimizer):
        master.data.fill_(1.0 + 2.0**-20)
    optimizer._master_params_to_model_params()
    assert {weight.item() for weight in model.param.flatten()} == {1.0}
    optimizer.step()
    # The digits that float16 has not are kept.
    assert {1.0 + 2.0**-20} == {
        value.item() for p in amp.master_params(optimizer) for value in p.flatten()
    }


def test_a_write_to_a_weight_reaches_its_master():
    model, optimizer = make("O2")
    with torch.no_grad():
        model.param.fill_(3.0)
    optimizer.zero_grad()
    with amp.scale_loss(
        0.0 * model(torch.randn(2, 1, 3, 3)).sum(), optimizer
    ) as scaled:
        scaled.backward()
    optimizer.step()
    assert model.param.item() == 3.0


@pytest.mark.parametrize(("check_data", "expected"), [(True, 3.0), (False, 1.0)])
def test_a_write_through_data_is_kept_with_check_data(check_data, expected):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", verbosity=0, check_data=check_data
    )
    for value in (1.0, 3.0):
        model.weight.data.fill_(value)
        with warnings.catch_warnings():
            # Without check_data, the write is reported.
            warnings.simplefilter("ignore", GradscaleWarning)
            step(model, optimizer, torch.zeros(1, 1))
    assert model.weight.item() == expected


def plain_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(2, 1, 3, 3)).square().mean().backward()
    optimizer.step()


def test_a_backward_pass_without_scale_loss_is_reported_once():
    model, optimizer = make("O2", verbosity=1)
    with pytest.warns(GradscaleWarning, match=r"without scale_loss.*GS103"):
        plain_step(model, optimizer)
    plain_step(model, optimizer)


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_without_masters_a_plain_backward_pass_is_not_reported(level):
    model, optimizer = make(level, verbosity=1)
    plain_step(model, optimizer)


def test_a_second_step_after_scale_loss_is_not_reported():
    model, optimizer = make("O2", verbosity=1, loss_scale=1.0)
    step(model, optimizer, torch.randn(2, 1, 3, 3))
    optimizer.step()


def test_an_optimizer_state_of_apex_has_no_masters_and_loads():
    model, optimizer = make("O2")
    step(model, optimizer, torch.randn(2, 1, 3, 3))
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry.pop("master", None)
    optimizer.load_state_dict(state)
    for param, master in zip(
        optimizer._amp_stash.params(), amp.master_params(optimizer), strict=True
    ):
        assert torch.equal(param.float(), master)


# --- outcomes and run files -----------------------------------------------------------


def test_the_last_outcome_names_verdict_and_culprits():
    model, optimizer = make("O2")
    assert amp.last is None
    step(model, optimizer, torch.randn(2, 1, 3, 3))
    _amp_state.loss_scalers[0]._loss_scale = 2.0**24
    with amp.scale_loss(
        1e30 * model(torch.randn(2, 1, 3, 3)).sum(), optimizer
    ) as scaled:
        scaled.backward()
    optimizer.step()
    assert not amp.last.applied
    assert amp.last.scale == 2.0**24
    assert amp.last.verdict.code.startswith("GS2")
    assert "conv.weight" in amp.last.culprits


def test_a_sink_gets_the_steps_of_the_first_loss():
    seen = []
    sink = CallableSink(
        lambda step, figures: seen.append((step, figures["scale_log2"]))
    )
    model, optimizer = make("O0", losses=2, loss_scale=8.0, sinks=[sink])
    for _ in range(2):
        step(model, optimizer, torch.randn(2, 1, 3, 3), losses=2)
    assert seen == [(1, 3.0), (2, 3.0)]


def test_a_run_that_no_scale_can_help_can_be_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_run, "BUNDLES", tmp_path)
    model, optimizer = make("O2", guard="raise")

    def train():
        for _ in range(100):
            step(model, optimizer, torch.full((2, 1, 3, 3), float("nan")))

    with pytest.raises(HopelessRun, match="GS203"):
        train()


def test_each_loss_is_recorded_in_a_file_of_its_own(tmp_path):
    model, optimizer = make("O2", losses=2, record=tmp_path / "run.gs")
    for _ in range(3):
        step(model, optimizer, torch.randn(2, 1, 3, 3), losses=2)
    for scaler in _amp_state.loss_scalers:
        scaler.recording.close()
    for name in ("run.gs", "run.loss1.gs"):
        with open_run(tmp_path / name) as run:
            rows = list(run.steps())
            assert [row.step for row in rows] == [1, 2, 3]
            assert run.meta["policy"]["kind"] == "DynamicScale"
            assert run.meta["framework"] == "apex"
            assert "conv.weight" in run.meta["parameters"]
            assert all(row.loss is not None for row in rows)
