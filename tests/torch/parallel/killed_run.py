"""One rank of a training under FSDP2 that writes checkpoints and may be killed.

It goes on from the last checkpoint if there is one. At a moment, "step" or "save",
rank 1 kills itself in the middle of the fifth iteration; with "never", the training
goes on to its end, and is compared with one that was never stopped.
"""

import datetime
import json
import os
import signal
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gradscale.torch import GradScaler
from tests.torch.parallel.models import sharded
from tests.torch.parallel.norm_cases import batch
from tests.torch.training import INF

STEPS, FATAL = 8, 4
PATIENCE = datetime.timedelta(seconds=15)


class Training:
    """A model, its optimizer and its scaler."""

    def __init__(self):
        self.model = sharded()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        self.done, self.scales = 0, []

    def parts(self):
        """Return all that a checkpoint holds."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        scaler = self.scaler.state_dict()
        return {"model": model, "optimizer": optimizer, "scaler": scaler}

    def save(self, folder):
        """Write a checkpoint; it has its name only once it is whole."""
        unfinished = folder / f"{self.done}.part"
        dcp.save(self.parts(), checkpoint_id=unfinished)
        if dist.get_rank() == 0:
            os.replace(unfinished, folder / f"{self.done}")

    def resume(self, folder):
        """Go on from the last checkpoint that is whole."""
        whole = [int(one.name) for one in folder.iterdir() if not one.suffix]
        if not whole:
            return
        self.done = max(whole)
        parts = self.parts()
        dcp.load(parts, checkpoint_id=folder / f"{self.done}")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
        )
        self.scaler.load_state_dict(parts["scaler"])

    def step(self, before_step):
        """Run one iteration; the second and the seventh overflow."""
        self.optimizer.zero_grad()
        factor = INF if self.done in (1, 6) else 1.0
        loss = self.model(batch()).square().mean() * factor
        self.scaler.scale(loss).backward()
        before_step()
        self.scaler.clip_grad_norm_(self.optimizer, 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.done += 1
        self.scales.append(self.scaler.get_scale())

    def weights(self):
        """Return what this rank holds of each weight."""
        return [p.to_local().flatten().tolist() for p in self.model.parameters()]


def die():
    """End this process as if the machine had."""
    os.kill(os.getpid(), signal.SIGKILL)


def alive():
    """Do nothing."""


def main(rank: int, ranks: int, folder: Path, moment: str) -> None:
    """Train, and die or tell how it went on."""
    with (folder / f"{moment}-{rank}.txt").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / moment}",
        rank=rank,
        world_size=ranks,
        timeout=PATIENCE,
    )
    kept = folder / "checkpoints"
    training = Training()
    training.resume(kept)
    begun = training.done
    for step in range(begun, STEPS):
        fatal = rank == 1 and step == FATAL
        training.step(before_step=die if fatal and moment == "step" else alive)
        if fatal and moment == "save":
            die()
        if moment != "never":
            training.save(kept)
    whole = Training()
    for _ in range(STEPS):
        whole.step(alive)
    facts = {
        "begun": begun,
        "scales": [training.scales, whole.scales[begun:]],
        "weights": [training.weights(), whole.weights()],
    }
    (folder / f"{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()
