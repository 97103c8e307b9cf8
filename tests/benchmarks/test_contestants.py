"""The contestants of the benchmarks do the same work."""

import pytest
import torch

from benchmarks import contestants
from benchmarks.bench_train import TRAIN
from benchmarks.contestants import BARE, OWN, STEP, Optimizers, chosen, enter
from benchmarks.gpt2 import GPT2, Size
from benchmarks.models import gpt2_shapes, llama_shapes

# Bare ones do not clip.
WHO = [name for name in chosen(STEP, None) if not name.startswith(BARE)]


@pytest.fixture(autouse=True)
def sharp(monkeypatch):
    """Gradients of the size of AdamW's epsilon: what multiplies them shows."""
    monkeypatch.setattr(contestants, "MAX_NORM", 1e-8)
    monkeypatch.setattr(contestants, "LR", 0.1)


def elements(shapes):
    return sum(torch.Size(shape).numel() for shape in shapes)


def stepped(who):
    """Return parameters after three steps on gradients that must be clipped."""
    torch.manual_seed(0)
    params = [torch.randn(5, 3), torch.randn(7)]
    scaled = [contestants.INIT_SCALE * 200.0 * torch.randn_like(p) for p in params]
    for param in params:
        param.requires_grad_()
    entered = enter(who, params, Optimizers(params), "cpu")
    for _ in range(3):
        for param, grad in zip(params, scaled, strict=True):
            unscaled = grad / contestants.INIT_SCALE
            param.grad = unscaled if entered.scaler is None else grad.clone()
        entered.scale()
        entered.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("name", WHO)
def test_a_contestant_of_the_step_ends_where_clip_and_adamw_end(name):
    wanted = stepped(TRAIN["no scaler + fused"])
    torch.testing.assert_close(stepped(STEP[name]), wanted)


@pytest.mark.parametrize("name", chosen(TRAIN, None))
def test_a_contestant_of_the_training_ends_where_clip_and_adamw_end(name):
    wanted = stepped(TRAIN["no scaler + fused"])
    torch.testing.assert_close(stepped(TRAIN[name]), wanted)


def test_the_clip_makes_a_difference_to_these_gradients(monkeypatch):
    wanted = stepped(TRAIN["no scaler + fused"])
    monkeypatch.setattr(contestants, "MAX_NORM", 1.5e-8)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(stepped(TRAIN["no scaler + fused"]), wanted)


def test_a_bare_step_does_not_clip(monkeypatch):
    wanted = stepped(STEP[BARE])
    monkeypatch.setattr(contestants, "MAX_NORM", 1e-9)
    assert torch.equal(stepped(STEP[BARE])[0], wanted[0])


def test_only_those_asked_for_take_part():
    assert list(chosen(STEP, [BARE])) == [BARE]


def test_own_adamw_is_left_out_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(contestants, "own_is_there", lambda: False)
    assert OWN not in chosen(STEP, None)


def test_own_adamw_is_not_left_out_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(contestants, "own_is_there", lambda: False)
    assert list(chosen(STEP, [OWN])) == [OWN]


def test_plain_is_gradscale_without_its_kernels():
    assert contestants.new_scaler("plain", "cpu")._kernels == "plain"


def test_contestants_with_the_same_optimizer_share_its_state():
    optimizers = Optimizers([torch.ones(2, requires_grad=True)])
    assert optimizers.get("fused") is optimizers.get("fused")
    assert optimizers.get("fused") is not optimizers.get("foreach")


def test_the_shapes_are_those_of_llama_3_2_1b():
    assert len(llama_shapes()) == 146
    assert elements(llama_shapes()) == 1_235_814_400


def test_the_module_has_the_shapes_of_gpt2():
    with torch.device("meta"):
        model = GPT2(Size())
    assert sorted(tuple(p.shape) for p in model.parameters()) == sorted(gpt2_shapes())


def test_the_head_of_the_model_sees_no_token_that_it_must_predict():
    torch.manual_seed(0)
    model = GPT2(Size(11, 8, 16, 2, 2))
    tokens = torch.tensor([[1, 2, 3, 4]])
    seen = model.tokens(tokens)
    seen.retain_grad()
    hidden = seen + model.places.weight[:4]
    for block in model.blocks:
        hidden = block(hidden)
    hidden[0, 1].sum().backward()
    assert seen.grad[0, 1].abs().max() > 0
    assert seen.grad[0, 2:].abs().max() == 0


def test_the_loss_of_a_new_model_is_that_of_a_guess():
    torch.manual_seed(0)
    size = Size(64, 16, 16, 2, 1)
    loss = GPT2(size)(torch.randint(64, (8, 17)))
    # The logits are about 0: every token is as likely as any other.
    assert loss.item() == pytest.approx(torch.tensor(64.0).log().item(), abs=0.05)
