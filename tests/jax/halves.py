"""Half precision that no compiler takes back."""

import jax.numpy as jnp
from jax import lax


def as_half(x):
    """Cast to f16 and back through f16 for gradients.

    XLA may leave out a cast to f16 that is cast back later, as on the GPU, and then
    nothing overflows. It never leaves out a rounding that was asked for.
    """
    return lax.reduce_precision(jnp.asarray(x, jnp.float32), 5, 10).astype(jnp.float16)
