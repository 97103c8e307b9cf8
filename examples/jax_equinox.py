"""Train a small classifier in FP16 with equinox, optax and gradscale.

It learns to classify eight lines of source by module of the standard library, from the
frequencies of their characters. Parameters are f32, forward and backward pass are f16,
norms stay in f32.

Halfway, one batch contains an empty piece of text. Its frequencies are 0 / 0, so the
loss and the gradients are NaN. The step is skipped: weights, Adam's moments and the
schedule are unchanged. The verdict is that the loss was not finite before scaling, so
that no scale would have helped. A step that overflows because the scale has grown too
far gets another verdict.

  python examples/jax_equinox.py          600 steps, a few seconds on two cores
  python examples/jax_equinox.py --json   the same figures for a program
"""

import argparse
import json
import math
import sysconfig
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
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

MODULES = (
    "argparse",
    "doctest",
    "inspect",
    "mailbox",
    "pdb",
    "pickle",
    "tarfile",
    "typing",
)
LINES, BATCH, WIDTH = 8, 64, 64
PRECISION = Precision("p=f32,c=f16,o=f32", keep={"*norm*": "f32"})


class Model(eqx.Module):
    """Frequencies float[128] to the logits of the modules, float[8]."""

    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    second: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Linear(128, WIDTH, key=keys[0])
        # This norm computes in f32 and returns the dtype of its input.
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.second = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.head = eqx.nn.Linear(WIDTH, len(MODULES), key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.norm(self.first(x)))
        return self.head(jax.nn.relu(self.second(x)))


def loss_of(model: Model, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return f32[], the mean loss on counts f32[b, 128] and modules i32[b]."""
    counts, modules = batch
    frequencies = counts / counts.mean(axis=1, keepdims=True)
    logits = jax.vmap(PRECISION.wrap(model))(jnp.sqrt(frequencies))
    return optax.softmax_cross_entropy_with_integer_labels(logits, modules).mean()


def trained(model: Model) -> Model:
    """Return the part of a model that has gradients."""
    return eqx.filter(model, eqx.is_inexact_array)


@eqx.filter_jit(donate="all-except-first")
def train_step(batch: Any, model: Model, opt_state: Any, optimizer: Any) -> Any:
    """Take one step, or skip it if a gradient is not finite."""
    differentiated = scaled_value_and_grad(loss_of, using=eqx.filter_value_and_grad)
    loss, scaled_grads = differentiated(opt_state, model, batch)
    updates, opt_state = optimizer.update(
        scaled_grads, opt_state, trained(model), value=loss
    )
    return eqx.apply_updates(model, updates), opt_state


def train(steps: int, seed: int) -> dict[str, Any]:
    """Train a model; return its figures and the facts of skipped steps."""
    model = Model(jax.random.key(seed))
    PRECISION.check(model)
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    policy = DynamicScale(init_scale=2.0**12, growth_interval=100)
    optimizer = loss_scaled(optax.adamw(schedule), policy, max_norm=1.0)
    opt_state = optimizer.init(trained(model))

    training, held_out = library_pieces()
    rng, skips = np.random.default_rng(seed), []
    evaluate = eqx.filter_jit(loss_of)
    before = float(evaluate(model, held_out))
    console = Console(stderr=True)
    for number in track(
        range(steps),
        "Training",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ):
        rows = rng.integers(len(training[0]), size=BATCH)
        counts, modules = (part[rows] for part in training)
        # The corrupt batch: an empty piece.
        if number == steps // 2:
            counts[0] = 0.0
        model, opt_state = train_step((counts, modules), model, opt_state, optimizer)
        step = last(opt_state)
        # Waits for the device. A large run would read every hundredth step only.
        if not step.applied:
            skips.append(
                {
                    "step": int(step.step),
                    "scale": float(step.scale),
                    "verdict": str(step.verdict),
                    "code": step.verdict.code,
                    "culprits": culprits(step, trained(model)),
                }
            )
    return {
        "loss_before": before,
        "loss_after": float(evaluate(model, held_out)),
        "applied": int(opt_state.applied_steps),
        "skipped": int(opt_state.skipped_steps),
        "scale": float(current_scale(opt_state)),
        "skips": skips,
    }


def library_pieces() -> tuple[Any, Any]:
    """Return counts f32[n, 128] and modules i32[n] twice: to train on, to test on."""
    counts, modules = [], []
    for number, name in enumerate(MODULES):
        source = Path(sysconfig.get_path("stdlib"), f"{name}.py").read_bytes()
        lines = source.splitlines(keepends=True)
        for start in range(0, len(lines), LINES):
            piece = np.frombuffer(b"".join(lines[start : start + LINES]), np.uint8)
            counts.append(np.bincount(piece.clip(max=127), minlength=128))
            modules.append(number)
    data = np.array(counts, np.float32), np.array(modules, np.int32)
    held_out = np.arange(len(counts)) % 8 == 0
    return tuple(tuple(part[rows] for part in data) for rows in (~held_out, held_out))


def main() -> None:
    """Parse the command line, train, and print the skipped steps and the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=600, help="batches to train on (%(default)s)"
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
