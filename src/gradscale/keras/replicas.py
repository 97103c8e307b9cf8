"""TensorFlow's distribution strategies: one decision for all replicas."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def largest_of_replicas(peaks: Any) -> Any:
    """Return f32[n], the elementwise maximum over all replicas; NaN stays NaN.

    Call it in a replica context.

    Raises:
        ValueError: Called in a cross-replica context.
    """
    if tf.distribute.in_cross_replica_context():
        # The message of Keras.
        raise ValueError("apply() must be called in a replica context.")
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    if replicas == 1:
        return peaks
    # A sum is the one reduction that every strategy has. Each replica fills its row.
    own = tf.range(replicas)[:, None] == context.replica_id_in_sync_group
    rows = context.all_reduce(
        tf.distribute.ReduceOp.SUM, tf.where(own, peaks[None, :], 0.0)
    )
    nan = tf.reduce_any(tf.math.is_nan(rows), axis=0)
    return tf.where(nan, float("nan"), tf.reduce_max(rows, axis=0))


def branch(
    applied: Any,
    step: Callable[..., None],
    settle: Callable[[], None],
    *args: Any,
    skip: Callable[[], None] = lambda: None,
) -> None:
    """Call `step(*args)` if `applied`, else `skip()`; then `settle()`.

    On all replicas alike.

    Args:
        applied: bool[], the same on all replicas.
        step: Called in a replica context. It may call `merge_call`.
        settle: Assigns the optimizer's own variables. Called once, in a cross-replica
            context if the strategy has one.
        args: Differ from replica to replica.
        skip: Called once, as `settle`.
    """
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(applied, lambda: step(*args), skip)
        settle()
        return

    def in_cross_replica_context(strategy: Any, applied: Any, *args: Any) -> None:
        # A branch that calls merge_call is only allowed in a cross-replica context.
        tf.cond(
            strategy.experimental_local_results(applied)[0],
            lambda: strategy.extended.call_for_each_replica(step, args=args),
            skip,
        )
        settle()

    tf.distribute.get_replica_context().merge_call(
        in_cross_replica_context, args=(applied, *args)
    )
