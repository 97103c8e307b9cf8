"""Train a small classifier in FP16 with flax Linen, its TrainState and gradscale.

It learns which of three spirals a point in the plane belongs to. Parameters are f32,
the layers compute in f16, and BatchNorm averages in f32.

`apply_gradients` of flax does not take the loss, so the verdict on a skipped step could
not distinguish a NaN loss from a scale that is too high. `ScaledTrainState` has a
method that passes the loss on and keeps the statistics of BatchNorm on a skip. The
first batch is corrupt: a point is NaN. Its verdict is forward_nonfinite; without the
loss it would be calibrating, as if a lower scale could help.

  python examples/jax_linen.py          300 steps, a few seconds on two cores
  python examples/jax_linen.py --json   the same figures for a program
"""

import argparse
import json
import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from gradscale import DynamicScale
from gradscale.jax import (
    counts,
    culprits,
    current_scale,
    last,
    loss_scaled,
    scaled_value_and_grad,
    select,
)

ARMS, WIDTH, BATCH = 3, 64, 256


class Model(nn.Module):
    """Points float[b, 2] to the logits of the spirals, f32[b, 3]."""

    @nn.compact
    def __call__(self, points: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(WIDTH, dtype=jnp.float16)(points)
        x = nn.BatchNorm(not train, momentum=0.9, dtype=jnp.float16)(x)
        x = nn.Dense(WIDTH, dtype=jnp.float16)(nn.relu(x))
        return nn.Dense(ARMS, dtype=jnp.float16)(nn.relu(x)).astype(jnp.float32)


class ScaledTrainState(TrainState):
    """A TrainState for `loss_scaled`, with the statistics of BatchNorm."""

    batch_stats: Any

    def apply_scaled_gradients(
        self, *, grads: Any, loss: jax.Array, batch_stats: Any
    ) -> "ScaledTrainState":
        """Take one step, or skip it if a gradient is not finite."""
        optimizer = optax.with_extra_args_support(self.tx)
        updates, opt_state = optimizer.update(
            grads, self.opt_state, self.params, value=loss
        )
        # A skipped step also keeps the statistics: those of its batch may be NaN.
        applied = last(opt_state).applied
        return self.replace(
            step=self.step + 1,
            params=optax.apply_updates(self.params, updates),
            opt_state=opt_state,
            batch_stats=select(applied, batch_stats, self.batch_stats),
        )


@partial(jax.jit, donate_argnames="state")
def train_step(
    state: ScaledTrainState, points: jax.Array, arms: jax.Array
) -> ScaledTrainState:
    """Take one step on points f32[b, 2] of the spirals i32[b]."""

    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, moved = state.apply_fn(
            variables, points, train=True, mutable=["batch_stats"]
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, arms).mean()
        return loss, moved["batch_stats"]

    differentiated = scaled_value_and_grad(loss_of, has_aux=True)
    (loss, batch_stats), grads = differentiated(state.opt_state, state.params)
    return state.apply_scaled_gradients(grads=grads, loss=loss, batch_stats=batch_stats)


@jax.jit
def evaluate(state: ScaledTrainState, points: jax.Array, arms: jax.Array) -> jax.Array:
    """Return f32[], the mean loss with the statistics of the training."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, points, train=False)
    return optax.softmax_cross_entropy_with_integer_labels(logits, arms).mean()


def train(steps: int, seed: int) -> dict[str, Any]:
    """Train a model; return its figures and the facts of skipped steps."""
    model, rng = Model(), np.random.default_rng(seed)
    variables = model.init(jax.random.key(seed), jnp.zeros((1, 2)), train=False)
    policy = DynamicScale(growth_interval=100)
    state = ScaledTrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=loss_scaled(optax.adamw(1e-2), policy, max_norm=1.0),
        batch_stats=variables["batch_stats"],
    )
    held_out = spirals(rng, 1024)
    before, skips = float(evaluate(state, *held_out)), []
    for number in range(steps):
        points, arms = spirals(rng, BATCH)
        # The corrupt batch.
        if number == 0:
            points[0] = np.nan
        state = train_step(state, points, arms)
        step = last(state.opt_state)
        # Waits for the device. A large run would read every hundredth step only.
        if not step.applied:
            skips.append(
                {
                    "step": int(step.step),
                    "scale": float(step.scale),
                    "verdict": str(step.verdict),
                    "code": step.verdict.code,
                    "culprits": culprits(step, state.params),
                }
            )
    return {
        "loss_before": before,
        "loss_after": float(evaluate(state, *held_out)),
        "applied": int(counts(state.opt_state).applied),
        "skipped": int(counts(state.opt_state).skipped),
        "scale": float(current_scale(state.opt_state)),
        "skips": skips,
    }


def spirals(rng: np.random.Generator, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points f32[n, 2] and the spiral of each, i32[n]."""
    arms = rng.integers(ARMS, size=number).astype(np.int32)
    radius = rng.uniform(0.1, 1.0, number)
    angle = 4.0 * radius + 2.0 * np.pi * arms / ARMS + rng.normal(0.0, 0.1, number)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return points.astype(np.float32), arms


def main() -> None:
    """Parse the command line, train, and print the skipped steps and the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="batches to train on (%(default)s)"
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
