"""The model: a deep plain network that predicts the next character."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from gradscale.demo.settings import Settings
from gradscale.demo.text import SYMBOLS

_FEATURES = 8


class CharacterModel(nn.Module):
    """Predict the next character from the last `context` ones.

    Linear layers and GELU, one after the other: no skip connections, no
    normalisation, PyTorch's own initialisation. Each layer passes on about a quarter of
    the gradient it gets: what reaches the first layers is far below the FP16 range.

    Args:
        context: How many characters it sees.
        depth: How many hidden layers.
        width: Units in each.
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
    """Return the model of the settings and their seed, on their device.

    The caller's random state is left alone. Not for several threads at once: PyTorch
    initialises from one global generator.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = CharacterModel(
            context=settings.context, depth=settings.depth, width=settings.width
        )
    return model.to(settings.device)
