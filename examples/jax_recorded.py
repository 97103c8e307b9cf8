"""Record a run of JAX in FP16 and read the record.

A small network fits a polynomial. Parameters are f32, the forward and the backward pass
are f16. Halfway, one batch is corrupt: an input is NaN, so the loss and the gradients
are NaN and the step is skipped. `record_step` inside the compiled step writes every
update to a run file; findings are printed to stderr as they occur.

  python examples/jax_recorded.py             writes run.gs, a few seconds on two cores
  python examples/jax_recorded.py -o other.gs
  python examples/jax_recorded.py --json      the figures for a program
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradscale import DynamicScale
from gradscale.jax import (
    Precision,
    Recorder,
    counts,
    loss_scaled,
    record_step,
    scaled_value_and_grad,
)

WIDTH, BATCH = 64, 256
PRECISION = Precision("p=f32,c=f16,o=f32")
Params = dict[str, dict[str, jax.Array]]


def init(key: jax.Array) -> Params:
    """Return the weights and biases of two layers, f32."""
    first, second = jax.random.split(key)
    return {
        "hidden": {
            "weight": jax.random.normal(first, (1, WIDTH)),
            "bias": jnp.zeros(WIDTH),
        },
        "head": {
            "weight": jax.random.normal(second, (WIDTH, 1)) / WIDTH**0.5,
            "bias": jnp.zeros(1),
        },
    }


def predict(params: Params, x: jax.Array) -> jax.Array:
    """Return float[b, 1], the values at the points float[b, 1]."""
    x = jnp.tanh(x @ params["hidden"]["weight"] + params["hidden"]["bias"])
    return x @ params["head"]["weight"] + params["head"]["bias"]


def loss_of(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return f32[], the mean squared error."""
    return ((PRECISION.wrap(predict)(params, x) - y) ** 2).mean()


def train(path: Path, steps: int, seed: int) -> dict[str, Any]:
    """Train, write the run file, and return the figures of the run."""
    policy = DynamicScale(growth_interval=100)
    optimizer = loss_scaled(optax.adam(3e-3), policy, max_norm=1.0)
    params = init(jax.random.key(seed))
    opt_state = optimizer.init(params)
    rng, losses = np.random.default_rng(seed), []
    with Recorder(path, policy=policy) as recorder:

        @jax.jit
        def train_step(params: Params, opt_state: Any, x: Any, y: Any) -> Any:
            loss, grads = scaled_value_and_grad(loss_of)(opt_state, params, x, y)
            updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
            record_step(recorder, opt_state, params=params, loss=loss)
            return optax.apply_updates(params, updates), opt_state, loss

        for number in range(steps):
            x = rng.uniform(-2.0, 2.0, (BATCH, 1)).astype(np.float32)
            y = x**3 - 2.0 * x
            # The corrupt batch.
            if number == steps // 2:
                x[0] = np.nan
            params, opt_state, loss = train_step(params, opt_state, x, y)
            losses.append(loss)
    return {
        "file": str(path),
        "loss_first": float(losses[0]),
        "loss_last": float(losses[-1]),
        "applied": int(counts(opt_state).applied),
        "skipped": int(counts(opt_state).skipped),
    }


def main() -> None:
    """Parse the command line, train, and print the commands that read the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("run.gs"), help="the run file to write"
    )
    parser.add_argument(
        "--steps", type=int, default=400, help="batches to train on (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights and batches (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps} trains nothing. Pass 1 or more.")
    if arguments.out.exists():
        parser.error(
            f"{arguments.out} exists. Delete it, or pass -o with another name."
        )
    done = train(arguments.out, arguments.steps, arguments.seed)
    if arguments.json:
        print(json.dumps(done, indent=2))
        return
    print(
        f"loss {done['loss_first']:.2f} -> {done['loss_last']:.2f}, "
        f"{done['applied']} steps applied, {done['skipped']} skipped"
    )
    print(f"Read the record with: gradscale report {done['file']}")


if __name__ == "__main__":
    main()
