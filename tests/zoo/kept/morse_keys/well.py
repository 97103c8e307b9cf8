"""CTC with zero_infinity: some texts are longer than their audio."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(70)
sounds = 2 * torch.randn(6, 8)


def utterances(n, frames=12):
    audio, targets, lengths = [], [], []
    for _ in range(n):
        k = torch.randint(2, 6, (1,)).item()
        if torch.rand(()) < 0.05:
            # A wrong transcript: it does not fit into the frames.
            text = torch.randint(1, 6, (frames + 2,))
        else:
            text = torch.randint(1, 6, (k,))
        seq = torch.zeros(frames, dtype=torch.long)
        slots = torch.linspace(0, frames - 1, k + 1).long()
        for i in range(k):
            seq[slots[i] : slots[i] + 1] = text[i]
        audio.append(sounds[seq] + 0.3 * torch.randn(frames, 8))
        targets.append(text)
        lengths.append(len(text))
    return torch.stack(audio), torch.cat(targets), torch.tensor(lengths)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 24, 3, padding=1)
        self.fc = nn.Linear(24, 24)
        self.out = nn.Linear(24, 6)

    def forward(self, x):
        x = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.out(F.relu(self.fc(x)))


model = Recogniser()
ctc = nn.CTCLoss(blank=0, zero_infinity=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(120):
    audio, targets, lengths = utterances(8)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(audio)
    log_probs = logits.float().log_softmax(-1).transpose(0, 1)
    loss = ctc(log_probs, targets, torch.full((8,), 12), lengths)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(step, f"ctc {loss.item():.3f}")
