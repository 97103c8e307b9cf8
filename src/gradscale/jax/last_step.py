"""The outcome of the last step, as arrays of the optimizer state."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradscale.core.records import StepRecord, Verdict, classify
from gradscale.errors import OrderError, StateError


class LastStep(NamedTuple):
    """The outcome of the last step: arrays, also under `jit`; verdict on the host.

    Attributes:
        step: i32[], the number of the update, counted from 1.
        scale: f32[], the scale that multiplied the loss.
        applied: bool[], the step was taken.
        finite: bool[], every gradient was finite and stayed so when unscaled.
        loss_finite: bool[], the loss was finite, if it was passed as `value`.
        norm_finite: bool[], the norm, if the step clips by it, is a usable f32.
        calibrated: bool[], a step had been applied before this one.
        grown: bool[], the scale had been raised by the step before this one.
        floor_steps: i32[], steps in a row, this one included, that were not finite at
            the lowest scale.
        amax: f32[], the largest magnitude among the scaled gradients.
        grad_norm: f32[], the norm of the unscaled gradients before clipping.
        peaks: f32[n], the largest magnitude of each leaf; see `culprits`.
    """

    step: jax.Array
    scale: jax.Array
    applied: jax.Array
    finite: jax.Array
    loss_finite: jax.Array
    norm_finite: jax.Array
    calibrated: jax.Array
    grown: jax.Array
    floor_steps: jax.Array
    amax: jax.Array
    grad_norm: jax.Array
    peaks: jax.Array

    @property
    def record(self) -> StepRecord:
        """All facts of the step on the host. Waits for the device.

        Raises:
            OrderError: Called inside `jit`.
            StateError: These are the facts of several members of an ensemble.
        """
        if isinstance(self.step, jax.core.Tracer):
            raise OrderError(
                "The verdict or the record of a step was read inside jit. The values "
                "are not known while the step is traced. Return last(opt_state) from "
                "the compiled step and read its verdict on the host; inside jit, use "
                "its arrays, such as last(opt_state).applied.",
                code="GS102",
            )
        self.check_single()
        facts = jax.device_get(self._asdict())
        del facts["peaks"]
        record = StepRecord(**{name: value.item() for name, value in facts.items()})
        return record._replace(nan=math.isnan(record.amax))

    @property
    def verdict(self) -> Verdict:
        """The verdict on the step's facts. Waits for the device; not inside `jit`."""
        return classify(self.record)

    def check_single(self) -> None:
        """Raise if these are the facts of an ensemble. Never waits.

        Raises:
            StateError: They have leading axes.
        """
        if self.step.ndim:
            raise StateError(
                f"This is the last step of an ensemble of shape {self.step.shape}. "
                "Each member has a verdict of its own. Take one of them, for instance "
                "jax.tree.map(lambda fact: fact[0], last(opt_state)).verdict.",
                code="GS302",
            )


def before_the_first(leaves: int) -> LastStep:
    """Return the facts before any step."""
    no, yes = jnp.array(False), jnp.array(True)
    none, zero = jnp.int32(0), jnp.float32(0.0)
    return LastStep(
        step=none,
        scale=zero,
        applied=no,
        finite=yes,
        loss_finite=yes,
        norm_finite=yes,
        calibrated=no,
        grown=no,
        floor_steps=none,
        amax=zero,
        grad_norm=zero,
        peaks=jnp.zeros(leaves, jnp.float32),
    )


class Counts(NamedTuple):
    """Counts of steps; one array in the state.

    Attributes:
        applied: i32[], steps taken.
        skipped: i32[], steps skipped because a value was not finite.
        retried: i32[], attempts that were repeated at a lower scale.
        at_floor: i32[], steps in a row that were not finite at the lowest scale.
    """

    applied: jax.Array
    skipped: jax.Array
    retried: jax.Array
    at_floor: jax.Array


# The facts of a step that are packed before the peaks: flags, then figures.
_FLAGS = ("applied", "finite", "loss_finite", "norm_finite", "calibrated", "grown")
_FIGURES = ("scale", "amax", "grad_norm")


def packed(step: LastStep) -> jax.Array:
    """Return f32[9 + n]: the facts of a step as one array."""
    facts = [getattr(step, name) for name in (*_FLAGS, *_FIGURES)]
    head = jnp.stack([jnp.asarray(fact, jnp.float32) for fact in facts])
    return jnp.concatenate([head, step.peaks])


def unpacked(facts: Any, counts: Counts) -> LastStep:
    """Invert `packed`; the leading axes of an ensemble are kept.

    Args:
        facts: f32[9 + n], of JAX or NumPy.
        counts: Likewise.
    """
    flags = {name: facts[..., i] > 0.0 for i, name in enumerate(_FLAGS)}
    figures = {name: facts[..., len(_FLAGS) + i] for i, name in enumerate(_FIGURES)}
    return LastStep(
        step=counts.applied + counts.skipped,
        floor_steps=counts.at_floor,
        peaks=facts[..., len(_FLAGS) + len(_FIGURES) :],
        **flags,
        **figures,
    )
