"""O1 casts every function of apex's lists as apex does, and leaves torch alone."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradscale.apex import amp
from gradscale.apex.amp.lists import (
    functional_overrides,
    tensor_overrides,
    torch_overrides,
)

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture
def handle():
    return amp.init()


# --- the lists ------------------------------------------------------------------------


def test_the_lists_are_those_of_apex(golden):
    lists = golden["lists"]
    functional, ours, tensor = (
        lists[name] for name in ("torch.nn.functional", "torch", "torch.Tensor")
    )
    assert functional["half"] == functional_overrides.FP16_FUNCS
    assert functional["single"] == functional_overrides.FP32_FUNCS
    assert [n for n, _ in functional_overrides.BANNED_FUNCS] == functional["banned"]
    assert ours["half"] == torch_overrides.FP16_FUNCS
    assert ours["single"] == torch_overrides.FP32_FUNCS
    assert ours["promote"] == torch_overrides.CASTS
    assert ours["promote sequences"] == torch_overrides.SEQUENCE_CASTS
    assert tensor["half"] == tensor_overrides.FP16_FUNCS
    assert tensor["single"] == tensor_overrides.FP32_FUNCS
    assert sorted(tensor_overrides.CASTS) == sorted(tensor["promote"])


def matrix(*shape):
    return torch.rand(*(shape or (4, 4))) * 0.5 + 0.25


# The arguments of each function of the lists; a matrix for those that are not here.
TWO, THREE = [matrix(), matrix()], [matrix(), matrix(), matrix()]
ARGUMENTS = {
    "conv1d": [matrix(1, 2, 4), matrix(2, 2, 2)],
    "conv2d": [matrix(1, 2, 4, 4), matrix(2, 2, 2, 2)],
    "conv3d": [matrix(1, 1, 2, 2, 2), matrix(1, 1, 2, 2, 2)],
    "conv_transpose1d": [matrix(1, 2, 4), matrix(2, 2, 2)],
    "conv_transpose2d": [matrix(1, 2, 4, 4), matrix(2, 2, 2, 2)],
    "conv_transpose3d": [matrix(1, 1, 2, 2, 2), matrix(1, 1, 2, 2, 2)],
    "conv_tbc": [matrix(4, 1, 2), matrix(2, 2, 2), matrix(2)],
    "linear": TWO,
    "prelu": [matrix(), matrix(1)],
    "addmm": THREE,
    "addmv": [matrix(4), matrix(), matrix(4)],
    "addr": [matrix(), matrix(4), matrix(4)],
    "matmul": TWO,
    "__matmul__": TWO,
    "mm": TWO,
    "mv": [matrix(), matrix(4)],
    "addbmm": [matrix(), matrix(2, 4, 4), matrix(2, 4, 4)],
    "baddbmm": [matrix(2, 4, 4), matrix(2, 4, 4), matrix(2, 4, 4)],
    "bmm": [matrix(2, 4, 4), matrix(2, 4, 4)],
    "interpolate": [matrix(1, 1, 4, 4), 8],
    "grid_sample": [matrix(1, 1, 4, 4), matrix(1, 2, 2, 2)],
    "softmin": [matrix(), 1],
    "log_softmax": [matrix(), 1],
    "softmax": [matrix(), 1],
    "layer_norm": [matrix(), (4,)],
    "group_norm": [matrix(2, 4, 4), 2],
    "local_response_norm": [matrix(1, 2, 4), 2],
    "cosine_similarity": TWO,
    "poisson_nll_loss": TWO,
    "cosine_embedding_loss": [matrix(), matrix(), torch.ones(4)],
    "cross_entropy": [matrix(), torch.zeros(4).long()],
    "hinge_embedding_loss": TWO,
    "kl_div": [matrix(), matrix()],
    "l1_loss": TWO,
    "mse_loss": TWO,
    "margin_ranking_loss": THREE,
    "multilabel_margin_loss": [matrix(), torch.zeros(4, 4).long()],
    "multilabel_soft_margin_loss": TWO,
    "multi_margin_loss": [matrix(), torch.zeros(4).long()],
    "nll_loss": [matrix(), torch.zeros(4).long()],
    "binary_cross_entropy_with_logits": TWO,
    "smooth_l1_loss": TWO,
    "soft_margin_loss": TWO,
    "triplet_margin_loss": THREE,
    "ctc_loss": [
        matrix(4, 1, 3),
        torch.ones(1, 2).long(),
        torch.tensor([4]),
        torch.tensor([2]),
    ],
    "pow": [matrix(), 2.0],
    "__pow__": [matrix(), 2.0],
    "__rpow__": [matrix(), 2.0],
    "cumprod": [matrix(), 0],
    "cumsum": [matrix(), 0],
    "dist": TWO,
    "renorm": [matrix(), 1, 0, 1.0],
    "addcdiv": THREE,
    "addcmul": THREE,
    "cross": [matrix(4, 3), matrix(4, 3)],
    "bilinear": [matrix(4, 2), matrix(4, 2), matrix(2, 2, 2)],
    "dot": [matrix(4), matrix(4)],
    "cat": [TWO],
    "stack": [TWO],
}
KEYWORDS = {
    "kl_div": {"reduction": "batchmean"},
    "grid_sample": {"align_corners": False},
    "cross": {"dim": 1},
}
PLACES = [
    pytest.param(overrides.MODULE, name, id=f"{overrides.MODULE.__name__}.{name}")
    for overrides in (functional_overrides, torch_overrides, tensor_overrides)
    for name in overrides.FP16_FUNCS
]
SINGLE = [
    pytest.param(overrides.MODULE, name, id=f"{overrides.MODULE.__name__}.{name}")
    for overrides in (functional_overrides, torch_overrides, tensor_overrides)
    for name in overrides.FP32_FUNCS
    if name != "__ipow__"
]
PROMOTED = [
    pytest.param(overrides.MODULE, name, id=f"{overrides.MODULE.__name__}.{name}")
    for overrides in (torch_overrides, tensor_overrides)
    for name in (*overrides.CASTS, *overrides.SEQUENCE_CASTS)
]


def cast(value, dtype):
    if isinstance(value, list):
        return [cast(item, dtype) for item in value]
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype, copy=True) if floating else value


def call(module, name, arguments):
    return getattr(module, name)(*arguments, **KEYWORDS.get(name, {}))


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize(("module", "name"), PLACES)
def test_a_function_of_the_half_list_returns_half(handle, module, name, dtype):
    arguments = cast(ARGUMENTS.get(name, [matrix()]), dtype)
    arguments[0].requires_grad_()
    result = call(module, name, arguments)
    assert result.dtype is HALF
    result.float().sum().backward()
    assert arguments[0].grad.dtype is dtype


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize(("module", "name"), SINGLE)
def test_a_function_of_the_single_list_returns_f32(handle, module, name, dtype):
    arguments = cast(ARGUMENTS.get(name, [matrix()]), dtype)
    arguments[0].requires_grad_()
    result = call(module, name, arguments)
    assert result.dtype is FLOAT
    result.sum().backward()
    assert arguments[0].grad.dtype is dtype


@pytest.mark.parametrize("first", [FLOAT, HALF])
@pytest.mark.parametrize("second", [FLOAT, HALF])
@pytest.mark.parametrize(("module", "name"), PROMOTED)
def test_a_function_of_the_promote_list_takes_the_widest(
    handle, module, name, first, second
):
    arguments = ARGUMENTS.get(name, TWO)
    if name in torch_overrides.SEQUENCE_CASTS:
        arguments = [[cast(arguments[0][0], first), cast(arguments[0][1], second)]]
    else:
        arguments = [cast(arguments[0], first), *cast(arguments[1:], second)]
    result = call(module, name, arguments)
    if isinstance(result, bool) or result.dtype is torch.bool:
        return
    widest = FLOAT if FLOAT in (first, second) else HALF
    if name in ("__rdiv__", "__rtruediv__"):
        # Its body calls `reciprocal`, of the single list, as in apex.
        widest = FLOAT
    elif name.startswith("__i"):
        # Apex rebinds the name to a new f32 tensor; here the tensor is written.
        widest = first
    assert result.dtype is widest


@pytest.mark.parametrize("name", [f"{name}_" for name in tensor_overrides.FP32_FUNCS])
def test_an_in_place_method_of_the_single_list_refuses_half(handle, name):
    if not hasattr(torch.Tensor, name):
        return
    arguments = ARGUMENTS.get(name[:-1], [matrix()])
    own = arguments[0].clone()
    assert getattr(own, name)(*cast(arguments[1:], HALF)) is own
    with pytest.raises(NotImplementedError, match=f"Tensor.{name} was given float16"):
        getattr(own.half(), name)(*arguments[1:])


@pytest.mark.parametrize("name", ["exp_", "log_", "rsqrt_"])
def test_an_in_place_function_of_the_single_list_refuses_half(handle, name):
    with pytest.raises(NotImplementedError, match="in-place function"):
        getattr(torch, name)(matrix().half())
    getattr(torch, name)(matrix())


def test_a_power_in_place_refuses_half(handle):
    x = matrix().half()
    with pytest.raises(NotImplementedError, match="float16"):
        x **= 2


@pytest.mark.parametrize("name", ["add_", "mul_", "div_", "addmm_", "addcmul_"])
@pytest.mark.parametrize("own", [FLOAT, HALF])
@pytest.mark.parametrize("other", [FLOAT, HALF])
def test_other_in_place_methods_keep_their_own_dtype(handle, name, own, other):
    first, *rest = ARGUMENTS.get(name[:-1], TWO)
    leaf = cast(first, own).requires_grad_()
    x = leaf.clone()
    assert getattr(x, name)(*cast(rest, other)).dtype is own
    x.float().sum().backward()
    assert leaf.grad.dtype is own


@pytest.mark.parametrize("loss", [nn.BCELoss(), F.binary_cross_entropy])
def test_the_banned_function_refuses_half(handle, loss):
    target = torch.ones(2, 2)
    with pytest.raises(NotImplementedError, match="with_logits"):
        loss(matrix(2, 2).half(), target)
    assert loss(matrix(2, 2), target).dtype is FLOAT


def test_the_banned_function_can_be_allowed():
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(matrix().half(), matrix()).dtype is FLOAT


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("layer", [nn.ReLU(), F.relu, nn.BatchNorm1d(4), nn.Tanh()])
def test_other_functions_match_their_input(handle, layer, dtype):
    assert layer(matrix().to(dtype)).dtype is dtype


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(4, 2), nn.Bilinear(4, 4, 2), nn.Conv1d(4, 2, 2), nn.LayerNorm(4)],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_modules_are_cast_through_their_functions(handle, layer, dtype):
    inputs = [matrix().to(dtype)] * (2 if isinstance(layer, nn.Bilinear) else 1)
    half = isinstance(layer, (nn.Linear, nn.Conv1d))
    result = layer(*inputs)
    assert result.dtype is (HALF if half else FLOAT)
    result.float().sum().backward()
    assert layer.weight.grad.dtype is FLOAT


# --- functions of torch in Python -----------------------------------------------------

IMAGE, VOLUME = torch.rand(1, 2, 8, 8), torch.rand(1, 2, 4, 4, 4)
# Arguments of functions that dispatch in a function behind the public one.
BEHIND = {
    "max_pool1d": (F.max_pool1d, IMAGE[0], 2),
    "max_pool2d": (F.max_pool2d, IMAGE, 2),
    "max_pool3d": (F.max_pool3d, VOLUME, 2),
    "adaptive_max_pool1d": (F.adaptive_max_pool1d, IMAGE[0], 2),
    "adaptive_max_pool2d": (F.adaptive_max_pool2d, IMAGE, 2),
    "adaptive_max_pool3d": (F.adaptive_max_pool3d, VOLUME, 2),
    "fractional_max_pool2d": (F.fractional_max_pool2d, IMAGE, 2, 3),
    "fractional_max_pool3d": (F.fractional_max_pool3d, VOLUME, 2, 2),
    "unique": (torch.unique, torch.arange(4)),
    "unique_consecutive": (torch.unique_consecutive, torch.arange(4)),
    "meshgrid": (lambda x: torch.meshgrid(x, x, indexing="ij")[0], torch.arange(4)),
    "lu": (lambda x: torch.functional.lu(x)[0], torch.rand(4, 4)),
}


@pytest.mark.filterwarnings("ignore:torch.lu is deprecated")
@pytest.mark.parametrize("name", BEHIND)
def test_a_function_with_its_dispatch_in_another_is_called(name):
    function, *args = BEHIND[name]
    # The fractional ones draw random numbers.
    torch.manual_seed(0)
    expected = function(*args)
    amp.init()
    torch.manual_seed(0)
    assert torch.equal(function(*args), expected)


EVERY = {
    f"{module.__name__}.{name}": function
    for module in (F, torch.functional)
    for name, function in vars(module).items()
    if callable(function)
    and not name.startswith("_")
    and not isinstance(function, type)
}


@pytest.mark.parametrize("name", EVERY)
def test_no_function_of_torch_recurses_without_end(handle, name):
    # Most functions refuse most of these arguments.
    for args in [
        (IMAGE,),
        (IMAGE, 2),
        (IMAGE[0], 2),
        (VOLUME, 2),
        *[(torch.rand(4, 4),) * count for count in (1, 2, 3)],
        (torch.arange(4),),
        ("ij->i", torch.rand(4, 4)),
    ]:
        try:
            EVERY[name](*args)
        except RecursionError:
            raise
        except Exception:
            continue


def test_a_model_with_pooling_trains_as_at_o0():
    def train(level):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
        )
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.rand(4, 1, 8, 8)).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    # f16 has 11 bits.
    assert train("O1") == pytest.approx(train("O0"), rel=1e-2)


# --- where casts apply ----------------------------------------------------------------


def test_casts_apply_first_and_after_a_backward(handle):
    weight = nn.Parameter(matrix())
    assert weight.mm(weight).dtype is HALF
    weight.mm(weight).sum().backward()
    assert weight.mm(weight).dtype is HALF


def test_functions_inside_functions_of_torch_are_cast(handle):
    attention = nn.MultiheadAttention(4, 2)
    x = torch.randn(3, 2, 4).half()
    result, weights = attention(x, x, x)
    # Attention itself is on no list; its projections are half, its softmax is f32.
    assert result.dtype is HALF
    assert weights.dtype is FLOAT
    result.float().sum().backward()
    assert attention.in_proj_weight.grad.dtype is FLOAT


def test_a_recomputed_forward_pass_is_cast_alike(handle):
    layer, seen = nn.Linear(4, 4), []

    def block(x):
        seen.append(layer(x).dtype)
        return layer(x)

    x = matrix().requires_grad_()
    checkpoint(block, x, use_reentrant=False).float().sum().backward()
    assert seen == [HALF, HALF]
    assert layer.weight.grad.dtype is FLOAT


class Scaled(torch.autograd.Function):
    """A custom function with code of its own in both directions."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.mm(w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad.mm(w.t()), x.t().mm(grad)


def test_a_custom_function_is_cast_in_both_directions(handle):
    x, w = matrix().requires_grad_(), matrix().requires_grad_()
    result = Scaled.apply(x, w)
    assert result.dtype is HALF
    result.float().sum().backward()
    assert x.grad.dtype is w.grad.dtype is FLOAT


def test_casts_can_be_disabled_and_come_back_after_an_error(handle):
    def fail():
        with amp.disable_casts():
            assert matrix().mm(matrix()).dtype is FLOAT
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert matrix().mm(matrix()).dtype is HALF


def test_deactivation_leaves_other_modes_entered(handle):
    with torch.device("meta"):
        handle._deactivate()
        assert torch.ones(1).device.type == "meta"
    assert matrix().mm(matrix()).dtype is FLOAT


def test_tensors_on_the_cpu_are_left_alone_if_the_model_is_elsewhere():
    amp.init(on_cpu=False)
    assert matrix().mm(matrix()).dtype is FLOAT
    assert amp.half_function(dtypes)(matrix(), matrix()) == (FLOAT, FLOAT)
    assert nn.LSTM(4, 4)(torch.randn(3, 2, 4))[0].dtype is FLOAT
    meta = torch.ones(2, 2, device="meta")
    assert meta.mm(meta).dtype is HALF


def in_a_thread(work):
    """Return the result of a function that ran in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_module_is_cast_in_another_thread(handle):
    class Twice(nn.Module):
        """Calls itself once more."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, again=True):
            if again:
                self(x, again=False)
            return self.layer(x)

    model = Twice()

    def work():
        inside = model(matrix()).dtype
        return inside, torch._C._len_torch_function_stack()

    assert in_a_thread(work) == (HALF, 0)


def test_a_module_that_raises_in_another_thread_leaves_no_mode(handle):
    def work():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            nn.Linear(4, 4)(matrix(2, 3))
        return torch._C._len_torch_function_stack()

    assert in_a_thread(work) == 0


def test_the_api_from_before_initialize_is_refused(handle):
    with pytest.raises(RuntimeError, match=r"amp\.initialize"):
        handle.wrap_optimizer(None)
    with pytest.raises(RuntimeError, match=r"amp\.scale_loss"):
        handle.scale_loss(None, None)


def test_a_second_init_replaces_the_first(handle):
    second = amp.init()
    assert torch._C._len_torch_function_stack() == 1
    handle._deactivate()
    assert second.is_active()
    assert matrix().mm(matrix()).dtype is HALF


def test_a_disabled_init_casts_nothing():
    handle = amp.init(enabled=False)
    assert not handle.is_active()
    assert matrix().mm(matrix()).dtype is FLOAT
    handle._deactivate()


# --- functions of users ---------------------------------------------------------------


def dtypes(x, y):
    return x.dtype, y.dtype


@pytest.mark.parametrize(
    ("decorate", "expected"),
    [
        (amp.half_function, (HALF, HALF)),
        (amp.float_function, (FLOAT, FLOAT)),
        (amp.promote_function, (FLOAT, FLOAT)),
    ],
)
def test_a_decorated_function_is_cast_while_casts_are_on(decorate, expected):
    decorated = decorate(dtypes)
    half, single = matrix().half(), matrix()
    assert decorated(half, single) == (HALF, FLOAT)
    handle = amp.init()
    assert decorated(half, single) == expected
    with amp.disable_casts():
        assert decorated(half, single) == (HALF, FLOAT)
    handle._deactivate()
    assert decorated(half, single) == (HALF, FLOAT)


class Library:
    """Stands for a module of a user."""

    dtypes = staticmethod(dtypes)


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr("gradscale.apex.amp.amp._registered", {})
    return type("Fresh", (Library,), {"dtypes": staticmethod(dtypes)})


@pytest.mark.parametrize(
    ("register", "expected"),
    [
        (amp.register_half_function, (HALF, HALF)),
        (amp.register_float_function, (FLOAT, FLOAT)),
        (amp.register_promote_function, (FLOAT, FLOAT)),
    ],
)
def test_a_registered_function_is_replaced_until_the_end(library, register, expected):
    register(library, "dtypes")
    half, single = matrix().half(), matrix()
    handle = amp.init()
    assert library.dtypes(half, single) == expected
    handle._deactivate()
    assert library.dtypes is dtypes


def test_a_registered_function_of_torch_is_cast_by_the_mode(library):
    before = torch.einsum
    amp.register_half_function(torch, "einsum")
    amp.init()
    assert torch.einsum is before
    assert torch.einsum("ij,jk->ik", matrix(), matrix()).dtype is HALF


def test_a_function_that_does_not_exist_is_refused(library):
    with pytest.raises(ValueError, match="has no function 'missing'"):
        amp.register_half_function(library, "missing")


# --- recurrent networks ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells_are_half(handle, kind, dtype):
    cell = kind(4, 4)
    inputs = [torch.randn(2, 4, dtype=dtype).requires_grad_() for _ in range(3)]
    state = torch.zeros(2, 4, dtype=dtype)
    hidden = (state, state) if kind is nn.LSTMCell else state
    for x in inputs:
        hidden = cell(x, hidden)
        output = hidden[0] if kind is nn.LSTMCell else hidden
        assert output.dtype is HALF
    output.float().sum().backward()
    assert [x.grad.dtype for x in inputs] == [dtype] * 3
    assert cell.weight_ih.grad.dtype is FLOAT


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, False), (2, True)])
def test_recurrent_networks_are_half(handle, kind, layers, both, dtype):
    network = kind(4, 4, num_layers=layers, bidirectional=both)
    x = torch.randn(3, 2, 4, dtype=dtype).requires_grad_()
    state = torch.zeros(layers * (1 + both), 2, 4, dtype=dtype)
    output, _ = network(x, (state, state) if kind is nn.LSTM else state)
    assert output.dtype is HALF
    output[-1].float().sum().backward()
    assert x.grad.dtype is dtype


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_packed_sequences_are_half(handle, dtype):
    network = nn.RNN(4, 4, num_layers=2)
    x = torch.randn(5, 3, 4, dtype=dtype).requires_grad_()
    lengths = torch.tensor(sorted(random.choices(range(2, 6), k=3), reverse=True))
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
    output, _ = network(packed, torch.zeros(2, 3, 4, dtype=dtype))
    assert output.data.dtype is HALF
    output.data.float().sum().backward()
    assert x.grad.dtype is dtype
