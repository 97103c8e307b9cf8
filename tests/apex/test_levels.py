"""Levels, refused settings and output dtypes, as recorded from apex."""

import pytest
import torch
from torch import nn

from gradscale.apex import amp
from gradscale.apex.amp import _amp_state
from gradscale.apex.fp16_utils import FP16_Optimizer
from gradscale.errors import OrderError

LEVELS = ["O0", "O1", "O2", "O3"]


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_casts_and_scales_as_in_apex(golden, level):
    expected = golden["opt levels"][level]
    model = network()
    model, _ = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    options = _amp_state.opt_properties.options
    shown = {
        name: str(value) if isinstance(value, torch.dtype) else value
        for name, value in options.items()
    }
    assert shown == expected["options"]
    params = {name: str(p.dtype) for name, p in model.named_parameters()}
    assert params == expected["parameters"]
    saved = {name: str(t.dtype) for name, t in model.state_dict().items()}
    assert saved == expected["state_dict"]
    assert str(model(torch.randn(3, 4)).dtype) == expected["output"]
    assert amp.state_dict() == expected["amp_state_dict"]


DTYPES = {"torch.float16": torch.float16, "dynamic": "dynamic"}


def setting_of(text):
    """Return the keyword arguments behind a key such as 'O2 loss_scale=128.0'."""
    level, *rest = text.split()
    changes = {}
    for part in rest:
        name, _, value = part.partition("=")
        changes[name] = DTYPES.get(value) or eval(value)
    return {"opt_level": level, **changes}


@pytest.mark.parametrize("change", range(33))
def test_a_setting_is_taken_or_refused_as_in_apex(golden, change):
    refusals = golden["refusals"]
    cases = [key for key in refusals if key.startswith("O")]
    assert len(cases) == 33
    key = cases[change]
    expected, model = refusals[key], network()
    optimizer = sgd(model)
    if expected["error"] is not None:
        kind = {"RuntimeError": RuntimeError, "AssertionError": AssertionError}
        with pytest.raises(kind[expected["error"]]):
            amp.initialize(model, optimizer, verbosity=0, **setting_of(key))
        return
    amp.initialize(model, optimizer, verbosity=0, **setting_of(key))
    assert _amp_state.loss_scalers[0].loss_scale() == expected["loss_scale"]


def test_a_half_model_is_refused_and_can_be_allowed():
    with pytest.raises(RuntimeError, match=r"0.weight is in float16.*\.half\(\)"):
        amp.initialize(network().half(), verbosity=0)
    _amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(network().half(), opt_level="O2", verbosity=0)


def test_an_optimizer_is_given_once():
    model = network()
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="twice"):
        amp.initialize(model, [optimizer, optimizer], verbosity=0)
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    with pytest.raises(RuntimeError, match="twice"):
        amp.initialize(model, optimizer, opt_level="O0", verbosity=0)


def test_what_is_no_model_or_optimizer_is_refused():
    model = network()
    with pytest.raises(RuntimeError, match="str as a model"):
        amp.initialize("model", verbosity=0)
    with pytest.raises(RuntimeError, match="dict as an optimizer"):
        amp.initialize(model, {}, verbosity=0)
    with pytest.raises(RuntimeError, match="FP16_Optimizer"):
        amp.initialize(model, FP16_Optimizer(sgd(model)), verbosity=0)
    with pytest.raises(RuntimeError, match="DataParallel"):
        amp.initialize(nn.DataParallel(model), verbosity=0)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_initialize_twice_does_not_nest(level):
    model = network()
    amp.initialize(model, opt_level=level, verbosity=0)
    first = model.__dict__.get("forward")
    amp.initialize(model, opt_level=level, verbosity=0)
    second = model.__dict__.get("forward")
    assert getattr(second, "before", None) is None
    assert (first is None) == (second is None)
    assert torch._C._len_torch_function_stack() == (1 if level == "O1" else 0)


def test_the_shape_of_the_arguments_is_that_of_the_result():
    a, b = network(), network()
    one, two = sgd(a), sgd(b)
    assert amp.initialize(a, opt_level="O0", verbosity=0) is a
    models, optimizers = amp.initialize([a, b], [one, two], opt_level="O0", verbosity=0)
    assert models == [a, b]
    assert optimizers == [one, two]


def test_a_level_in_the_place_of_enabled_is_refused():
    with pytest.raises(RuntimeError, match="Pass opt_level='O2' by name"):
        amp.initialize(network(), None, "O2")


def test_disabled_amp_does_nothing():
    model = network()
    optimizer = sgd(model)
    returned = amp.initialize(model, optimizer, enabled=False, opt_level="O2")
    assert returned == (model, optimizer)
    loss = model(torch.randn(3, 4)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert model[0].weight.dtype is torch.float32


def test_scale_loss_before_initialize_is_refused():
    with pytest.raises(OrderError, match=r"before amp.initialize\(\)"):
        amp.scale_loss(torch.ones(()), None).__enter__()


def test_a_loss_without_a_scale_is_refused():
    model = network()
    model, optimizer = amp.initialize(model, sgd(model), opt_level="O0", verbosity=0)
    with pytest.raises(RuntimeError, match="num_losses=3"):
        amp.scale_loss(torch.ones(()), optimizer, loss_id=2).__enter__()


def test_an_optimizer_that_was_not_given_is_refused():
    model = network()
    amp.initialize(model, opt_level="O0", verbosity=0)
    with pytest.raises(RuntimeError, match=r"SGD was not given to amp\.initialize"):
        amp.scale_loss(torch.ones(()), sgd(model)).__enter__()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_outputs_can_be_cast(level):
    model = network()
    model = amp.initialize(
        model, opt_level=level, cast_model_outputs=torch.float16, verbosity=0
    )
    assert model(torch.randn(3, 4)).dtype is torch.float16


def test_a_line_names_the_settings_and_each_overflow(caplog):
    caplog.set_level("INFO")
    model = network()
    model, optimizer = amp.initialize(model, sgd(model), opt_level="O2")
    with amp.scale_loss(1e30 * model(torch.randn(3, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    printed = caplog.text
    assert "opt_level=O2" in printed
    assert "loss 0 were not finite; its scale is now 32768" in printed


def test_verbosity_0_prints_nothing(caplog, capsys):
    caplog.set_level("INFO")
    model = network()
    model, optimizer = amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    with amp.scale_loss(1e30 * model(torch.randn(3, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    out, err = capsys.readouterr()
    assert out == err == caplog.text == ""
