"""Language modelling on a toy grammar; the last window of an epoch is shorter."""

import json

import torch
import torch.nn as nn

torch.manual_seed(0)
VOCAB, CONTEXT, ACCUM = 16, 4, 4


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 16)
        self.mix = nn.Linear(16 * CONTEXT, 48)
        self.head = nn.Linear(48, VOCAB)

    def forward(self, ids):
        return self.head(torch.relu(self.mix(self.tokens(ids).flatten(1))))


text = torch.randint(VOCAB, (CONTEXT,)).tolist()
while len(text) < 300:
    following = (text[-1] + 3 * text[-2] + 1) % VOCAB
    text.append(following if torch.rand(()) < 0.8 else int(torch.randint(VOCAB, ())))
windows = torch.tensor([text[i : i + CONTEXT + 1] for i in range(len(text) - CONTEXT)])
windows = windows[torch.randperm(len(windows))]
batches = windows[:272].split(16)

lm = Bag()
adam = torch.optim.Adam(lm.parameters(), lr=5e-3)
amp = torch.amp.GradScaler("cpu", init_scale=2.0**14)
curve, taken, skipped = [], 0, 0


def apply_step():
    global taken, skipped
    was = amp.get_scale()
    amp.step(adam)
    amp.update()
    if amp.get_scale() < was:
        skipped += 1
    else:
        taken += 1


for epoch in range(12):
    for i, batch in enumerate(batches, 1):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = lm(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits, batch[:, -1]) / ACCUM
        amp.scale(loss).backward()
        curve.append(loss.item() * ACCUM)
        if i % ACCUM == 0:
            apply_step()
            adam.zero_grad()
    if len(batches) % ACCUM:
        adam.step()
        adam.zero_grad()
    print("epoch", epoch, "loss", sum(curve[-17:]) / 17)

print(
    json.dumps(
        {
            "first_loss": sum(curve[:4]) / 4,
            "last_loss": sum(curve[-17:]) / 17,
            "scale": amp.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
