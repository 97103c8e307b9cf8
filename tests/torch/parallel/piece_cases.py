"""Cases of `test_pieces`: own optimizers step DTensors as they step their pieces."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from gradscale.torch import GradScaler, optim
from tests.torch.parallel.cutting import cut_like, local_of, whole
from tests.torch.parallel.launch import Cases
from tests.torch.parallel.models import sharded, tensor_parallel, two_dimensional

CASES = Cases()
SPREADS = {
    "fsdp2": sharded,
    "tensor": tensor_parallel,
    "two-dimensional": two_dimensional,
}
OPTIMIZERS = {
    "adamw": lambda params: optim.AdamW(params, lr=0.1, amsgrad=True),
    "adam": lambda params: optim.Adam(params, lr=0.1, weight_decay=0.1),
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "lion": lambda params: optim.Lion(params, lr=0.1),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Each spread and each optimizer in all dtypes, and each pair of them in f32 and in one
# of the two that have masters.
COMBINED = [
    (spread, name, word)
    for i, spread in enumerate(SPREADS)
    for j, name in enumerate(OPTIMIZERS)
    for word in ("f32", ("bf16", "f16")[(i + j) % 2])
]


def _plant(params, pieces, step, rank):
    """Give both the same gradients; one that is not finite on rank 2 in step 2."""
    for number, (param, piece) in enumerate(zip(params, pieces, strict=True)):
        generator = torch.Generator().manual_seed(100 * step + number)
        grad = torch.randn(param.shape, generator=generator).to(param.dtype) * 8
        param.grad = cut_like(grad, param)
        if step == 2 and rank == 2 and number == 0:
            local_of(param.grad).view(-1)[:1] = torch.inf
        piece.grad = local_of(param.grad).clone()


def _parallel_steps(model, make, dtype):
    rank = dist.get_rank()
    model = model.to(dtype)
    params = list(model.parameters())
    pieces = [torch.nn.Parameter(local_of(p.detach()).clone()) for p in params]
    optimizers = make(params), make(pieces)
    scalers = [
        GradScaler("cpu", init_scale=8.0, allow_fp16=True, process_group=group)
        for group in (None, dist.group.WORLD)
    ]
    applied = []
    for step in range(5):
        _plant(params, pieces, step, rank)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
        applied.append([scaler.last.applied for scaler in scalers])
    states = (
        [optimizers[0].state[p] for p in params],
        [optimizers[1].state[p] for p in pieces],
    )
    same = [
        torch.equal(local_of(p.detach()), piece)
        for p, piece in zip(params, pieces, strict=True)
    ]
    same_state = [
        torch.equal(local_of(one[name]), other[name])
        for one, other in zip(*states, strict=True)
        for name in other
    ]
    kinds = {
        name: isinstance(state[name], DTensor) == isinstance(param, DTensor)
        for param, state in zip(params, states[0], strict=True)
        for name in state
        if name != "step"
    }
    return {
        "applied": applied,
        "same": same,
        "same_state": same_state,
        "sharded_alike": kinds,
    }


def _saved_and_loaded(model_of, make):
    """Return whether a run that is saved and loaded goes on as one that is not."""
    model, resumed = model_of(), model_of()
    optimizer, anew = make(model.parameters()), make(resumed.parameters())
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    params, others = list(model.parameters()), list(resumed.parameters())
    for step in range(2):
        _plant(params, [local_of(p.detach()) for p in params], step, dist.get_rank())
        optimizer.step()
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder[0],
    )
    state = {"optimizer": get_optimizer_state_dict(resumed, anew)}
    dcp.load(state, checkpoint_id=folder[0])
    set_optimizer_state_dict(resumed, anew, state["optimizer"])
    with torch.no_grad():
        for param, other in zip(params, others, strict=True):
            other.copy_(param)
    for of, stepped in ((params, optimizer), (others, anew)):
        _plant(of, [local_of(p.detach()) for p in of], 3, dist.get_rank())
        stepped.step()
    return [
        torch.equal(whole(one.detach()), whole(other.detach()))
        for one, other in zip(params, others, strict=True)
    ]


def _enter():
    for spread, name, word in COMBINED:
        of, make, dtype = SPREADS[spread], OPTIMIZERS[name], DTYPES[word]

        @CASES.case(f"pieces-{spread}-{name}-{word}")
        def _(rank, of=of, make=make, dtype=dtype):
            return _parallel_steps(of(), make, dtype)

    for spread, model_of in SPREADS.items():
        for name, make in OPTIMIZERS.items():

            @CASES.case(f"saved-{spread}-{name}")
            def _(rank, of=model_of, make=make):
                return _saved_and_loaded(of, make)


_enter()
