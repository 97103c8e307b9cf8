"""Train a tagger on sentences of many lengths; too long ones may not fit in memory."""

import json
import logging

import torch
from torch import nn

logging.basicConfig(level=logging.ERROR)
log = logging.getLogger("tagger")
VOCAB, TAGS = 40, 5


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 24)
        self.rnn = nn.RNN(24, 24, batch_first=True)
        self.proj = nn.Linear(24, TAGS)

    def forward(self, tokens):
        out, _ = self.rnn(self.emb(tokens))
        return self.proj(out)


class Runner:
    def __init__(self):
        self.tagger = Tagger()
        self.opt = torch.optim.AdamW(self.tagger.parameters(), lr=5e-3)
        self.scaler = torch.amp.GradScaler("cpu")
        self.losses = []
        self.taken = self.dropped = 0

    def train_on(self, tokens, tags):
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            scores = self.tagger(tokens)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), tags.flatten())
        self.losses.append(loss.item())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()

    def fit(self, batches):
        for tokens, tags in batches:
            try:
                self.train_on(tokens, tags)
                self.taken += 1
            except RuntimeError as error:
                log.warning("batch of length %d dropped: %s", tokens.size(1), error)
                self.dropped += 1


def corpus(n):
    for _ in range(n):
        length = int(torch.randint(4, 9, ()))
        tokens = torch.randint(VOCAB, (12, length))
        yield tokens, tokens % TAGS


if __name__ == "__main__":
    torch.manual_seed(5)
    runner = Runner()
    runner.fit(corpus(120))
    print(
        json.dumps(
            {
                "first_loss": sum(runner.losses[:4]) / 4,
                "last_loss": sum(runner.losses[-4:]) / 4,
                "scale": runner.scaler.get_scale(),
                "taken": runner.taken,
                "skipped": runner.dropped,
            }
        )
    )
