"""Distil a fixed teacher into a smaller student."""

import itertools
import json

import torch
import torch.nn.functional as F
from torch import nn

TEMPERATURE = 2.0


def mlp(*sizes):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def distillation_loss(student_logits, teacher_logits):
    target = F.softmax(teacher_logits / TEMPERATURE, dim=-1)
    guess = F.log_softmax(student_logits.float() / TEMPERATURE, dim=-1)
    return F.kl_div(guess, target, reduction="batchmean") * TEMPERATURE**2


class Distiller:
    def __init__(self, teacher, student):
        self.teacher = teacher.eval().requires_grad_(False)
        self.student = student
        self.optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu")
        self.history = []
        self.taken = self.skipped = 0

    def training_step(self, x):
        with torch.no_grad():
            teacher_logits = 4 * self.teacher(x)
        with torch.autocast("cpu", dtype=torch.float16):
            student_logits = self.student(x)
        return distillation_loss(student_logits, teacher_logits)

    def fit(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.training_step(torch.randn(32, 10))
            self.history.append(loss.item())
            scaled = self.scaler.scale(loss)
            scaled.backward()
            self.scaler.step(self.optimizer)
            self.finish(scaled.item() / loss.item())

    def finish(self, factor):
        self.scaler.update()
        if self.scaler.get_scale() < factor * 0.75:
            self.skipped += 1
        else:
            self.taken += 1


torch.manual_seed(97)
distiller = Distiller(mlp(10, 64, 64, 5), mlp(10, 24, 5))
distiller.fit(180)
h = distiller.history
print(
    json.dumps(
        {
            "first_loss": sum(h[:8]) / 8,
            "last_loss": sum(h[-8:]) / 8,
            "scale": distiller.scaler.get_scale(),
            "taken": distiller.taken,
            "skipped": distiller.skipped,
        }
    )
)
