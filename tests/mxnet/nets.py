"""Small nets, and steps on hand-made gradients."""

import mxnet as mx
from mxnet.contrib.amp import amp as mxnet_amp
from mxnet.contrib.amp.loss_scaler import LossScaler as MXNetLossScaler

from gradscale.mxnet import amp

INF, NAN = float("inf"), float("nan")
CPU = (mx.cpu(0), mx.cpu(1), mx.cpu(2))


def parameter(*, devices=1, values=(1.0, 2.0), name="weight", dtype="float32"):
    """Return an initialized parameter with these values on some devices."""
    init = mx.init.Constant(mx.nd.array(values))
    made = mx.gluon.Parameter(name, shape=(len(values),), dtype=dtype, init=init)
    made.initialize(ctx=list(CPU[:devices]))
    return made


def trainer_of(*params, kvstore=None, **options):
    """Return a trainer with plain SGD, lr 0.5; each device keeps its own gradients."""
    settings = {"learning_rate": 0.5}
    return mx.gluon.Trainer(list(params), "sgd", settings, kvstore=kvstore, **options)


def attached(kind, trainer):
    """Attach a scaler to a trainer: gradscale's or MXNet's own."""
    if kind == "gradscale":
        amp.init_trainer(trainer)
    else:
        # As MXNet's init_trainer, which needs amp.init() and so patches all operators.
        trainer._amp_loss_scaler = MXNetLossScaler()
        trainer._amp_original_scale = trainer._scale
    return trainer._amp_loss_scaler


def step(kind, trainer, factors, batch_size=1):
    """Take one step whose gradient on each device is a factor times ones."""
    module = amp if kind == "gradscale" else mxnet_amp
    (param,) = trainer._params
    with mx.autograd.record():
        losses = [
            (data * factor).sum()
            for data, factor in zip(param.list_data(), factors, strict=True)
        ]
        with module.scale_loss(losses, trainer) as scaled:
            mx.autograd.backward(scaled)
    trainer.step(batch_size)


def values(param):
    """Return the values of a parameter on each device as lists."""
    return [data.asnumpy().tolist() for data in param.list_data()]
