"""After `amp.init`, a bfloat16 net trains and loss output operators follow the scale.

Run by test_training.py: `amp.init` changes the operators of the process.
"""

import mxnet as mx
import numpy as np
from mxnet.contrib.amp import amp as mxnet_amp

from gradscale.mxnet import amp

DENSE_WORKS = "Dense trained"
DENSE_FAILS = "Dense not run: this CPU has no bfloat16 product of matrices"


def train():
    """Train for 40 steps, one of them with an infinite loss."""
    net = mx.gluon.nn.Dense(1, in_units=4)
    net.initialize(mx.init.Xavier())
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.2})
    amp.init_trainer(trainer)
    scaler = trainer._amp_loss_scaler
    rng, losses = np.random.RandomState(0), []
    for number in range(40):
        x = mx.nd.array(rng.uniform(-1, 1, (16, 4)))
        with mx.autograd.record():
            out = net(x)
            assert out.dtype == mxnet_amp.bfloat16
            loss = (mx.nd.amp_cast(out, dtype="float32") - x.sum(1, keepdims=True)) ** 2
            if number == 20:
                loss = loss * float("inf")
            with amp.scale_loss(loss, trainer) as scaled:
                mx.autograd.backward(scaled)
        trainer.step(16)
        losses.append(scaler.last.record.loss)
    assert scaler.skipped_steps == 1
    assert scaler.loss_scale == 2.0**15
    assert losses[-1] < 0.1 * losses[0], losses


def dense_works():
    """Return whether oneDNN has the product: it needs AVX-512."""
    try:
        x = mx.nd.ones((2, 4))
        mx.nd.FullyConnected(
            x, mx.nd.ones((2, 4)), num_hidden=2, no_bias=True
        ).wait_to_read()
    except mx.MXNetError:
        return False
    return True


def main() -> None:
    """Train, and print what held."""
    amp.init("bfloat16")
    mx.random.seed(0)
    # The first trainer's scale is that of the loss output operators.
    weight = mx.gluon.Parameter("weight", shape=(2,), init="ones")
    weight.initialize()
    trainer = mx.gluon.Trainer([weight], "sgd")
    amp.init_trainer(trainer)
    scaler = trainer._amp_loss_scaler
    with mx.autograd.record():
        loss = weight.data() * float("inf")
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(1)
    assert scaler.loss_scale == 2.0**15
    x = mx.nd.array([[1.0, 2.0]])
    x.attach_grad()
    with mx.autograd.record():
        out = mx.nd.SoftmaxOutput(x, mx.nd.array([0.0]))
    out.backward()
    # The gradient of a softmax is its output less the label.
    probability = out.asnumpy()[0, 1]
    assert np.isclose(x.grad.asnumpy()[0, 1], probability * 2.0**15)
    print("SoftmaxOutput follows the scale")
    if dense_works():
        train()
        print(DENSE_WORKS)
    else:
        print(DENSE_FAILS)


if __name__ == "__main__":
    main()
