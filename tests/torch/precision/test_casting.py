"""Casts around a forward pass, and islands of f32."""

import copy
import inspect
import pickle
from collections import namedtuple
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch

from gradscale.torch import fp32_island, initialize
from gradscale.torch.precision.casting import CastForward, cast

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Pair = namedtuple("Pair", "first second")


class Output(dict):
    """A dict that is made by keywords, as those of transformers are."""

    def __init__(self, **items):
        super().__init__(items)


@dataclass(frozen=True)
class Record:
    """A dataclass, as many models return."""

    x: Any
    n: int = 3


@dataclass
class Cache:
    """A dataclass whose constructor takes what no field has."""

    x: Any
    size: InitVar[int]
    offset: int = field(default=0, init=False)

    def __post_init__(self, size):
        self.capacity = size


def test_a_dataclass_is_cast_without_its_constructor():
    cache = Cache(torch.ones(1), 8)
    cache.offset = 5
    made = cast(cache, F16)
    assert (made.x.dtype, made.offset, made.capacity) == (F16, 5, 8)
    assert (cache.x.dtype, made is cache) == (F32, False)


@pytest.mark.parametrize("x", [None, "text", [1, 2], {"n": 1}, torch.ones(1).half()])
def test_a_dataclass_without_a_tensor_to_cast_is_the_same_object(x):
    cache = Cache(x, 8)
    assert cast(cache, F16) is cache


@pytest.mark.parametrize(
    "nest",
    [
        torch.ones(1),
        [torch.ones(1)],
        (torch.ones(1), "text"),
        Pair(torch.ones(1), None),
        {"x": [torch.ones(1)]},
        Output(x=torch.ones(1)),
        Record(torch.ones(1)),
        [Record],
    ],
)
def test_a_nest_keeps_its_type_and_its_tensors_are_cast(nest):
    made = cast(nest, F16)
    assert type(made) is type(nest)
    found = []

    def visit(value):
        if isinstance(value, torch.Tensor):
            found.append(value.dtype)
        elif isinstance(value, dict):
            list(map(visit, value.values()))
        elif isinstance(value, (list, tuple)):
            list(map(visit, value))
        elif isinstance(value, Record):
            visit(value.x)

    visit(made)
    assert found == ([] if nest == [Record] else [F16])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_left(dtype):
    value = torch.ones(1, dtype=dtype)
    assert cast(value, F16) is value


class Half(torch.nn.Module):
    """Records the dtypes of its computation and of the gradient that arrives."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.dtypes = {}

    def forward(self, x):
        hidden = self.layer(x)
        self.dtypes = {"input": x.dtype, "hidden": hidden.dtype}
        if hidden.requires_grad:
            hidden.register_hook(lambda g: self.dtypes.update(gradient=g.dtype))
        return hidden


@pytest.mark.parametrize("half", [F16, BF16])
def test_an_island_computes_in_float32_inside_autocast(half):
    island, after = fp32_island(Half().to(half)), torch.nn.Linear(2, 1)
    with torch.autocast("cpu", half):
        out = after(island(torch.ones(1, 2, dtype=half)))
    out.float().sum().backward()
    assert set(island.dtypes.values()) == {F32}
    assert island.dtypes.keys() == {"input", "hidden", "gradient"}
    assert island.layer.weight.grad.dtype is F32
    assert out.dtype is half


def test_without_an_island_autocast_computes_in_half_precision():
    module = Half()
    with torch.autocast("cpu", BF16):
        module(torch.ones(1, 2))
    assert module.dtypes["hidden"] is BF16


def test_an_island_keeps_values_that_float16_has_not():
    squares = fp32_island(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.constant_(squares.weight, 1000.0)
    with torch.autocast("cpu", F16):
        assert squares(torch.full((1, 1), 1000.0)).item() == 1e6


def test_an_island_in_a_half_model_returns_its_dtype():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)).half()
    fp32_island(model[1], outputs=F16)
    assert model(torch.ones(1, 2, dtype=F16)).dtype is F16
    assert model[1].weight.dtype is F32


def test_a_second_call_changes_nothing():
    module = fp32_island(torch.nn.Linear(2, 1))
    first = module.forward
    assert fp32_island(module).forward is first


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_island_stays_one_when_the_model_around_it_is_cast(level):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Half(), torch.nn.Linear(2, 1))
    fp32_island(model[1])
    model, _, _ = initialize(model, None, level)
    model(torch.ones(1, 2)).sum().backward()
    assert set(model[1].dtypes.values()) == {F32}
    assert {param.dtype for param in model[1].parameters()} == {F32}
    assert model[2].weight.dtype is (F32 if level in ("O0", "O1") else F16)


def test_an_island_without_weights_runs_where_its_input_is():
    softmax = fp32_island(torch.nn.Softmax(-1))
    with torch.autocast("cpu", BF16):
        assert softmax(torch.ones(1, 2, dtype=BF16)).dtype is F32


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_of_a_cast_model_uses_its_own_weights(copied):
    model, _, _ = initialize(torch.nn.Linear(2, 1), None, "O2")
    other = copied(model)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    x = torch.ones(1, 2)
    assert other(x).item() == 0.0
    assert model(x).item() != 0.0


def test_names_class_and_signature_are_those_of_the_model():
    model = torch.nn.Linear(2, 1)
    keys = list(model.state_dict())
    initialize(model, None, "O2")
    assert list(model.state_dict()) == keys
    assert type(model) is torch.nn.Linear
    assert list(inspect.signature(model.forward).parameters) == ["input"]


def test_a_forward_that_was_replaced_before_is_called():
    model = torch.nn.Linear(2, 1)
    model.forward = lambda x: x + 1
    model.forward = CastForward(model, inputs=F16)
    assert model(torch.ones(1)).dtype is F16
    assert list(inspect.signature(model.forward).parameters) == ["x"]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_compiled_model_is_one_graph_with_the_same_result(level):
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    initialize(model, None, level)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(2, 3)
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_model_at_a_level_is_exported(level):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    fp32_island(model)
    outer = torch.nn.Sequential(model, torch.nn.Linear(2, 1))
    outer, _, _ = initialize(outer, None, level)
    x = torch.ones(3, 2)
    exported = torch.export.export(outer.eval(), (x,)).module()
    assert torch.equal(exported(x), outer(x))


def test_a_compiled_island_is_one_graph():
    torch._dynamo.reset()
    module = fp32_island(torch.nn.Linear(2, 1))
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with torch.autocast("cpu", BF16):
        assert compiled(torch.ones(1, 2, dtype=BF16)).dtype is F32


def test_hooks_of_the_model_see_what_goes_in_and_comes_out():
    model, _, _ = initialize(torch.nn.Linear(2, 1), None, "O2")
    seen = []
    model.register_forward_hook(lambda m, a, out: seen.append((a[0].dtype, out.dtype)))
    model(torch.ones(1, 2))
    assert seen == [(F32, F32)]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_replica_uses_its_own_weights(level):
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1)).eval()
    initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level, device="cpu")
    x = torch.ones(3, 2)
    expected = model(x)
    # As `torch.nn.parallel.replicate` does for each device.
    replica = model._replicate_for_data_parallel()
    for name, part in model.named_children():
        child = part._replicate_for_data_parallel()
        for key, param in part.named_parameters():
            setattr(child, key, torch.zeros_like(param))
        setattr(replica, name, child)
    assert replica(x).tolist() == [[0.0]] * 3
    assert replica(x).dtype is expected.dtype
    assert torch.equal(model(x), expected)
    assert replica.forward.module is replica


def test_a_replica_of_an_island_inside_other_casts_uses_its_own_weights():
    layer = fp32_island(torch.nn.Linear(2, 1))
    CastForward(layer, outputs=F16).install()
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(1, 2), torch.ones(1)
    result = replica(torch.ones(1, 2, dtype=F16))
    assert result.dtype is F16
    assert result.item() == 1.0
    layer.forward.remove()
    assert layer(torch.ones(1, 2)).dtype is F32


@pytest.mark.parametrize("padded", [False, True])
def test_torchs_encoder_is_evaluated_with_its_norms_in_float32(padded):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, _, _ = initialize(torch.nn.TransformerEncoder(layer, 2), None, "O2")
    batch, padding = torch.ones(2, 3, 8), torch.zeros(2, 3, dtype=torch.bool)
    padding[1, 2] = padded
    seen = []
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            forward = module.forward
            module.forward = lambda x, call=forward: seen.append(x.dtype) or call(x)
    model.eval()
    with torch.no_grad():
        out = model(batch, src_key_padding_mask=padding)
    assert out.dtype is F32
    assert len(seen) == 4
