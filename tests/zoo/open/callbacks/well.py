"""A trainer with callbacks, in miniature: predicts the yield of orchards."""

import torch
from torch import nn

torch.manual_seed(22)


class Callback:
    def before_backward(self, trainer): ...

    def before_step(self, trainer): ...

    def after_step(self, trainer): ...


class ZeroGrad(Callback):
    def before_backward(self, trainer):
        trainer.optimizer.zero_grad(set_to_none=False)


class Log(Callback):
    def __init__(self, every):
        self.every = every

    def after_step(self, trainer):
        if trainer.count % self.every == 0:
            print(f"step {trainer.count} loss {trainer.loss.item():.4f}")


class Trainer:
    def __init__(self, net, optimizer, callbacks):
        self.net, self.optimizer, self.callbacks = net, optimizer, callbacks
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        self.count = 0

    def emit(self, event):
        for callback in self.callbacks:
            getattr(callback, event)(self)

    def fit(self, data):
        for x, y in data:
            with torch.autocast("cpu", dtype=torch.float16):
                out = self.net(x)
            self.loss = nn.functional.huber_loss(out.float(), y)
            self.emit("before_backward")
            self.scaler.scale(self.loss).backward()
            self.emit("before_step")
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.count += 1
            self.emit("after_step")


def orchards(n):
    mix = torch.randn(5, 1)
    for _ in range(n):
        x = torch.randn(24, 5)
        yield x, (x @ mix).relu() - 0.5


net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
trainer = Trainer(
    net, torch.optim.Adam(net.parameters(), lr=5e-3), [ZeroGrad(), Log(25)]
)
trainer.fit(orchards(150))
