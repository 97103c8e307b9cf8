"""Lines of unequal length: losses are summed, gradients divided by the tokens of a window."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(131)
VOCAB = 12
follow = torch.randint(1, VOCAB, (VOCAB, 2))


def lines(n=6):
    length = torch.randint(4, 14, (n,))
    text = torch.zeros(n, 14, dtype=torch.long)
    text[:, 0] = torch.randint(1, VOCAB, (n,))
    for t in range(1, 14):
        text[:, t] = follow[text[:, t - 1], (torch.rand(n) < 0.2).long()]
    text[torch.arange(14)[None] >= length[:, None]] = 0
    return text


class Poet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16, padding_idx=0)
        self.mix = nn.Linear(16, 32)
        self.out = nn.Linear(32, VOCAB)

    def forward(self, text):
        return self.out(F.gelu(self.mix(self.embed(text))))


poet = Poet()
opt = torch.optim.Adam(poet.parameters(), lr=8e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for window in range(70):
    opt.zero_grad(set_to_none=True)
    tokens, total = 0, 0.0
    for _ in range(2 + window % 4):
        text = lines()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = poet(text[:, :-1])
        loss = F.cross_entropy(
            logits.float().flatten(0, 1),
            text[:, 1:].flatten(),
            ignore_index=0,
            reduction="sum",
        )
        scaler.scale(loss).backward()
        tokens += int((text[:, 1:] != 0).sum())
        total += loss.item()
    for p in poet.parameters():
        p.grad.div_(tokens)
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(poet.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if window % 14 == 0 or window == 69:
        print(window, tokens, total / tokens)
