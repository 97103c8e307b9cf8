"""Steps of an optimizer on hand-made gradients."""

import keras
import numpy as np
from keras import ops

from gradscale.keras import LossScaleOptimizer

INF, NAN = float("inf"), float("nan")
BACKEND = keras.backend.backend()


def made(inner=None, variables=((1.0, 2.0),), **settings):
    """Return a built optimizer and its variables."""
    variables = [
        keras.Variable(np.array(value, "float32"), name=name)
        for name, value in zip("abcdefgh", variables, strict=False)
    ]
    inner = keras.optimizers.SGD(0.5) if inner is None else inner
    optimizer = LossScaleOptimizer(inner, **settings)
    optimizer.build(variables)
    return optimizer, variables


def values(variables):
    """Return the values of variables as lists."""
    return [ops.convert_to_numpy(variable.value).tolist() for variable in variables]


def stepped(optimizer, variables, *grads):
    """Take a step with one gradient for each variable."""
    optimizer.apply([ops.convert_to_tensor(g, "float32") for g in grads], variables)


def state(optimizer):
    """Return all that an optimizer would save."""
    store = {}
    optimizer.save_own_variables(store)
    return {name: np.asarray(value).tolist() for name, value in store.items()}
