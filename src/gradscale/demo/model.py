"""The model: a deep plain network that predicts the next character."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from gradscale.demo.settings import Settings
from gradscale.demo.text import SYMBOLS

_FEATURES = 8


class CharacterModel(nn.Module):
    """Predict the next character from the last `context` ones.

    Linear layers and GELU in sequence, without skip connections or normalisation, with
    PyTorch's default initialisation. Each layer reduces the gradient to about a
    quarter, so that gradients of the first layers are far below the FP16 range.

    Args:
        context: Number of input characters.
        depth: Number of hidden layers.
        width: Units per hidden layer.
    """

    def __init__(self, *, context: int, depth: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, _FEATURES)
        sizes = [context * _FEATURES, *[width] * depth]
        hidden = [
            layer
            for inputs, outputs in pairwise(sizes)
            for layer in (nn.Linear(inputs, outputs), nn.GELU())
        ]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, SYMBOLS))

    def forward(self, windows: Tensor) -> Tensor:
        """Map i64[n, context] to logits float[n, SYMBOLS]."""
        return self.layers(self.embedding(windows).flatten(1))


def seeded_model(settings: Settings) -> CharacterModel:
    """Return the model initialised from `settings.seed`, on `settings.device`.

    Restores the global random state. Not thread-safe: PyTorch initialises from one
    global generator.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = CharacterModel(
            context=settings.context, depth=settings.depth, width=settings.width
        )
    return model.to(settings.device)
