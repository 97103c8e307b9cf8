"""Hierarchical attention over poems: words to verses, verses to a poem."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp import GradScaler, autocast


@dataclass
class Config:
    vocab: int = 40
    dim: int = 20
    verses: int = 4
    words: int = 6
    lr: float = 4e-3
    steps: int = 140


class Pool(nn.Module):
    """Attention pooling with an additive mask."""

    def __init__(self, dim: int):
        super().__init__()
        self.key = nn.Linear(dim, dim)
        self.query = nn.Linear(dim, 1, bias=False)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        score = self.query(torch.tanh(self.key(x))).squeeze(-1)
        score = score + (~keep).to(score.dtype) * -1e4
        return (score.softmax(-1).unsqueeze(-1) * x).sum(-2)


class Poem(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.words = Pool(c.dim)
        self.verses = Pool(c.dim)
        self.label = nn.Linear(c.dim, 3)

    def forward(self, ids: Tensor) -> Tensor:
        keep = ids > 0
        verse = self.words(self.embed(ids), keep)
        poem = self.verses(verse, keep.any(-1))
        return self.label(poem)


def poems(c: Config, n: int, short: bool):
    y = torch.randint(0, 3, (n,))
    ids = torch.randint(1, c.vocab, (n, c.verses, c.words))
    theme = torch.rand(ids.shape) < 0.35
    ids = torch.where(theme, 1 + (ids % 13) + 13 * y[:, None, None], ids).clamp(
        max=c.vocab - 1
    )
    ids[torch.rand(ids.shape) < 0.2] = 0
    ids[..., 0] = ids[..., 0].clamp(min=1)
    if short:
        ids[:2, -1] = 0
    return ids, y


def main(c: Config) -> None:
    torch.manual_seed(100)
    net = Poem(c)
    opt = torch.optim.AdamW(net.parameters(), lr=c.lr)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    for step in range(1, c.steps + 1):
        ids, y = poems(c, 16, short=step % 10 == 7)
        opt.zero_grad()
        with autocast("cpu", torch.float16):
            logits = net(ids)
        loss = nn.functional.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 20 == 0:
            print(
                f"{step:>4} | loss {loss.item():.3f} | scale {scaler.get_scale():.6g}"
            )


if __name__ == "__main__":
    main(Config())
