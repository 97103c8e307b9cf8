"""Train a small language model in FP16 with flax nnx, optax and gradscale.

It learns to predict the next byte of Python source from the sixteen before it, on
modules of the standard library. Parameters are f32, forward and backward pass are f16,
norms stay in f32.

The scale starts far too high on purpose, to show its calibration. The gradients of the
first steps overflow. Each such step is skipped: weights, Adam's moments and the
schedule are unchanged, the scale is halved, and the parameters that overflowed are
named. Once it fits, the scale is doubled at intervals; a doubling that overflows costs
one step.

  python examples/jax_nnx.py          500 steps, a few seconds on two cores
  python examples/jax_nnx.py --json   the same figures for a program
"""

import argparse
import inspect
import json
import math
import typing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import track

from gradscale import DynamicScale
from gradscale.jax import (
    Precision,
    culprits,
    current_scale,
    last,
    loss_scaled,
    scaled_value_and_grad,
)

CONTEXT, BATCH, WIDTH = 16, 256, 128
PRECISION = Precision("p=f32,c=f16,o=f32", keep={"*norm*": "f32"})


class Norm(nnx.LayerNorm):
    """A norm that computes in f32 and returns the dtype of its input."""

    def __call__(self, x: jax.Array) -> jax.Array:
        # Without the cast every layer after it would compute in f32.
        return super().__call__(x).astype(x.dtype)


class Model(nnx.Module):
    """Bytes i32[b, CONTEXT] to the logits of the next byte, float[b, 256]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        # An Embed computes in the dtype of its constructor, not in that of its input.
        self.embed = nnx.Embed(256, 32, dtype=PRECISION.compute_dtype, rngs=rngs)
        self.first = nnx.Linear(32 * CONTEXT, WIDTH, rngs=rngs)
        self.norm_1 = Norm(WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm_2 = Norm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, seen: jax.Array) -> jax.Array:
        x = self.first(self.embed(seen).reshape(len(seen), -1))
        x += self.second(nnx.gelu(self.norm_1(x)))
        return self.head(nnx.gelu(self.norm_2(x)))


def loss_of(model: Model, text: jax.Array) -> jax.Array:
    """Return f32[], the mean loss on i32[b, CONTEXT + 1] bytes."""
    logits = PRECISION.wrap(model)(text[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, -1])
    return losses.mean()


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model: Model, optimizer: nnx.Optimizer, text: jax.Array) -> None:
    """Take one step, or skip it if a gradient is not finite."""
    differentiated = scaled_value_and_grad(loss_of, using=nnx.value_and_grad)
    loss, scaled_grads = differentiated(optimizer, model, text)
    optimizer.update(model, scaled_grads, value=loss)


def train(steps: int, seed: int) -> dict[str, Any]:
    """Train a model; return its figures and the facts of skipped steps."""
    model = Model(nnx.Rngs(seed))
    PRECISION.check(model)
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    # 2^24 is far too high, on purpose; 2^16 is the default.
    policy = DynamicScale(init_scale=2.0**24, growth_interval=100)
    scaled = loss_scaled(optax.adamw(schedule), policy, max_norm=1.0)
    optimizer = nnx.Optimizer(model, scaled, wrt=nnx.Param)

    training, held_out = library_text()
    rng, skips = np.random.default_rng(seed), []
    evaluate = nnx.jit(loss_of)
    before = float(evaluate(model, held_out))
    console = Console(stderr=True)
    for _ in track(
        range(steps),
        "Training",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ):
        train_step(model, optimizer, rng.choice(training, BATCH))
        step = last(optimizer)
        # Waits for the device. A large run would read every hundredth step only.
        if not step.applied:
            skips.append(
                {
                    "step": int(step.step),
                    "scale": float(step.scale),
                    "verdict": str(step.verdict),
                    "code": step.verdict.code,
                    "culprits": culprits(step, nnx.state(model, nnx.Param)),
                }
            )
    return {
        "loss_before": before,
        "loss_after": float(evaluate(model, held_out)),
        "applied": int(optimizer.opt_state.applied_steps),
        "skipped": int(optimizer.opt_state.skipped_steps),
        "scale": float(current_scale(optimizer)),
        "skips": skips,
    }


def library_text() -> tuple[np.ndarray, np.ndarray]:
    """Return i32[n, CONTEXT + 1] twice: windows to train on, and others to test on."""
    modules = (argparse, inspect, typing)
    source = b"".join(Path(module.__file__).read_bytes() for module in modules)
    text = np.frombuffer(source, np.uint8).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
    cut = len(windows) * 9 // 10
    return windows[:cut], windows[cut + CONTEXT :: CONTEXT]


def main() -> None:
    """Parse the command line, train, and print the skipped steps and the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=500, help="batches to train on (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights and batches (%(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print all figures as JSON, for programs"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps} trains nothing. Pass 1 or more.")
    done = train(arguments.steps, arguments.seed)
    if arguments.json:
        print(json.dumps(done, indent=2))
        return
    for skip in done["skips"]:
        first, *others = skip["culprits"]
        print(
            f"step {skip['step']:4d} skipped at 2^{math.log2(skip['scale']):g}: "
            f"{skip['verdict']} [{skip['code']}] in {first}"
            + (f" and {len(others)} more" if others else "")
        )
    print(
        f"loss {done['loss_before']:.2f} -> {done['loss_after']:.2f}, "
        f"{done['applied']} steps applied, {done['skipped']} skipped, "
        f"scale 2^{math.log2(done['scale']):g}"
    )


if __name__ == "__main__":
    main()
