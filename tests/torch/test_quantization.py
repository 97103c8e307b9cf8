"""Observers survive an overflow, and a step size is trained like any parameter."""

import copy
import math

import pytest
import torch
import torch.ao.quantization as ao
from torch import nn

from gradscale import ConfigError, DynamicScale
from gradscale.torch import GradScaler, fp32_island, initialize
from gradscale.torch.quantization import LearnableFakeQuantize, guard_observers

# Torch announces the end of torch.ao with every use.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:must run observer before calling"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max"),
]
INF, NAN = math.inf, math.nan
# By the engine: fused modules, and by hand: a fake-quantise module with its observer.
CONFIGS = {
    "fused": lambda: ao.get_default_qat_qconfig("x86"),
    "plain": lambda: ao.QConfig(
        activation=ao.FakeQuantize.with_args(observer=ao.MovingAverageMinMaxObserver),
        weight=ao.default_weight_fake_quant,
    ),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def prepared(config):
    torch.manual_seed(0)
    model = nn.Sequential(ao.QuantStub(), nn.Linear(4, 4), nn.ReLU6(), nn.Linear(4, 2))
    model.qconfig = config()
    return ao.prepare_qat(model.train())


def ranges(model):
    """Return the floating buffers: ranges, scales and their smallest values."""
    buffers = model.named_buffers()
    return {name: b.clone() for name, b in buffers if b.is_floating_point()}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[n], other[n]) for n in one
    )


def batch(value=None):
    torch.manual_seed(1)
    x = torch.randn(8, 4)
    if value is not None:
        x[3, 2] = value
    return x


# --- observers ------------------------------------------------------------------------


@each_config
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_bad_batch_leaves_the_observers_as_they_were(config, bad):
    model = guard_observers(prepared(config))
    model(batch())
    before = ranges(model)
    assert not model(batch(bad)).isfinite().all()
    assert same(ranges(model), before)
    assert model(batch()).isfinite().all()


@each_config
@pytest.mark.parametrize("bad", [INF, NAN])
def test_without_the_guard_it_poisons_them_for_good(config, bad):
    model = prepared(config)
    model(batch())
    model(batch(bad))
    assert not model(batch()).isfinite().all()


@each_config
def test_the_first_batch_may_be_the_bad_one(config):
    model = guard_observers(prepared(config))
    model(batch(INF))
    model(batch())
    reference = guard_observers(prepared(config))
    reference(batch())
    assert same(ranges(model), ranges(reference))


def test_the_first_batch_of_an_observer_by_channel_may_be_the_bad_one():
    observer = guard_observers(ao.MovingAveragePerChannelMinMaxObserver(ch_axis=1))
    observer(batch(INF))
    assert observer.min_val.numel() == 0
    observer(batch())
    assert torch.equal(observer.max_val, batch().amax(0))


@each_config
def test_good_batches_give_the_ranges_of_torch(config):
    guarded, plain = guard_observers(prepared(config)), prepared(config)
    for factor in (1.0, 3.0, 0.5):
        assert torch.equal(guarded(factor * batch()), plain(factor * batch()))
    assert same(ranges(guarded), ranges(plain))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_refuses_its_fused_modules_under_autocast(dtype):
    with torch.autocast("cpu", dtype), pytest.raises(RuntimeError, match="Float but"):
        prepared(CONFIGS["fused"])(batch())


@each_config
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_guarded_model_runs_under_autocast(config, dtype):
    model = guard_observers(prepared(config))
    with torch.autocast("cpu", dtype):
        output = model(batch())
    output.float().sum().backward()
    assert model[1].weight.grad.isfinite().all()


@each_config
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_guarded_model_trains_at_every_level(config, level):
    model = guard_observers(prepared(config))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer, scaler = initialize(
        model, optimizer, level, policy=DynamicScale(init_scale=8.0)
    )
    for value in (None, INF, None):
        optimizer.zero_grad()
        scaler.scale(model(batch(value)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last.applied is (value is None)
    assert all(values.isfinite().all() for values in ranges(model).values())


def test_the_layers_between_stay_in_float16():
    model, seen = guard_observers(prepared(CONFIGS["fused"])), []
    # After the layer and before its fake-quantise module, which is a hook too.
    model[1].register_forward_hook(
        lambda m, i, out: seen.append(out.dtype), prepend=True
    )
    with torch.autocast("cpu", torch.float16):
        model(batch())
    assert seen == [torch.float16]


def test_a_second_call_changes_nothing():
    model = guard_observers(prepared(CONFIGS["fused"]))
    hooks = [len(module._forward_hooks) for module in model.modules()]
    guard_observers(model)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_a_copy_is_guarded_by_itself():
    model = guard_observers(prepared(CONFIGS["plain"]))
    model(batch())
    twin = copy.deepcopy(model)
    before = ranges(model)
    twin(batch(INF))
    twin(2.0 * batch())
    assert same(ranges(model), before)
    assert all(values.isfinite().all() for values in ranges(twin).values())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_guarded_model_is_converted():
    model = guard_observers(prepared(CONFIGS["fused"]))
    model(batch())
    converted = ao.convert(model.eval())
    assert type(converted[1]).__module__.startswith("torch.ao.nn.quantized")


def test_an_observer_without_a_range_is_left_alone():
    observer = guard_observers(ao.PlaceholderObserver())
    assert observer(batch(INF)).isinf().any()


def test_a_model_without_observers_is_refused():
    with pytest.raises(ConfigError, match=r"Linear has no fake-quantise.*prepare_qat"):
        guard_observers(nn.Linear(2, 2))


def stepped(model, scaler, optimizer, x):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@each_config
@pytest.mark.parametrize("guarded", [True, False])
def test_a_skipped_step_under_the_scaler_leaves_a_model_that_trains(config, guarded):
    model = prepared(config)
    if guarded:
        guard_observers(model)
    else:
        # Without the guard, the scaler sets the buffers back.
        for module in list(model.modules()):
            if isinstance(module, ao.FakeQuantizeBase):
                fp32_island(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = GradScaler("cpu", model=model, guard_buffers=not guarded)
    applied = []
    for bad in (None, INF, None):
        stepped(model, scaler, optimizer, batch(bad))
        applied.append(scaler.last.applied)
    assert applied == [True, False, True]
    assert all(values.isfinite().all() for values in ranges(model).values())


@pytest.mark.parametrize("guarded", [True, False])
def test_only_the_guard_helps_where_the_gradients_are_finite(guarded):
    # Observation without fake-quantisation, and ReLU6 after an overflow: loss and
    # gradients are finite, the step is applied, and the scaler sets nothing back.
    model = prepared(CONFIGS["plain"])
    if guarded:
        guard_observers(model)
    model.apply(ao.disable_fake_quant)
    with torch.no_grad():
        model[1].weight.fill_(1000.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = GradScaler("cpu", init_scale=8.0, model=model, guard_buffers=True)
    stepped(model, scaler, optimizer, torch.full((8, 4), 0.1))
    stepped(model, scaler, optimizer, torch.full((8, 4), 1000.0))
    assert scaler.last.applied
    observer = model[1].activation_post_process.activation_post_process
    assert observer.max_val.isfinite() == guarded


# --- the learnable step size ----------------------------------------------------------


def lsq_gradient(x, scale, qmax):
    """Return the gradient of the sum of outputs to the step size, as in the paper."""
    level = x / scale
    inside = (level >= -qmax - 1) & (level <= qmax)
    each = torch.where(inside, level.round() - level, level.clamp(-qmax - 1, qmax))
    return each.sum() / math.sqrt(x.numel() * qmax)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_gradient_is_that_of_lsq(bits):
    x = 5.0 * batch()
    quantize = LearnableFakeQuantize(0.1, bits=bits)
    quantize(x).sum().backward()
    expected = lsq_gradient(x, torch.tensor(0.1), 2 ** (bits - 1) - 1)
    torch.testing.assert_close(quantize.scale.grad, expected)


def test_inputs_inside_the_range_get_the_gradient_and_others_none():
    x = torch.tensor([0.3, 100.0], requires_grad=True)
    LearnableFakeQuantize(0.1, bits=4)(x).sum().backward()
    assert x.grad.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_training_and_evaluation_give_the_same_values(axis):
    x = batch()
    quantize = LearnableFakeQuantize.of(x, axis=axis)
    torch.testing.assert_close(quantize(x), quantize.eval()(x))
    assert quantize.scale.shape == (() if axis is None else (x.shape[axis],))


def test_a_float16_input_is_divided_in_float32():
    quantize = LearnableFakeQuantize(1e-4)
    x = torch.tensor([100.0, -100.0], dtype=torch.float16, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        output = quantize(x)
    # x / scale is 1e6, which float16 cannot hold.
    assert output.dtype is torch.float16
    torch.testing.assert_close(
        output.detach().float(), torch.tensor([127e-4, -128e-4]), rtol=1e-3, atol=0.0
    )
    output.sum().backward()
    assert quantize.scale.grad.isfinite()


def one_step(scaler, weight=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(LearnableFakeQuantize(0.05), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stepped(model, scaler, optimizer, weight * batch())
    return model[0].scale.detach()


def test_the_step_size_is_unscaled_like_any_parameter():
    plain = one_step(GradScaler("cpu", enabled=False))
    for scale in (2.0, 2.0**10):
        scaled = one_step(GradScaler("cpu", init_scale=scale))
        torch.testing.assert_close(scaled, plain, rtol=1e-3, atol=0.0)
    assert plain != 0.05


@pytest.mark.parametrize("axis", [None, 1])
def test_a_step_size_that_was_cast_with_its_model_works(axis):
    model = nn.Sequential(LearnableFakeQuantize.of(batch(), axis=axis), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, scaler = initialize(
        model, optimizer, "O2", policy=DynamicScale(init_scale=8.0)
    )
    before = model[0].scale.clone()
    scaler.scale(model(batch()).square().mean()).backward()
    scaler.step(optimizer)
    assert before.dtype is torch.float16
    assert optimizer.state[model[0].scale]["master"].ne(before).all()
    torch.testing.assert_close(model(batch()), model.eval()(batch()))


def test_an_overflow_leaves_the_step_size():
    assert one_step(GradScaler("cpu"), weight=NAN) == torch.tensor(0.05)


def test_a_step_size_that_a_step_made_negative_is_positive_again():
    quantize = LearnableFakeQuantize(0.1)
    with torch.no_grad():
        quantize.scale.fill_(-1.0)
    assert quantize(batch()).isfinite().all()
    with torch.no_grad():
        quantize.scale.fill_(-1.0)
    assert quantize.eval().scale > 0.0


@pytest.mark.parametrize("scale", [0.0, -1.0, INF, NAN, torch.ones(2)])
def test_a_scale_that_cannot_work_is_refused(scale):
    with pytest.raises(ConfigError, match=r"scale=.*positive and finite.*GS101"):
        LearnableFakeQuantize(scale)


@pytest.mark.parametrize("bits", [1, 9])
def test_a_width_that_cannot_work_is_refused(bits):
    with pytest.raises(ConfigError, match=f"bits={bits}"):
        LearnableFakeQuantize(0.1, bits=bits)


def test_a_tensor_that_overflowed_gives_no_step_size():
    with pytest.raises(ConfigError, match="without infinity and NaN"):
        LearnableFakeQuantize.of(batch(INF))


def test_a_step_size_is_learned():
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))
    quantize = LearnableFakeQuantize(0.001, bits=4)
    optimizer = torch.optim.Adam(quantize.parameters(), 0.01)
    scaler = GradScaler("cpu")
    errors = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (quantize(x) - x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        errors.append(loss.item())
    assert errors[-1] < 0.05 * errors[0]
