"""The replay locates the first non-finite value, in models of many kinds."""

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradscale.errors import ConfigError
from gradscale.torch.locate.diagnose import diagnose
from tests.torch.locate.nets import poisoned


class Around(nn.Module):
    """Two linear layers with a given function between them."""

    def __init__(self, between, dtype=torch.float16):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.last = nn.Linear(2, 2, bias=False)
        self.between = between
        nn.init.eye_(self.first.weight)
        nn.init.eye_(self.last.weight)
        self.to(dtype)

    def forward(self, x):
        return self.last(self.between(self.first(x)))


def ones(dtype=torch.float16):
    return torch.ones(2, 2, dtype=dtype)


def diagnosed(model, x=None, scale=1.0):
    x = ones() if x is None else x
    return diagnose(model, lambda: model(x).float().sum(), scale)


# --- ordinary overflow ----------------------------------------------------------------


def test_an_overflow_in_backward_alone_is_located_there():
    model = Around(lambda x: x)
    found = diagnosed(model, scale=2.0**17)
    assert (found.direction, found.kind, found.loss_finite) == ("backward", "inf", True)
    assert found.forward_peak == 4.0
    assert (found.count, found.elements) == (4, 4)


def test_the_largest_scale_without_an_overflow_is_found():
    found = diagnosed(Around(lambda x: x), scale=2.0**17)
    # The gradient of the last weight is 2 * scale, and 2 * 2^15 overflows float16.
    assert found.fits_at == 2.0**14
    assert "S <= 2^14 is needed" in found.before


def test_a_gradient_that_overflows_at_any_scale_has_no_fitting_scale():
    model = Around(lambda x: (x - x).sqrt() * 1.0)
    found = diagnosed(model)
    assert (found.direction, found.operation) == ("backward", "sqrt")
    assert found.searched
    assert found.fits_at is None
    assert "no lower scale helps" in found.text()


def test_the_gradient_of_a_weight_is_named_by_the_weight():
    layer = nn.Linear(1, 1, bias=False).half()
    nn.init.constant_(layer.weight, 2.0**-10)
    x = torch.full((1, 1), 2.0**14).half()
    found = diagnose(layer, lambda: layer(x).float().sum(), 4.0)
    assert found.tensor == "gradient of weight"
    assert found.peak == 2.0**14


def test_gradients_that_overflow_only_in_their_sum_are_named():
    model = Around(lambda x: x + x)
    nn.init.constant_(model.last.weight, 1.0)
    found = diagnosed(model, torch.full((1, 2), 2.0**-10).half(), scale=2.0**14)
    assert (found.direction, found.module, found.kind) == ("backward", "first", "inf")
    assert found.tensor == "grad_output"


def test_a_finite_batch_is_reported_as_finite():
    found = diagnosed(Around(lambda x: x))
    assert not found.found
    assert found.text().startswith("  where   nowhere: the loss and all gradients are")


# --- forward --------------------------------------------------------------------------


def test_a_functional_operation_between_modules_belongs_to_the_one_that_called_it():
    found = diagnosed(Around(lambda x: (x * 300.0) * 300.0))
    assert (found.module, found.module_class) == ("", "Around")
    assert (found.operation, found.tensor, found.peak) == ("mul", "output", 300.0)
    assert "test_diagnose.py:" in found.line


def test_an_overflow_that_turns_into_nan_is_named_before_the_nan():
    found = diagnosed(Around(lambda x: (x * 300.0) * 300.0 - (x * 300.0) * 300.0))
    assert (found.operation, found.kind) == ("mul", "inf")
    assert found.context == "it became NaN in sub of the model itself (Around)"


def test_a_fully_masked_softmax_is_named_and_the_mask_is_context():
    mask = torch.tensor([[True, True], [True, False]])
    model = Around(lambda x: x.masked_fill(mask, float("-inf")).softmax(-1))
    found = diagnosed(model)
    assert (found.operation, found.kind, found.count) == ("softmax", "nan", 2)
    assert found.context == "the inf came from masked_fill of the model itself (Around)"
    assert found.pattern.name == "masked_row"


def test_an_inf_that_does_not_reach_the_loss_is_no_culprit():
    mask = torch.tensor([[True, False], [True, False]])
    model = Around(lambda x: x.masked_fill(mask, float("-inf")).softmax(-1))
    assert not diagnosed(model).found


def test_an_overflow_comes_before_an_infinite_constant():
    mask = torch.tensor([[True, False], [True, False]])
    model = Around(lambda x: x)

    def closure():
        x = model(ones())
        given = x.masked_fill(mask, float("inf"))
        return (given + (x * 300.0) * 300.0).float().sum()

    found = diagnose(model, closure, 1.0)
    assert (found.operation, found.count) == ("mul", 4)


def test_a_branch_that_where_discards_is_located_in_backward():
    model = Around(lambda x: torch.where(x > 2.0, torch.log(x - x), x))
    found = diagnosed(model)
    assert (found.direction, found.operation, found.kind) == ("backward", "log", "nan")


def test_a_weight_that_is_not_finite_is_named():
    model = Around(lambda x: x)
    with torch.no_grad():
        model.last.weight[0, 0] = float("nan")
    found = diagnosed(model)
    assert (found.tensor, found.module) == ("parameter last.weight", "last")
    assert (found.kind, found.count, found.elements) == ("nan", 1, 4)


def test_a_weight_that_shares_memory_with_others_has_its_own_name():
    model = nn.Linear(2, 2)
    memory = torch.tensor([1.0, 1.0, 1.0, 1.0, float("inf"), 1.0])
    model.weight = nn.Parameter(memory[:4].view(2, 2))
    model.bias = nn.Parameter(memory[4:])
    found = diagnosed(model, ones(torch.float32))
    assert (found.tensor, found.kind) == ("parameter bias", "inf")


def test_a_sparse_gradient_is_measured():
    model = nn.Embedding(3, 2, sparse=True).half()
    found = diagnose(model, lambda: model(torch.tensor([1])).float().sum(), 2.0**17)
    assert (found.direction, found.kind, found.count) == ("backward", "inf", 2)


def test_a_batch_that_is_not_finite_is_named():
    x = ones()
    x[0, 0] = float("inf")
    found = diagnosed(Around(lambda x: x), x)
    assert (found.tensor, found.module, found.count) == ("input", "first", 1)


def test_a_loss_that_overflows_only_when_scaled_is_finite_before_scaling():
    model = Around(lambda x: x, torch.float32)
    x = torch.full((1, 2), 1e30)
    found = diagnose(model, lambda: model(x).sum(), 2.0**40)
    assert (found.loss_finite, found.operation, found.module) == (True, "mul", None)
    assert found.where == "forward, outside any module, mul, output: 1 of 1 inf"
    assert "test_diagnose.py:" in found.line


# --- models of many kinds -------------------------------------------------------------


def test_it_works_under_autocast():
    model = Around(lambda x: (x * 300.0) @ x.new_full((2, 2), 300.0), torch.float32)

    def closure():
        with torch.autocast("cpu", torch.float16):
            return model(ones(torch.float32)).float().sum()

    found = diagnose(model, closure, 1.0)
    assert (found.operation, found.dtype, found.module) == ("mm", "float16", "")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_is_named(reentrant):
    net = poisoned(1, "backward", depth=3)

    def closure():
        x = torch.ones(1, 4).half().requires_grad_()
        for layer in net.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return net.head(x).float().sum()

    found = diagnose(net, closure, 1024.0)
    assert found.direction == "backward"
    # Reentrant checkpointing hides the graph of the layer from its surroundings.
    assert found.module == (None if reentrant else "layers.1")


def test_an_overflow_in_a_recomputed_layer_belongs_to_the_forward_pass():
    def hidden(x):
        return torch.where(x > 2.0, x * (x * 300.0 * 300.0), x)

    model = Around(lambda x: checkpoint(hidden, x, use_reentrant=False))
    found = diagnosed(model)
    assert (found.direction, found.operation, found.kind) == ("forward", "mul", "inf")
    assert found.context.startswith("it became NaN in mul")


class Parts(nn.Module):
    """Overflows, and returns a dictionary, a dataclass and a whole number."""

    @dataclasses.dataclass
    class Result:
        value: torch.Tensor
        number: int

    def forward(self, x):
        big = (x * 300.0) * 300.0
        return {"a": (self.Result(big, 3), x.argmax(-1)), "b": [x.detach()]}


def test_modules_may_return_any_structure():
    model = nn.Sequential(nn.Linear(2, 2).half(), Parts())
    out = diagnose(model, lambda: model(ones())["a"][0].value.float().sum(), 1.0)
    assert (out.module, out.operation) == ("1", "mul")


def test_an_operation_in_place_is_named():
    found = diagnosed(Around(lambda x: x.clone().mul_(300.0).mul_(300.0)))
    assert (found.operation, found.kind) == ("mul", "inf")


def test_a_part_that_is_written_in_place_is_followed():
    def between(x):
        out = x.clone()
        out[0] = out[0] * 300.0 * 300.0
        return out

    found = diagnosed(Around(between))
    assert (found.operation, found.count, found.elements) == ("mul", 2, 2)


class Turn(nn.Module):
    """Multiplies by a complex weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0 + 0.0j, weight]))

    def forward(self, x):
        return (torch.complex(x, x) * self.weight).abs()


def test_complex_tensors_are_measured():
    found = diagnosed(Turn(complex(0.0, float("nan"))), ones(torch.float32))
    assert (found.tensor, found.count) == ("parameter weight", 1)


def test_finite_complex_tensors_are_finite():
    assert not diagnosed(Turn(1.0j), ones(torch.float32)).found


def test_an_overflow_with_tied_weights_is_located():
    model = Around(lambda x: x)
    model.last.weight = model.first.weight
    found = diagnosed(model, scale=2.0**17)
    assert (found.direction, found.kind) == ("backward", "inf")


def test_several_losses_may_be_returned():
    model = Around(lambda x: x)

    def closure():
        return model(ones()).float().sum(), {"b": model(ones()).float().sum()}

    assert diagnose(model, closure, 2.0**17).found


def test_a_half_loss_is_scaled_in_float32_as_the_scaler_does():
    model = Around(lambda x: x)
    found = diagnose(model, lambda: model(ones()).sum(), 2.0**16)
    # The product 4 * 65536 fits in float32; its gradient, 65536, not in float16.
    assert (found.direction, found.operation) == ("backward", "to_copy")
    assert found.loss_finite


def test_bfloat16_has_the_range_of_float32():
    model = Around(lambda x: x * 300.0 * 300.0, torch.bfloat16)
    assert not diagnosed(model, ones(torch.bfloat16), scale=2.0**17).found


def test_a_module_outside_the_model_is_named_by_its_class():
    class Loss(nn.Module):
        def forward(self, x):
            return (x.half() * 300.0 * 300.0).sum()

    model, outside = Around(lambda x: x), Loss()
    found = diagnose(model, lambda: outside(model(ones())), 1.0)
    assert (found.module, found.module_class) == (None, "Loss")
    assert "Loss outside the model" in found.where


def test_a_loss_without_a_graph_is_diagnosed_forward_only():
    model = Around(lambda x: x)
    found = diagnose(model, lambda: torch.log(torch.zeros(())), 1.0)
    assert (found.operation, found.kind, found.module) == ("log", "inf", None)


def test_a_closure_that_returns_no_loss_raises_an_error_with_the_remedy():
    with pytest.raises(ConfigError, match=r"NoneType, .* `return loss`"):
        diagnose(Around(lambda x: x), lambda: None, 1.0)


def test_a_compiled_model_is_replayed_without_its_compiled_code():
    ran = []

    def backend(graph, inputs):
        def compiled(*args):
            ran.append(len(args))
            return graph.forward(*args)

        return compiled

    model = Around(lambda x: (x * 300.0) * 300.0)
    compiled = torch.compile(model, backend=backend)
    compiled(ones())
    assert len(ran) == 1
    found = diagnose(compiled, lambda: compiled(ones()).float().sum(), 1.0)
    assert (found.operation, found.module) == ("mul", "_orig_mod")
    assert len(ran) == 1


def test_the_diagnosis_is_plain_data():
    found = diagnosed(Around(lambda x: functional.softmax(x, -1).log() * 1e5))
    plain = found.as_dict()
    assert plain["operation"] == found.operation
    assert json.loads(json.dumps(plain)) == plain
