"""Settings: what is taken, what is kept, what is refused and how."""

import pytest
import torch

from gradscale.errors import ConfigError, GradientError
from gradscale.torch.optim import SGD, Adam, AdamW, Lion
from tests.torch.optim.streams import (
    KINDS,
    NAMESAKES,
    everything,
    give,
    parameters,
    same,
    stream,
    train,
)

kinds = pytest.mark.parametrize(("kind", "how"), KINDS.values(), ids=KINDS)

REFUSED = {
    "lr": (AdamW, {"lr": -1.0}),
    "lr_of_two": (AdamW, {"lr": torch.ones(2)}),
    "lr_tensor": (SGD, {"lr": torch.tensor(-1.0)}),
    "eps": (Adam, {"eps": -1.0}),
    "beta1": (Adam, {"betas": (1.0, 0.5)}),
    "beta2": (AdamW, {"betas": (0.5, -0.5)}),
    "weight_decay": (AdamW, {"weight_decay": -1.0}),
    "momentum": (SGD, {"momentum": -1.0}),
    "nesterov": (SGD, {"nesterov": True}),
    "dampened_nesterov": (SGD, {"nesterov": True, "momentum": 0.5, "dampening": 0.5}),
    "sgd_weight_decay": (SGD, {"weight_decay": -1.0}),
}


@pytest.mark.parametrize(("kind", "how"), REFUSED.values(), ids=REFUSED)
def test_a_setting_that_torch_refuses_is_refused_in_its_words(kind, how):
    with pytest.raises(ValueError) as theirs:  # noqa: PT011  # any text: it is compared
        NAMESAKES[kind](parameters(), **how)
    with pytest.raises(ConfigError) as ours:
        kind(parameters(), **how)
    words, remedy = str(ours.value).split("\n")
    assert words == str(theirs.value)
    assert remedy.endswith(" [GS101]")
    assert next(iter(how)).split("[")[0] in remedy


@pytest.mark.parametrize(
    "how", [{"lr": -1.0}, {"betas": (0.5, 1.0)}, {"weight_decay": -1.0}], ids=str
)
def test_lion_refuses_what_adam_refuses(how):
    with pytest.raises(ConfigError):
        Lion(parameters(), **how)


@pytest.mark.parametrize("kind", NAMESAKES, ids=lambda kind: kind.__name__)
def test_nobody_differentiates_through_a_step(kind):
    with pytest.raises(
        ConfigError, match=r"differentiable=True .* torch\.optim.*GS101"
    ):
        kind(parameters(), differentiable=True)


def test_no_group_is_differentiated_through():
    first, *rest = parameters()
    optimizer = AdamW([first])
    with pytest.raises(ConfigError, match="differentiable=True"):
        optimizer.add_param_group({"params": rest, "differentiable": True})
    assert len(optimizer.param_groups) == 1


@kinds
def test_kernels_that_nobody_knows_are_refused(kind, how):
    with pytest.raises(
        ConfigError, match="kernels='fast' is not one of 'auto', 'plain'"
    ):
        kind(parameters(), **how, kernels="fast")


@pytest.mark.parametrize("kind", [AdamW, Adam], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("fused", [None, False, True])
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("capturable", [False, True])
def test_the_ways_of_torch_are_kept_and_change_nothing(
    kind, fused, foreach, capturable
):
    ways = {"fused": fused, "foreach": foreach, "capturable": capturable}
    optimizer = kind(parameters(), lr=torch.tensor(0.25), **ways)
    train(optimizer)
    plain = kind(parameters(), lr=0.25)
    train(plain)
    assert same(everything(optimizer), everything(plain))
    assert ways.items() <= optimizer.state_dict()["param_groups"][0].items()


@kinds
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_learning_rate_may_be_a_tensor(kind, how, shape):
    params = parameters()
    lr = torch.full(shape, 0.25)
    optimizer = kind(params, **{**how, "lr": lr})
    train(optimizer, steps=2)
    plain = kind(parameters(), **{**how, "lr": 0.25})
    train(plain, steps=2)
    assert same(everything(optimizer), everything(plain))
    lr.fill_(0.0)
    before = [p.detach().clone() for p in params]
    give(params, next(stream(1)))
    optimizer.step()
    assert same(params, before)
    assert optimizer.param_groups[0]["lr"] is lr


def test_betas_may_be_tensors():
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    optimizer, plain = (
        AdamW(parameters(), betas=betas),
        AdamW(parameters(), betas=(0.5, 0.75)),
    )
    train(optimizer)
    train(plain)
    assert same(everything(optimizer), everything(plain))


def test_betas_on_a_device_are_refused_unread():
    # Nothing can be read from the meta device.
    betas = (torch.tensor(0.5, device="meta"), torch.tensor(0.75, device="meta"))
    with pytest.raises(
        ConfigError, match=r"betas\[0\] is a tensor on meta.*Pass a number"
    ):
        AdamW(parameters(), betas=betas)


@pytest.mark.parametrize(("kind", "how"), KINDS.values(), ids=KINDS)
def test_a_learning_rate_on_a_device_is_not_read_by_the_constructor(kind, how):
    lr = torch.tensor(0.25, device="meta")
    assert kind(parameters(), **{**how, "lr": lr}).param_groups[0]["lr"] is lr


@kinds
def test_a_whole_step_reads_nothing_from_the_device(kind, how):
    # Where a value was read, the meta device would raise.
    params = [torch.nn.Parameter(torch.empty(3, device="meta", dtype=torch.float16))]
    optimizer = kind(params, **{**how, "lr": torch.tensor(0.25, device="meta")})
    for _ in range(2):
        params[0].grad = torch.empty_like(params[0])
        optimizer.grad_scale = torch.tensor(8.0, device="meta")
        optimizer.found_inf = torch.tensor(0.0, device="meta")
        optimizer.step()
    assert optimizer.state[params[0]]["master"].dtype == torch.float32


def test_named_parameters_are_taken():
    model = torch.nn.Linear(2, 1)
    optimizer = AdamW(model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == [
        "weight",
        "bias",
    ]


def test_a_sparse_gradient_is_refused_by_name():
    model = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = SGD(model.named_parameters())
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(GradientError, match="SGD does not support sparse") as refused:
        optimizer.step()
    assert "weight has a gradient of layout torch.sparse_coo" in str(refused.value)


def test_a_parameter_of_a_dtype_that_nobody_knows_is_refused_by_name():
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float8_e5m2))
    param.grad = torch.zeros_like(param)
    with pytest.raises(GradientError, match=r"layer is torch.float8_e5m2.*Keep the"):
        AdamW([("layer", param)]).step()


def test_an_empty_parameter_is_stepped_over():
    params = [torch.nn.Parameter(torch.ones(0, 3)), torch.nn.Parameter(torch.ones(2))]
    optimizer = AdamW(params, lr=0.25)
    train(optimizer, steps=2)
    assert float(optimizer.state[params[0]]["step"]) == 2.0


def test_an_empty_list_is_refused_as_in_torch():
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])


@kinds
def test_gradients_are_zeroed_as_in_torch(kind, how):
    params = parameters()
    optimizer = kind(params, **how)
    give(params, next(stream(1)))
    optimizer.zero_grad(set_to_none=False)
    assert all(bool((p.grad == 0.0).all()) for p in params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)
