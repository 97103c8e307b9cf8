"""GPT-2 as a plain torch module, for training benchmarks."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """Dimensions of the model; by default GPT-2 with 124 M parameters."""

    vocabulary: int = 50257
    context: int = 1024
    width: int = 768
    heads: int = 12
    blocks: int = 12


class Block(nn.Module):
    """Attention and a two-layer perceptron, both pre-norm with skip connections."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm_in = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.norm_mid = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return f[batch, length, width] from the same."""
        x = x + self.attended(self._attend(self.norm_in(x)))
        inner = F.gelu(self.widen(self.norm_mid(x)), approximate="tanh")
        return x + self.narrow(inner)

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        queries, keys, values = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.queries_keys_values(x).split(width, dim=-1)
        )
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return out.transpose(1, 2).reshape(batch, length, width)


class GPT2(nn.Module):
    """A language model with tied embedding and head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm_out = nn.LayerNorm(size.width)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the next-token loss.

        Args:
            tokens: i64[batch, length + 1].

        Returns:
            f32[].
        """
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(given) + self.places.weight[: given.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm_out(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def random_tokens(size: Size, batch: int, length: int, device: str) -> Tensor:
    """Return i64[batch, length + 1], uniformly distributed."""
    return torch.randint(size.vocabulary, (batch, length + 1), device=device)
