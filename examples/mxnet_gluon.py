"""Train a Gluon net with MXNet on several devices, and record the run.

A float16 net of element-wise operators, which MXNet has on any CPU, fits a line. One
batch is corrupt on purpose, on the last device alone: the step is skipped on all.

  python examples/mxnet_gluon.py                  writes run.gs
  python examples/mxnet_gluon.py --devices 3 -o other.gs
  python examples/mxnet_gluon.py --json           the figures for a program
"""

import argparse
import json
from typing import Any

import mxnet as mx

from gradscale.mxnet import Recorder, amp

BATCH, STEPS = 48, 100


class Line(mx.gluon.Block):
    """Multiplies and shifts each of four inputs."""

    def __init__(self) -> None:
        super().__init__(prefix="line_")
        self.slope = self.params.get("slope", shape=(4,), dtype="float16", init="zeros")
        self.shift = self.params.get("shift", shape=(4,), dtype="float16", init="zeros")

    def forward(self, x: Any) -> Any:
        """Return the line at x."""
        return x * self.slope.data(x.context) + self.shift.data(x.context)


def train(path: str, devices: int) -> dict[str, Any]:
    """Train, write the run file, and return the figures of the run."""
    mx.random.seed(0)
    contexts = [mx.cpu(index) for index in range(devices)]
    net, loss_of = Line(), mx.gluon.loss.L2Loss()
    net.initialize(ctx=contexts)
    trainer = mx.gluon.Trainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 0.5, "momentum": 0.5, "multi_precision": True},
    )
    culprits: tuple[str, ...] = ()
    with Recorder(path) as recorder:
        scaler = amp.init_loss_scaling(trainer, recorder=recorder)
        for number in range(STEPS):
            x = mx.nd.random.uniform(-1, 1, (BATCH, 4)).astype("float16")
            if number == STEPS // 2:
                x[-1] = float("nan")
            parts = mx.gluon.utils.split_and_load(x, contexts)
            with mx.autograd.record():
                losses = [loss_of(net(part), 2 * part - 1) for part in parts]
                with amp.scale_loss(losses, trainer) as scaled:
                    mx.autograd.backward(scaled)
            trainer.step(BATCH)
            if number == STEPS // 2:
                culprits = scaler.last.culprits
    return {
        "slope": net.slope.data(contexts[0]).asnumpy().tolist(),
        "applied": scaler.applied_steps,
        "skipped": scaler.skipped_steps,
        "scale": scaler.loss_scale,
        "culprits": culprits,
    }


def main() -> None:
    """Parse, train, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", default="run.gs", help="the run file")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="figures for a program")
    options = parser.parse_args()
    found = train(options.output, options.devices)
    if options.json:
        print(json.dumps(found))
    else:
        slopes = ", ".join(f"{slope:.3f}" for slope in found["slope"])
        print(f"slopes {slopes}; they should be 2")
        print(f"{found['applied']} steps applied, {found['skipped']} skipped")


if __name__ == "__main__":
    main()
