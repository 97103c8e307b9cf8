"""States of other scalers that cannot be gone on with are refused, and say why."""

import pytest
import torch

import gradscale
import gradscale.torch
from gradscale import ConfigError, StateError, StaticScale
from gradscale.core.checkpoint import Saved, pack
from gradscale.core.foreign_rules import SOURCES
from tests.core.imported import SAMPLES, imported, refusal, saved_in, telling

# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    "saved",
    [
        {},
        None,
        7,
        "path",
        [],
        {"epoch": 3},
        {"scale": 65536.0},
        {"loss_scale": 128.0},
    ],
    ids=repr,
)
def test_what_nobody_is_known_to_save_is_refused(saved):
    error = refusal(saved)
    assert error.code == "GS304"
    assert "source=" in str(error)


def test_a_state_that_two_may_have_saved_must_be_named():
    error = refusal(saved_in("apex_contrib"))
    assert error.code == "GS304"
    assert "source='apex' or source='deepspeed'" in str(error)


def test_the_named_one_of_the_two_decides_the_interval():
    saved = saved_in("apex_contrib")
    intervals = [
        gradscale.import_state(saved, source=source)["growth_interval"]
        for source in ("apex", "deepspeed")
    ]
    assert intervals == [1000, 1001]


def test_a_source_that_does_not_fit_is_refused():
    error = refusal(saved_in("megatron"), source="flax")
    assert error.code == "GS304"
    assert "Megatron-Core" in str(error)


NEEDED = {
    "torch": ("scale", "_growth_tracker"),
    "megatron": ("scale", "growth_tracker"),
    "flax": ("scale",),
    "flax_msgpack": ("scale",),
    "jmp": ("period", "factor", "min_loss_scale"),
    "apex_older": ("cur_iter", "scale_factor", "scale_window"),
    "apex_fp16_optimizer": ("dynamic", "_scale_seq_len", "_max_loss_scale"),
    "deepspeed_fused": ("cur_iter", "last_overflow_iter", "scale_window"),
    "deepspeed_hysteresis": ("cur_iter", "scale_factor", "cur_hysteresis"),
    "fairseq_scaler": ("scale_window", "tolerance", "min_loss_scale"),
    "fairseq_tolerance": ("_overflows_since_rescale", "_last_rescale_iter"),
}


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in NEEDED.items() for key in keys]
)
def test_a_missing_key_is_named(name, key):
    fields = telling(name)
    del fields[key]
    error = refusal(fields, source=SAMPLES[name]["source"])
    assert error.code == "GS302"
    assert f"lacks {key}" in str(error)


SCALES = {
    "torch": "scale",
    "megatron": "scale",
    "flax": "scale",
    "jmp": "loss_scale",
    "apex_older": "cur_scale",
    "apex_fp16_optimizer": "_loss_scale",
    "deepspeed_fused": "cur_scale",
    "deepspeed_static": "cur_scale",
    "fairseq": "loss_scale",
}


@pytest.mark.parametrize(
    "scale",
    [0.0, -1.0, float("nan"), float("inf"), 10**400, True, "65536", torch.ones(2)],
    ids=lambda value: str(value)[:12],
)
@pytest.mark.parametrize(("name", "key"), SCALES.items())
def test_a_scale_that_cannot_be_used_is_refused(name, key, scale):
    error = refusal({**telling(name), key: scale})
    assert error.code == "GS302"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("torch", "_growth_tracker", -1),
        ("torch", "growth_interval", 2.5),
        ("megatron", "growth_tracker", 1.5),
        ("megatron", "growth_tracker", -3),
        ("megatron", "growth_tracker", 2**31),
        ("megatron", "hysteresis_tracker", float("nan")),
        ("flax", "fin_steps", -1),
        ("flax", "backoff_factor", 1.5),
        ("jmp", "factor", 1),
        ("jmp", "period", 0),
        ("apex_older", "scale_factor", 0.5),
        ("apex_older", "last_overflow_iter", 10**6),
        ("apex_fp16_optimizer", "dynamic", "yes"),
        ("deepspeed_fused", "scale_window", 0),
        ("deepspeed_hysteresis", "min_scale", 2.0**20),
        ("fairseq_scaler", "tolerance", 0.7),
        ("fairseq_scaler", "_last_overflow_iter", 99),
    ],
)
def test_a_value_that_cannot_be_gone_on_with_is_refused(name, key, value):
    assert refusal({**telling(name), key: value}).code == "GS302"


def test_a_source_without_a_name_is_refused():
    with pytest.raises(ConfigError, match="source='tensorflow' is not known"):
        gradscale.import_state({"scale": 1.0}, source="tensorflow")


@pytest.mark.parametrize("name", ["init_scale", "window"])
def test_a_setting_without_a_name_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is not a setting"):
        imported("megatron", **{name: 4.0})


@pytest.mark.parametrize(
    "saved",
    [saved_in("deepspeed_static"), pack(Saved(StaticScale(scale=8.0), 8.0))],
    ids=["deepspeed", "own"],
)
def test_settings_for_a_fixed_scale_are_refused(saved):
    with pytest.raises(ConfigError, match="never moves"):
        gradscale.import_state(saved, growth_interval=5)


# --- who loads such a state as it is --------------------------------------------------


FOREIGN = [name for name, sample in SAMPLES.items() if sample["source"] != "torch"]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_scaler_says_what_a_foreign_state_is_and_how_to_import_it(name):
    scaler = gradscale.torch.GradScaler("cpu", init_scale=64.0)
    with pytest.raises(StateError) as error:
        scaler.load_state_dict(saved_in(name))
    assert error.value.code == "GS304"
    assert SOURCES[SAMPLES[name]["source"]] in str(error.value)
    assert "load_state_dict(gradscale.import_state(saved" in str(error.value)
    assert scaler.get_scale() == 64.0


def test_a_state_of_torch_loads_as_it_is():
    scaler = gradscale.torch.GradScaler("cpu")
    scaler.load_state_dict(saved_in("torch"))
    assert scaler.state_dict() == imported("torch")
