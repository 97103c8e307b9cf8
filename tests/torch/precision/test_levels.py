"""Levels: casts, steps, messages, and runs that resume."""

import io

import pytest
import torch

from gradscale import DynamicScale, NoScale, StaticScale
from gradscale.errors import ConfigError
from gradscale.torch import GradScaler, initialize, optim
from gradscale.torch.precision.levels import Level, level_of
from gradscale.torch.precision.master_weights import MasterWeights

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LEVELS = ("O0", "O1", "O2", "O3")
OPTIMIZERS = {
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),
    "own": lambda params: optim.AdamW(params, lr=1e-2),
}
levels = pytest.mark.parametrize("level", LEVELS)
dtypes = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)


class Net(torch.nn.Module):
    """A layer, two norms, a buffer, a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 4)
        self.batch = torch.nn.BatchNorm1d(4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 1)
        self.register_buffer("shift", torch.full((4,), 0.25))
        self.seen = {}

    def forward(self, x, *, twice=False):
        self.seen = {"input": x.dtype}
        x = self.first(x)
        x = x + self.shift.to(x.dtype)
        self.seen["hidden"] = x.dtype
        x = self.norm(self.batch(x))
        x = self.head(torch.relu(x))
        return {"out": x, "sizes": (x.shape, 2 * x if twice else None)}


def made(level, dtype=F16, optimizer="torch", **changes):
    model = Net()
    return initialize(
        model, OPTIMIZERS[optimizer](model.parameters()), level, dtype=dtype, **changes
    )


def train(model, optimizer, scaler, steps):
    """Take steps, of which one overflows if the scale moves; return the losses."""
    losses, moves = [], isinstance(scaler.policy, DynamicScale)
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        out = model(torch.randn(6, 3))["out"]
        loss = (out - 0.5).square().mean() * (
            float("inf") if moves and step == 2 else 1.0
        )
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def weights(model, optimizer):
    state = optimizer.state_dict()["state"]
    held = [v for one in state.values() for v in one.values()]
    buffers = [*model.parameters(), *model.buffers()]
    return [t.detach().clone() for t in [*buffers, *held] if torch.is_tensor(t)]


# --- the table ------------------------------------------------------------------------


def test_the_levels_are_those_of_apex():
    table = {name: level_of(name, F16, {}) for name in LEVELS}
    facts = {
        name: (one.cast_model, one.autocast, bool(one.keep_fp32), one.masters)
        for name, one in table.items()
    }
    assert facts == {
        "O0": (F32, None, False, False),
        "O1": (None, F16, False, False),
        "O2": (F16, None, True, True),
        "O3": (F16, None, False, False),
    }
    assert [type(one.policy) for one in table.values()] == [
        NoScale,
        DynamicScale,
        DynamicScale,
        NoScale,
    ]


@levels
def test_under_bfloat16_nothing_is_scaled(level):
    assert level_of(level, BF16, {}).policy == NoScale()


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("cast_model", None),
        ("autocast", BF16),
        ("keep_fp32", ("head",)),
        ("masters", False),
        ("outputs", None),
        ("policy", StaticScale(scale=8.0)),
    ],
)
def test_every_setting_can_be_changed(change, value):
    level = level_of("O2", F16, {change: value})
    assert getattr(level, change) == value
    others = set(Level.__dataclass_fields__) - {change}
    usual = level_of("O2", F16, {})
    assert all(getattr(level, name) == getattr(usual, name) for name in others)


def test_a_level_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"level='O4' is not one of 'O0', 'O1'"):
        made("O4")


def test_a_dtype_that_is_no_half_precision_is_refused():
    with pytest.raises(ConfigError, match=r"for float32, pass level='O0'.*GS101"):
        made("O2", F32)


def test_a_setting_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"keep_batchnorm_fp32=True is no setting"):
        made("O2", keep_batchnorm_fp32=True)


# --- casts ----------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(
    ("level", "weight", "norm", "hidden"),
    [
        ("O0", F32, F32, F32),
        ("O1", F32, F32, "half"),
        ("O2", "half", F32, "half"),
        ("O3", "half", "half", "half"),
    ],
)
def test_weights_and_activations_have_the_dtypes_of_the_level(
    level, weight, norm, hidden, dtype
):
    model, _, _ = made(level, dtype)
    out = model(torch.ones(2, 3), twice=True)
    wanted = [dtype if one == "half" else one for one in (weight, norm, hidden)]
    assert [model.first.weight.dtype, model.norm.weight.dtype] == wanted[:2]
    assert model.batch.running_mean.dtype is wanted[1]
    assert model.shift.dtype is wanted[0]
    assert model.seen["hidden"] is wanted[2]
    assert out["out"].dtype is out["sizes"][1].dtype is F32


def test_outputs_stay_as_they_are_if_asked_for():
    model, _, _ = made("O2", outputs=None)
    assert model(torch.ones(2, 3))["out"].dtype is F16


@pytest.mark.parametrize(
    "keep", ["head", ("h*d",), torch.nn.Linear, (torch.nn.Linear, "norm")]
)
def test_modules_are_kept_in_float32_by_type_name_or_pattern(keep):
    model, _, _ = made("O2", keep_fp32=keep)
    assert model.head.weight.dtype is F32
    assert model.batch.weight.dtype is F16
    out = model(torch.ones(2, 3))["out"]
    out.sum().backward()
    assert model.head.weight.grad.dtype is F32


def test_a_name_of_no_module_is_refused():
    with pytest.raises(
        ConfigError, match=r"keep_fp32 names 'haed', and no module of Net has that name"
    ):
        made("O2", keep_fp32=("haed",))


def test_a_module_among_the_names_is_refused():
    model = Net()
    with pytest.raises(ConfigError, match=r"has a Linear in it, which names no module"):
        initialize(model, None, "O2", keep_fp32=[model.head])
    with pytest.raises(ConfigError, match=r"keep_fp32 has a int in it"):
        initialize(model, None, "O1", keep_fp32=5)
    assert model.first.weight.dtype is F32


def test_a_module_is_kept_in_float32_under_autocast():
    model, _, _ = made("O1", keep_fp32="first")
    model(torch.ones(2, 3))
    assert model.seen["hidden"] is F32


@pytest.mark.parametrize("setting", ["cast_model", "autocast", "outputs"])
@pytest.mark.parametrize("value", ["half", torch.int8])
def test_a_setting_that_is_no_floating_dtype_is_refused(setting, value):
    with pytest.raises(ConfigError, match=rf"{setting}=.* is no floating dtype"):
        made("O2", **{setting: value})


def test_a_weight_shared_with_a_kept_module_is_refused():
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)}
    )
    model["b"].weight = model["a"].weight
    with pytest.raises(ConfigError, match=r"module 'b', which shares a parameter.*'a'"):
        initialize(model, None, "O2", keep_fp32="b")


def test_half_weights_under_autocast_are_refused():
    with pytest.raises(ConfigError, match=r"fp32_trainable_\(model\) first, or"):
        initialize(Net().half(), None, "O1")


def test_a_half_model_becomes_float32_at_o0():
    model, _, _ = initialize(Net().half(), None, "O0")
    assert {t.dtype for t in (*model.parameters(), model.shift)} == {F32}


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def by_ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def by_fsdp(model):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    return torch.distributed.fsdp.fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    ("wrap", "name"), [(by_ddp, "DistributedDataParallel"), (by_fsdp, "FSDPModule")]
)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_model_that_is_distributed_is_not_cast(one_rank, wrap, name, level):
    model = wrap(Net())
    with pytest.raises(ConfigError, match=rf"a model with {name}\..*Call initialize"):
        initialize(model, None, level)
    assert {param.dtype for param in model.parameters()} == {F32}


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_level_without_casts_takes_a_model_wrapped_by_ddp(one_rank, level):
    model = by_ddp(Net())
    opt = OPTIMIZERS["torch"](model.parameters())
    losses = train(*initialize(model, opt, level), range(8))
    finite = [loss for loss in losses if loss < float("inf")]
    assert finite[-1] < finite[0]


@levels
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_lazy_model_trains(level, optimizer):
    model = torch.nn.Sequential(
        torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(1)
    )
    opt = OPTIMIZERS[optimizer](model.parameters())
    model, opt, scaler = initialize(
        model, opt, level, policy=StaticScale(scale=8.0), scaler={"allow_fp16": True}
    )
    torch.manual_seed(0)
    batch, losses = torch.randn(8, 3), []
    for _ in range(5):
        opt.zero_grad()
        loss = (model(batch) - 2.0).square().mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert scaler.skipped_steps == 0


def test_a_model_is_initialized_once():
    model, _, _ = made("O2")
    with pytest.raises(ConfigError, match=r"Net was given to initialize\(\) before"):
        initialize(model, None, "O1")


def test_an_optimizer_is_given_once():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="One optimizer was given twice"):
        initialize(model, [optimizer, optimizer], "O2")


# --- optimizers and masters -----------------------------------------------------------


def test_masters_start_from_the_weights_before_they_were_rounded():
    exact = [p.detach().clone() for p in Net().parameters()]
    for optimizer in ("torch", "own"):
        model, made_, _ = made("O2", optimizer=optimizer)
        for param, value in zip(model.parameters(), exact, strict=True):
            if param.dtype is F16:
                assert torch.equal(made_.state[param]["master"], value)
                assert torch.equal(param, value.half())


@pytest.mark.parametrize("optimizer", ["torch", "own"])
def test_after_a_step_state_and_masters_are_float32(optimizer):
    model, opt, scaler = made("O2", optimizer=optimizer, policy=StaticScale(scale=8.0))
    train(model, opt, scaler, [0, 1])
    for param in model.parameters():
        held = opt.state[param]
        assert held["exp_avg"].dtype is held["exp_avg_sq"].dtype is F32
        assert ("master" in held) is (param.dtype is F16)


def test_at_o3_another_optimizer_stays_in_float16():
    model, opt, scaler = made("O3")
    assert type(opt) is torch.optim.AdamW
    train(model, opt, scaler, [0, 1])
    assert {opt.state[p]["exp_avg"].dtype for p in model.parameters()} == {F16}


@pytest.mark.parametrize("kind", ["Adagrad", "AdamW"])
def test_at_o3_a_state_from_before_becomes_float16(kind):
    # Adagrad makes its state when it is made, AdamW in its first step.
    model = Net()
    opt = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, eps=1e-4)
    model(torch.ones(2, 3))["out"].sum().backward()
    opt.step()
    _, opt, scaler = initialize(model, opt, "O3", policy=StaticScale(scale=8.0))
    train(model, opt, scaler, [0, 1])
    for param in model.parameters():
        assert {
            value.dtype for name, value in opt.state[param].items() if name != "step"
        } == {F16}


def test_at_o3_an_eps_of_zero_is_refused_by_name():
    model = Net()
    model, opt, scaler = initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    with pytest.raises(
        ConfigError,
        match=r"8 trainable parameters are float16 in AdamW: first\.weight, .* and 3 "
        r"more, with eps=1e-08, which is 0 in float16\..*To stay in float16, pass "
        r"eps=1e-4\. \[GS125\]",
    ):
        train(model, opt, scaler, [0])


def test_several_models_and_optimizers_come_back_as_lists():
    models = [Net(), Net()]
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    done = initialize(models, opts, "O2")
    assert done.model == models
    assert [type(o) for o in done.optimizer] == [MasterWeights] * 2
    assert initialize(Net(), None, "O1").optimizer is None


def test_arguments_of_the_scaler_are_passed_on():
    _, _, scaler = made("O2", scaler={"guard": "raise", "recheck": True})
    assert (scaler._guard, scaler._recheck) == ("raise", True)


# --- training, saving, resuming -------------------------------------------------------


@levels
@dtypes
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_level_trains_saves_and_resumes_bit_identically(level, dtype, optimizer):
    whole = made(level, dtype, optimizer)
    losses = train(*whole, range(8))
    finite = [loss for loss in losses if loss < float("inf")]
    assert finite[-1] < finite[0]
    assert (whole.scaler.skipped_steps > 0) is (whole.scaler.policy != NoScale())

    first = made(level, dtype, optimizer)
    train(*first, range(5))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    again = made(level, dtype, optimizer)
    for part, state in zip(again, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert train(*again, range(5, 8)) == losses[5:]
    assert again.scaler.state_dict() == whole.scaler.state_dict()
    pairs = zip(
        weights(whole.model, whole.optimizer),
        weights(again.model, again.optimizer),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)


def test_o1_is_a_loop_under_autocast():
    model, opt, scaler = made("O1")
    losses = train(model, opt, scaler, range(4))
    plain, reference = Net(), []
    optimizer = OPTIMIZERS["torch"](plain.parameters())
    by_hand = GradScaler("cpu")
    forward = plain.forward

    def under_autocast(x):
        with torch.autocast("cpu", F16):
            return {"out": forward(x)["out"].float()}

    reference = train(under_autocast, optimizer, by_hand, range(4))
    assert losses == reference
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


# --- BF16 -----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_bfloat16_chooses_no_scale_and_says_so_once(level, caplog):
    with caplog.at_level("INFO", "gradscale"):
        _, _, scaler = made(level, BF16)
    assert scaler.policy == NoScale()
    (said,) = caplog.messages
    assert said.startswith("GS004 bfloat16: the loss is not scaled (NoScale)")
    assert said.endswith("Pass policy= to scale it")


def test_scaling_under_bfloat16_is_there_for_who_asks(caplog):
    caplog.set_level("INFO", "gradscale")
    model, opt, scaler = made("O2", BF16, policy=DynamicScale(init_scale=8.0))
    train(model, opt, scaler, [0, 1])
    assert scaler.get_scale() == 8.0
    assert caplog.messages == []


def test_float16_and_float32_say_nothing(caplog):
    caplog.set_level("INFO", "gradscale")
    made("O2")
    made("O0", BF16)
    assert caplog.messages == []
