"""`LossScaler`: a policy and its state, in the place of MXNet's own class."""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradscale.core.checkpoint import Saved, pack, unpack
from gradscale.core.outcome import StepOutcome
from gradscale.core.policies import DynamicScale, Policy
from gradscale.core.state import PYTHON, Observed, ScaleState
from gradscale.errors import ConfigError, GradscaleWarning
from gradscale.mxnet.gradients import (
    Reading,
    discard_,
    float16_names,
    read,
    unscale_,
)
from gradscale.mxnet.step_log import StepLog, raise_if_collapsed

if TYPE_CHECKING:
    from gradscale.mxnet.recorder import Recorder

# MXNet's own ceiling; first scale and interval are those of `DynamicScale`.
MXNET_CEILING = 2.0**24


class LossScaler:
    """Scales losses, checks the gradients of all devices and moves the scale.

    `mxnet.gluon.Trainer` calls `has_overflow` in every step and skips the step if it
    returns True. `gradscale.mxnet.amp.init_trainer` attaches one to a trainer.

    >>> import mxnet as mx
    >>> weight = mx.gluon.Parameter("weight", shape=(2,))
    >>> weight.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    >>> scaler = LossScaler()
    >>> scaler.loss_scale
    65536.0
    >>> weight.grad(mx.cpu(1))[:] = [1.0, float("nan")]
    >>> scaler.has_overflow([weight]), scaler.loss_scale
    (True, 32768.0)
    >>> scaler.last
    StepOutcome(step=1, scale=65536, applied=False, verdict=calibrating)
    >>> scaler.last.culprits
    ('weight@cpu(1)',)

    Args:
        policy: Settings and rule; None for those of MXNet: 2^16, doubled on every
            2000th finite step in a row, 2^24 at most, and 2^-24 at least.
        recorder: Records the steps; None to record none.

    Raises:
        ConfigError: `policy` is not a policy.

    Attributes:
        policy: As given.
        last: The outcome of the last step; None before the first.
        applied_steps: Steps taken.
        skipped_steps: Steps skipped because a gradient was not finite.
    """

    def __init__(
        self, policy: Policy | None = None, *, recorder: "Recorder | None" = None
    ) -> None:
        if policy is None:
            policy = DynamicScale(max_scale=MXNET_CEILING)
        if isinstance(policy, type) or not isinstance(policy, Policy):
            raise ConfigError(
                f"policy={policy!r} is a {type(policy).__name__}. Loss scaling needs "
                "settings and a rule. Pass DynamicScale(), StaticScale(scale=...) or "
                "NoScale().",
                code="GS101",
            )
        self.policy = policy
        # A tuple of the policy's own type.
        self._state: Any = policy.init_state()
        self._log = StepLog()
        self._recorder = recorder
        self._losses: list[Any] = []
        self._scaled = self._warned = False
        # The gradients as they were before `unscale`.
        self._before_unscale: Reading | None = None
        # MXNet's own scaler, from which loss output operators take the scale.
        self._mirror: Any = None

    @property
    def loss_scale(self) -> float:
        """The scale for the next loss."""
        self._scaled = True
        return float(self._state.scale)

    @property
    def last(self) -> StepOutcome | None:
        """The outcome of the last step; None before the first."""
        return self._log.last

    @property
    def applied_steps(self) -> int:
        """Steps taken."""
        return self._log.applied

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because a gradient was not finite."""
        return self._log.skipped

    def scale(self, loss: Any) -> Any:
        """Multiply a loss, or each of a list or tuple, by the scale."""
        self._before_unscale = None
        losses = loss if isinstance(loss, (list, tuple)) else [loss]
        # Kept until the step: read there, after the backward pass, they cost no wait.
        self._losses += [each.detach() for each in losses]
        scaled = [each * self.loss_scale for each in losses]
        return scaled if isinstance(loss, (list, tuple)) else scaled[0]

    def unscale(self, params: Sequence[Any], factor: float) -> None:
        """Read the gradients, then multiply them by a factor in place.

        Clipping may hide a value that is not finite, so the read comes first; the
        step is skipped if it was not finite then.

        Args:
            params: The parameters of the trainer.
            factor: The inverse of the scale, times the trainer's own factor.
        """
        half = float16_names(params)
        if half:
            self._warn_float16(half)
        if self._before_unscale is None:
            self._before_unscale = read(params)
        unscale_(params, factor)

    def has_overflow(self, params: Sequence[Any]) -> bool:
        """Read the gradients of all devices, move the scale and record the step.

        Waits for the devices. If a gradient is not finite, all of them are set to 0
        and marked as used. Without any gradient, the scale stays.

        Args:
            params: The parameters of the trainer.

        Returns:
            True if the step is to be skipped.

        Raises:
            ScaleCollapsed: Three steps in a row were not finite at the lowest scale.
            HopelessRun: No scale can help, and the recorder has guard="raise".
        """
        reading = read(params)
        earlier, self._before_unscale = self._before_unscale, None
        if earlier is not None and (reading.finite or not earlier.finite):
            reading = earlier
        if reading.peaks and not self._scaled:
            self._warn_unscaled_loss()
        losses, self._losses = self._losses, []
        used = float(self._state.scale)
        if reading.peaks:
            seen = Observed(reading.finite, reading.amax, True)
            self._state = self.policy.next_state(self._state, seen, PYTHON.where)
            self._follow()
        scales = (used, float(self._state.scale))
        record = self._log.add(reading, self.policy, scales, losses=losses)
        self._scaled = False
        if not reading.finite:
            discard_(params)
        finding = ""
        if self._recorder is not None:
            finding = self._recorder.add(record, reading, self.policy, self.state_dict)
        raise_if_collapsed(record, reading.culprits, finding)
        return not reading.finite

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a plain dict, in the format of `gradscale.torch`.

        `Trainer.save_states` does not save it: store it beside that file, as JSON for
        instance.
        """
        log, state = self._log, self._state
        moves = isinstance(state, ScaleState)
        return pack(
            Saved(
                self.policy,  # type: ignore[arg-type]  # a policy of core, or alike
                float(state.scale),
                finite_steps=state.finite_steps if moves else 0,
                debt=state.debt if moves else 0,
                floor_steps=log.floor_steps,
                calibrated=log.calibrated,
                grown=log.grown,
                tallies=((log.applied, log.skipped),),
            )
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class or of another scaler of gradscale or torch.

        Raises:
            StateError: The state cannot be loaded; nothing was changed.
        """
        saved = unpack(state, self.policy)  # type: ignore[arg-type]  # as above
        self.policy = saved.policy
        moved: Any = saved.policy.init_state()._replace(scale=saved.scale)
        if isinstance(moved, ScaleState):
            moved = ScaleState(saved.scale, saved.finite_steps, saved.debt)
        self._state = moved
        log = self._log
        log.floor_steps = saved.floor_steps
        log.calibrated, log.grown = saved.calibrated, saved.grown
        log.applied, log.skipped = saved.tallies[0] if saved.tallies else (0, 0)
        self._follow()

    def mirror(self, own: Any) -> None:
        """Keep the scale of MXNet's own scaler equal to this one.

        After `amp.init`, operators such as `SoftmaxOutput` take the scale from there.

        Args:
            own: A `LossScaler` of MXNet; None for none.
        """
        self._mirror = own
        self._follow()

    def _follow(self) -> None:
        if self._mirror is not None:
            self._mirror._loss_scale = float(self._state.scale)

    def _warn_unscaled_loss(self) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            GradscaleWarning(
                "A step was taken, and the loss was not scaled since the step before. "
                "The trainer divides the gradients by the scale all the same, so the "
                "update is too small by that factor. Call backward inside "
                "`with amp.scale_loss(loss, trainer) as scaled:`. Reported once.",
                code="GS114",
            ),
            stacklevel=5,
        )

    def _warn_float16(self, names: list[str]) -> None:
        warnings.warn(
            GradscaleWarning(
                f"unscale() divides {len(names)} float16 gradients by the scale in "
                f"place, such as {names[0]}. Those below 2^-24 times the scale become "
                "0: the benefit of the scale is lost. Clip the scaled gradients to "
                "max_norm * scale instead, as FP16Trainer.step(max_norm=...) does.",
                code="GS105",
            ),
            stacklevel=4,
        )
