"""Lightning's Trainer in 16-mixed, with the scaler of its precision plugin."""

import logging
import warnings

import torch
from lightning import pytorch as pl
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Regression(pl.LightningModule):
    """A small model that prints its losses bit by bit."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        loss = (self.net(batch[0]) - 1.0).square().mean()
        print(index, loss.item().hex())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


device = "cuda" if torch.cuda.is_available() else "cpu"
pl.seed_everything(0)
data = TensorDataset(torch.randn(240, 16))
trainer = pl.Trainer(
    accelerator="gpu" if device == "cuda" else "cpu",
    devices=1,
    max_epochs=1,
    plugins=[MixedPrecision("16-mixed", device)],
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
# Two workers: processes that must not record.
trainer.fit(Regression(), DataLoader(data, batch_size=8, num_workers=2))
print(trainer.precision_plugin.scaler.get_scale())
