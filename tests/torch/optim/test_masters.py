"""f16 and bf16 parameters: exact masters, wide moments, changes by others."""

import pytest
import torch

from gradscale.torch.optim import SGD, Adam, AdamW, Lion
from tests.torch.optim.streams import (
    CASE_IDS,
    CASES,
    KINDS,
    NAMESAKES,
    TOLERANCE,
    give,
    parameters,
    same,
    step_with,
    stream,
    train,
)
from tests.torch.optim.test_against_torch import distance

DTYPES = [torch.float16, torch.bfloat16]
kinds = pytest.mark.parametrize(("kind", "how"), KINDS.values(), ids=KINDS)
halves = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def masters_of(optimizer):
    params = optimizer.param_groups[0]["params"]
    return [optimizer.state[param]["master"] for param in params]


@halves
@pytest.mark.parametrize(("kind", "how"), CASES, ids=CASE_IDS)
def test_masters_take_the_steps_that_torch_takes_in_f32(kind, how, dtype):
    steps = 100
    ours, theirs = parameters(dtype), [p.detach().float() for p in parameters(dtype)]
    optimizer = kind(ours, lr=0.01, **how)
    fused = NAMESAKES[kind](theirs, lr=0.01, fused=True, **how)
    for grads in stream(steps, dtype=dtype):
        give(ours, grads)
        give(theirs, grads)
        optimizer.step()
        fused.step()
    masters = masters_of(optimizer)
    # The tolerance of a whole run: AdamW's decay drifts in torch, on the CPU.
    assert distance(masters, theirs) <= TOLERANCE[torch.float32]
    assert same(ours, [master.to(dtype) for master in masters])


@halves
@kinds
def test_a_parameter_is_its_master_rounded(kind, how, dtype):
    optimizer = kind(parameters(dtype), **how)
    train(optimizer)
    params = optimizer.param_groups[0]["params"]
    assert same(params, [master.to(dtype) for master in masters_of(optimizer)])


@halves
@kinds
def test_all_that_is_kept_for_a_half_is_f32(kind, how, dtype):
    optimizer = kind(parameters(dtype), **how)
    train(optimizer, steps=1)
    kept = [entry for state in optimizer.state.values() for entry in state.values()]
    assert {entry.dtype for entry in kept} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@kinds
def test_wide_parameters_have_no_master(kind, how, dtype):
    optimizer = kind(parameters(dtype), **how)
    train(optimizer, steps=1)
    assert all("master" not in state for state in optimizer.state.values())


def test_steps_too_small_for_f16_add_up():
    param = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = SGD([param], lr=2.0**-14)
    param.grad = torch.ones(1, dtype=torch.float16)
    for _ in range(16):
        optimizer.step()
    assert param.item() == 1.0 - 2.0**-10


# --- changes by others ----------------------------------------------------------------


def trained(kind=AdamW, dtype=torch.float16, **how):
    param = torch.nn.Parameter(torch.linspace(1.0, 2.0, 4).to(dtype))
    optimizer = kind([param], **how)
    train(optimizer, steps=3)
    return optimizer, param


def step_nowhere(optimizer, param):
    """Take a step that moves nothing but what was changed by others."""
    param.grad = torch.zeros_like(param)
    optimizer.step()


def _copy(param, values):
    with torch.no_grad():
        param.copy_(values)


def _swap(param, values):
    param.data = values.clone()


def _load(param, values):
    module = torch.nn.Module()
    module.weight = param
    module.load_state_dict({"weight": values})


def _set_one(param, values):
    with torch.no_grad():
        for i, value in enumerate(values):
            param[i] = value


WRITERS = {"copy_": _copy, "data": _swap, "load_state_dict": _load, "index": _set_one}


@halves
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_parameter_that_was_written_is_taken_over(write, dtype):
    optimizer, param = trained(SGD, dtype, lr=0.01)
    values = torch.tensor([5.0, 6.0, 7.0, 8.0], dtype=dtype)
    write(param, values)
    step_nowhere(optimizer, param)
    assert torch.equal(param, values)
    assert torch.equal(optimizer.state[param]["master"], values.float())


def test_elements_that_were_not_changed_keep_the_digits_of_their_master():
    optimizer, param = trained(SGD, lr=0.01)
    before = optimizer.state[param]["master"].clone()
    assert not torch.equal(before, param.float())
    with torch.no_grad():
        param[2] = 7.0
    step_nowhere(optimizer, param)
    before[2] = 7.0
    assert torch.equal(optimizer.state[param]["master"], before)


def test_a_parameter_that_nobody_wrote_is_not_read():
    optimizer, param = trained(SGD, lr=0.01)
    # Written behind the back of autograd: the one write that is not kept.
    param.data.fill_(9.0)
    before = optimizer.state[param]["master"].clone()
    with pytest.warns(UserWarning, match="written to through .data"):
        step_nowhere(optimizer, param)
    assert torch.equal(optimizer.state[param]["master"], before)


def test_a_parameter_that_nobody_wrote_is_not_read_where_gradients_come_and_go():
    first, second = parameters(torch.float16, [(2,), (2,)])
    optimizer = SGD([first, second], lr=0.01)
    give([first, second], [torch.ones(2), torch.zeros(2)])
    optimizer.step()
    before = optimizer.state[second]["master"].clone()
    first.grad = None
    second.data.fill_(9.0)
    with pytest.warns(UserWarning, match="written to through .data"):
        optimizer.step()
    assert torch.equal(optimizer.state[second]["master"], before)


def test_a_write_between_two_steps_is_noticed_where_the_gradients_come_and_go():
    first, second = parameters(torch.float16, [(2,), (2,)])
    optimizer = SGD([first, second], lr=0.01)
    give([first, second], [torch.ones(2), torch.ones(2)])
    optimizer.step()
    second.grad = None
    optimizer.step()
    with torch.no_grad():
        second.fill_(3.0)
    optimizer.step()
    second.grad = torch.zeros(2, dtype=torch.float16)
    optimizer.step()
    assert second.tolist() == [3.0, 3.0]


def test_masters_keep_their_digits_where_the_gradients_come_and_go():
    first, second = parameters(torch.float16, [(2,), (2,)])
    optimizer = SGD([first, second], lr=0.01)
    give([first, second], [torch.ones(2), torch.ones(2)])
    optimizer.step()
    before = optimizer.state[second]["master"].clone()
    second.grad = None
    optimizer.step()
    second.grad = torch.zeros(2, dtype=torch.float16)
    optimizer.step()
    assert torch.equal(optimizer.state[second]["master"], before)


def test_a_skip_after_a_write_keeps_what_was_written():
    optimizer, param = trained(AdamW)
    with torch.no_grad():
        param.fill_(3.0)
    param.grad = torch.ones_like(param)
    step_with(optimizer, found_inf=1.0)
    assert param.tolist() == [3.0] * 4


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD, Lion], ids=lambda k: k.__name__)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_a_step_counts_as_a_write_to_the_parameter(kind, dtype):
    param = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    param.grad = torch.ones_like(param)
    version = param._version
    kind([param]).step()
    assert param._version > version


def test_a_model_that_is_halved_in_mid_run_gets_masters():
    model = torch.nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(optimizer, steps=2)
    model.half()
    train(optimizer, steps=2, dtype=torch.float16)
    for param in model.parameters():
        assert param.dtype == torch.float16
        assert torch.equal(optimizer.state[param]["master"].half(), param)
        assert optimizer.state[param]["step"] == 4.0


def test_f16_bf16_and_f32_parameters_go_together():
    def run(dtypes):
        params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
        optimizer = AdamW(params, lr=0.25)
        for grads in stream(4, [(3,)], torch.bfloat16):
            give(params, grads * len(dtypes))
            optimizer.step()
        return [p.detach() for p in params]

    mixed = (torch.float16, torch.float32, torch.bfloat16, torch.float16)
    assert same(run(mixed), [run([dtype])[0] for dtype in mixed])


def test_other_memory_at_the_old_address_is_noticed():
    # As an allocator hands out again what was given back: after float() and half().
    place = bytearray(8)
    param = torch.nn.Parameter(torch.frombuffer(place, dtype=torch.float16))
    with torch.no_grad():
        param.fill_(1.0)
    optimizer = SGD([param], lr=2.0**-12)
    for _ in range(2):
        give([param], [torch.zeros(4)])
        optimizer.step()
    param.data = torch.empty(0, dtype=torch.float16)
    param.data = torch.frombuffer(place, dtype=torch.float16).fill_(0.5)
    give([param], [torch.zeros(4)])
    optimizer.step()
    assert param.tolist() == [0.5] * 4
    assert optimizer.state[param]["master"].tolist() == [0.5] * 4
