"""A network whose gradients are small, in float16 and its twin in f32."""

import torch
from torch import Tensor

from gradscale.torch.grads.collect import collect

SHAPES = (128, 128), (128, 128), (128, 96)


def small_net() -> torch.nn.Module:
    """Return the network, the same in every call.

    Without biases, and of weights that keep magnitudes as they are: activations and
    their gradients are normal float16, and only the gradients of weights are not.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(*shape, bias=False) for shape in SHAPES]
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), *layers[1:])


def loss_of(model: torch.nn.Module, *, half: bool, batch: int = 0) -> Tensor:
    """Return a loss of small inputs, computed in float16 where asked for."""
    generator = torch.Generator().manual_seed(100 + batch)
    inputs = 1e-4 * torch.randn(32, 128, generator=generator)
    targets = torch.randn(32, 96, generator=generator)
    with torch.autocast("cpu", dtype=torch.float16, enabled=half):
        outputs = model(inputs)
    return 0.2 * (outputs.float() - targets).square().mean()


def run_step(meter, model, scale, *, half, batch=0):
    """Run one step without an optimizer; return the sample that is due, in a list."""
    model.zero_grad()
    (loss_of(model, half=half, batch=batch) * scale).backward()
    if meter.wanted:
        gradients = collect(list(model.parameters()), allow_fp16=True)
        meter.sample(gradients, torch.tensor(scale), (model,))
    sample = meter.end_step()
    return [] if sample is None else [sample]


def zero_share(fate):
    """Return the share of all elements that is 0 in float16, for whatever reason."""
    counts = fate.zeros, fate.flushed, fate.degraded, fate.normal, fate.overflowed
    return (fate.zeros + fate.flushed) / (sum(counts) + fate.nonfinite)


def weights(model):
    """Return the parameters by name; one element is at most 0.01 percent of them."""
    return dict(model.named_parameters())
