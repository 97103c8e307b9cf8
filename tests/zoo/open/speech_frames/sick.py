# Frame-wise phoneme classification with 1-d convolutions.
import json

import torch
from torch import nn

torch.manual_seed(11)
N_PHONES = 6
BATCH, FRAMES, MELS = 8, 20, 12

prototypes = torch.randn(N_PHONES, MELS)


def make_batch():
    phones = torch.randint(N_PHONES, (BATCH, FRAMES // 4)).repeat_interleave(4, dim=1)
    mel = prototypes[phones] + 0.5 * torch.randn(BATCH, FRAMES, MELS)
    return mel.transpose(1, 2), phones


acoustic = nn.Sequential(
    nn.Conv1d(MELS, 24, 3, padding=1),
    nn.GELU(),
    nn.Conv1d(24, 24, 3, padding=1),
    nn.GELU(),
    nn.Conv1d(24, N_PHONES, 1),
)
opt = torch.optim.AdamW(acoustic.parameters(), lr=2e-3, weight_decay=0.01)
# Start high and come down gently.
amp_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28, backoff_factor=0.97)

curve = []
counts = {True: 0, False: 0}
for it in range(260):
    mel, phones = make_batch()
    with torch.autocast("cpu", torch.float16):
        out = acoustic(mel)
    ce = nn.functional.cross_entropy(out.float(), phones)
    opt.zero_grad(set_to_none=True)
    amp_scaler.scale(ce).backward()
    amp_scaler.step(opt)
    old = amp_scaler.get_scale()
    amp_scaler.update()
    counts[amp_scaler.get_scale() >= old] += 1
    curve.append(ce.item())
    if it % 50 == 0:
        print(f"iter {it:4d} ce {ce.item():.3f}")

print(
    json.dumps(
        {
            "first_loss": sum(curve[:8]) / 8,
            "last_loss": sum(curve[-8:]) / 8,
            "scale": amp_scaler.get_scale(),
            "taken": counts[True],
            "skipped": counts[False],
        }
    )
)
