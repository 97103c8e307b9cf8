"""gluon-nlp's loss scalers and FP16Trainer, from its `scripts/bert/fp16_utils.py`.

The names, arguments and scales are those of gluon-nlp. Differences: the gradients are
checked before the weights are updated, on all devices, and the scale has bounds. The
defaults are those of versions 0.9 and 0.10; earlier versions differ:

    version          init_scale    tolerance
    0.6              2^15          0.05
    0.7, 0.8         2^15          0.01
    0.9, 0.10        2^10          0.0
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mxnet import autograd

from gradscale.core.outcome import StepOutcome
from gradscale.core.policies import LOWEST_SCALE, DynamicScale, StaticScale
from gradscale.core.state import PYTHON, Observed
from gradscale.errors import ConfigError
from gradscale.mxnet.gradients import discard_, norm, read
from gradscale.mxnet.step_log import StepLog, raise_if_collapsed
from gradscale.mxnet.trainers import check_trainer, update_outside_kvstore

if TYPE_CHECKING:
    from gradscale.mxnet.recorder import Recorder


class StaticLossScaler:
    """Keep one scale for the whole run.

    Args:
        init_scale: The scale.
    """

    def __init__(self, init_scale: float = 1) -> None:
        self.policy = StaticScale(scale=init_scale)
        self.loss_scale = init_scale

    def has_overflow(self, params: Sequence[Any]) -> bool:
        """Return True if a gradient on any device is not finite. Waits."""
        return not read(params).finite

    def update_scale(self, overflow: bool) -> None:
        """Keep the scale."""


class DynamicLossScaler:
    """Grow after a quiet window, back off when too many steps overflow.

    After scale_window finite steps in a row the scale is multiplied by scale_factor.
    An overflow divides it by the factor, unless the overflows since the scale last fell
    are fewer than `tolerance` times the steps since it last moved. The moves are those
    of `gradscale.DynamicScale`, whose own tolerance is a leaky bucket.

    >>> scaler = DynamicLossScaler(scale_window=3, tolerance=0.5)
    >>> for overflow in (False, False, False, False, False, True, True):
    ...     scaler.update_scale(overflow)
    ...     print(scaler.loss_scale)
    1024.0
    1024.0
    2048.0
    2048.0
    2048.0
    2048.0
    1024.0

    Args:
        init_scale: The first scale.
        scale_factor: The factor of growth, and of backing off.
        scale_window: Finite steps in a row after which the scale grows.
        tolerance: The share of overflows that does not lower the scale.
        verbose: Accepted as in gluon-nlp 0.6, without effect: `FP16Trainer.last` and a
            recorder report overflows.
        min_scale: The lowest scale. gluon-nlp has none.
        max_scale: The highest scale. gluon-nlp has none.

    Raises:
        ConfigError: A setting can never work.
    """

    def __init__(
        self,
        init_scale: float = 2.0**10,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        tolerance: float = 0.0,
        verbose: bool = False,
        *,
        min_scale: float = LOWEST_SCALE,
        max_scale: float = 2.0**126,
    ) -> None:
        if not 0.0 <= tolerance < 1.0:
            raise ConfigError(
                f"tolerance={tolerance} is not a share of steps in [0, 1). From 1 on, "
                "no overflow would ever lower the scale. Pass 0.0 to back off at every "
                "overflow, or a small share such as 0.05.",
                code="GS101",
            )
        self.tolerance = tolerance
        self.policy = DynamicScale(
            init_scale=init_scale,
            growth_factor=scale_factor,
            backoff_factor=1.0 / scale_factor,
            growth_interval=scale_window,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        # For a tolerated overflow: the count restarts, the scale stays.
        self._holding = DynamicScale.unchecked(
            **{**asdict(self.policy), "backoff_factor": 1.0}
        )
        self._state = self.policy.init_state()
        self._steps_since_move = 0
        self._overflows_since_backoff = 0

    @property
    def loss_scale(self) -> float:
        """The scale for the next loss."""
        return float(self._state.scale)

    def has_overflow(self, params: Sequence[Any]) -> bool:
        """Return True if a gradient on any device is not finite. Waits."""
        return not read(params).finite

    def update_scale(self, overflow: bool) -> None:
        """Move the scale after a step."""
        overflow = bool(overflow)
        self._steps_since_move += 1
        self._overflows_since_backoff += overflow
        share = self._overflows_since_backoff / self._steps_since_move
        rule = self._holding if share < self.tolerance else self.policy
        seen = Observed(not overflow, 0.0, True)
        self._state = rule.next_state(self._state, seen, PYTHON.where)
        if overflow and rule is self.policy:
            self._overflows_since_backoff = self._steps_since_move = 0
        elif not overflow and self._state.finite_steps == 0:
            self._steps_since_move = 0


class FP16Trainer:
    """A Gluon trainer with loss scaling and clipping: gluon-nlp's loop of two calls.

    >>> import mxnet as mx
    >>> net = mx.gluon.nn.Dense(1, in_units=2)
    >>> net.initialize(mx.init.One())
    >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=False)
    >>> fp16_trainer = FP16Trainer(trainer, loss_scaler_params={"init_scale": 1024.0})
    >>> with mx.autograd.record():
    ...     loss = net(mx.nd.ones((4, 2))).mean()
    >>> fp16_trainer.backward(loss)
    >>> fp16_trainer.step(1, max_norm=1.0)
    >>> fp16_trainer.last, round(fp16_trainer.last.grad_norm, 3)
    (StepOutcome(step=1, scale=1024, applied=True, verdict=ok), 1.732)

    Args:
        trainer: Updates the weights. Not one that has a loss scaler already.
        dynamic_loss_scale: Use a `DynamicLossScaler`, else a `StaticLossScaler`.
        loss_scaler_params: Arguments of that scaler.
        recorder: Records the run.

    Raises:
        TypeError: It is not a Gluon trainer.
        ConfigError: It updates its weights on the key-value store (GS131), has a loss
            scaler already, or a setting can never work (GS101).

    Attributes:
        fp32_trainer: The trainer.
        last: The outcome of the last step; None before the first.
    """

    def __init__(
        self,
        trainer: Any,
        dynamic_loss_scale: bool = True,
        loss_scaler_params: Mapping[str, Any] | None = None,
        *,
        recorder: "Recorder | None" = None,
    ) -> None:
        check_trainer(trainer)
        update_outside_kvstore(trainer)
        if getattr(trainer, "_amp_loss_scaler", None) is not None:
            raise ConfigError(
                "The trainer has a loss scaler from amp.init_trainer(). The gradients "
                "would be divided by two scales. Pass a trainer of its own to "
                "FP16Trainer, or use amp.scale_loss() without it.",
                code="GS101",
            )
        self.fp32_trainer = trainer
        kind = DynamicLossScaler if dynamic_loss_scale else StaticLossScaler
        self._scaler = kind(**(loss_scaler_params or {}))
        self._log = StepLog()
        self._losses: list[Any] = []
        self._recorder = recorder
        if recorder is not None:
            recorder.bind(trainer)

    @property
    def last(self) -> StepOutcome | None:
        """The outcome of the last step; None before the first."""
        return self._log.last

    def backward(self, loss: Any) -> None:
        """Compute the gradients of a loss, or of a list of them, times the scale."""
        losses = loss if isinstance(loss, (list, tuple)) else [loss]
        self._losses += [each.detach() for each in losses]
        with autograd.record():
            scaled = [each * self._scaler.loss_scale for each in losses]
        autograd.backward(scaled)

    def step(self, batch_size: int, max_norm: float | None = None) -> None:
        """Sum the gradients over devices, check, clip and apply them. Waits.

        Args:
            batch_size: The gradients are divided by it.
            max_norm: Clip the norm of the gradients, before that division, to it.

        Raises:
            ScaleCollapsed: Three steps in a row were not finite at the lowest scale.
            HopelessRun: No scale can help, and the recorder has guard="raise".
        """
        trainer, scaler = self.fp32_trainer, self._scaler
        trainer.allreduce_grads()
        params, used = trainer._params, float(scaler.loss_scale)
        reading = read(params)
        grad_norm = None
        if reading.finite:
            divisor = batch_size * used
            if max_norm and reading.peaks:
                grad_norm = norm(params, reading) / used
                divisor *= max(grad_norm / max_norm, 1.0)
            trainer.update(divisor)
        else:
            discard_(params)
        if reading.peaks:
            scaler.update_scale(not reading.finite)
        losses, self._losses = self._losses, []
        scales = (used, float(scaler.loss_scale))
        record = self._log.add(
            reading, scaler.policy, scales, losses=losses, grad_norm=grad_norm
        )
        finding = ""
        if self._recorder is not None:
            state = {"scale": used}
            finding = self._recorder.add(record, reading, scaler.policy, lambda: state)
        raise_if_collapsed(record, reading.culprits, finding)
