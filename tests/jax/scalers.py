"""The loss scalers of JAX behind one interface, each used as its authors say.

A scaler is made with its settings and takes steps: `step(state, fun, *args, **kwargs)`
returns the next state, whether all was finite, the loss and the unscaled gradients.
"""

import flax.training.dynamic_scale
import jax
import jax.numpy as jnp
import jmp
import mpx

import gradscale
import gradscale.jax


class Jmp:
    """`jmp.DynamicLossScale`; the scale is given as a Python float, as in its docs."""

    def __init__(self, scale=2.0**15, interval=2000, floor=1.0):
        self.state = jmp.DynamicLossScale(
            scale, period=interval, min_loss_scale=jnp.float32(floor)
        )

    def step(self, state, fun, *args, **kwargs):
        def scaled(*args, **kwargs):
            loss = fun(*args, **kwargs)
            return state.scale(loss), loss

        grads, loss = jax.grad(scaled, has_aux=True)(*args, **kwargs)
        grads = state.unscale(grads)
        finite = jmp.all_finite(grads)
        return state.adjust(finite), finite, loss, grads

    @staticmethod
    def scale_of(state):
        return float(state.loss_scale)


class Flax:
    """`flax.training.dynamic_scale.DynamicScale`."""

    def __init__(self, scale=2.0**16, interval=2000, floor=2.0**-126):
        self.state = flax.training.dynamic_scale.DynamicScale(
            scale=scale, growth_interval=interval, minimum_scale=floor
        )

    def step(self, state, fun, *args, **kwargs):
        return state.value_and_grad(fun)(*args, **kwargs)

    @staticmethod
    def scale_of(state):
        return float(state.scale)


class Mpx:
    """`mpx.DynamicLossScaling` of mixed-precision-for-JAX, which casts to f16."""

    def __init__(self, scale=2.0**15, interval=2000, floor=1.0):
        self.state = mpx.DynamicLossScaling(
            jnp.float32(scale), jnp.float32(floor), period=interval
        )

    def step(self, state, fun, *args, **kwargs):
        step = mpx.filter_value_and_grad(fun, state)
        loss, state, finite, grads = step(*args, **kwargs)
        return state, finite, loss, grads

    @staticmethod
    def scale_of(state):
        return float(state.loss_scaling)


class Gradscale:
    """`gradscale.jax`, the functions without optax."""

    def __init__(self, scale=2.0**16, interval=2000, floor=2.0**-24):
        self.policy = gradscale.DynamicScale(
            init_scale=scale, growth_interval=interval, min_scale=floor
        )
        self.state = gradscale.jax.init(self.policy)

    def step(self, state, fun, *args, **kwargs):
        step = gradscale.jax.value_and_grad(fun)
        loss, grads = step(state, *args, **kwargs)
        seen = gradscale.jax.observe(grads)
        return gradscale.jax.update(self.policy, state, seen), seen.finite, loss, grads

    @staticmethod
    def scale_of(state):
        return float(state.scale)


SCALERS = {"jmp": Jmp, "flax": Flax, "MPX": Mpx, "gradscale": Gradscale}
