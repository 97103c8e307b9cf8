"""Accelerate's loop in FP16, with the scaler that Accelerate creates."""

import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if torch.cuda.is_available():
    scaling = GradScalerKwargs(init_scale=2.0**40)
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])
else:
    # Accelerate refuses FP16 on a CPU; with a scaler it runs the same code.
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
set_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = DataLoader(TensorDataset(torch.randn(400, 16)), batch_size=8)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for (batch,) in batches:
    with accelerator.accumulate(model):
        loss = (model(batch) - 1.0).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item().hex(), accelerator.optimizer_step_was_skipped)
print(accelerator.scaler.get_scale(), type(accelerator.scaler).__name__)
