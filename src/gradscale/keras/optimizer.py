"""The optimizer wrapper: Keras' own `LossScaleOptimizer` with gradscale's rule."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras import ops
from keras.optimizers import LossScaleOptimizer as KerasLossScaleOptimizer

from gradscale.core.outcome import StepOutcome
from gradscale.core.policies import Policy
from gradscale.core.state import FixedState, Observed, ScaleState
from gradscale.errors import ConfigError, GradientError, StateError
from gradscale.keras.last_step import Counts, LastStep, outcome, packed
from gradscale.keras.reading import divided, judged, multiplied, read
from gradscale.keras.settings import (
    GROWTH_STEPS,
    INITIAL_SCALE,
    policy_from,
    policy_of,
    settings_of,
)

# The entry of a saved state that Keras' own class does not have; with a tolerance only.
DEBT = "debt"


@keras.saving.register_keras_serializable(package="gradscale")
class LossScaleOptimizer(KerasLossScaleOptimizer):
    """Wraps a Keras optimizer: scales the loss, skips steps that are not finite.

    A drop-in for `keras.optimizers.LossScaleOptimizer` on the TensorFlow, JAX and torch
    backends: the same arguments, configuration and saved state, and an instance of it,
    so that `compile` does not wrap it again. Differences from Keras' own:

    - The scale stays in [2^-24, 2^126] by default, so that it never becomes 0 or
      infinite.
    - A gradient that is not finite on any replica skips the step on all.
    - Gradients are unscaled in float32 at least, and a half-precision loss is scaled
      in float32.
    - `apply` works with JAX outside of `fit`.
    - The outcome of a step can be read: `last`, `applied_steps`, `skipped_steps`.

    >>> import keras
    >>> from keras import ops
    >>> weight = keras.Variable([1.0, 2.0])
    >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    >>> optimizer.apply([ops.array([8.0, 16.0])], [weight])
    >>> ops.convert_to_numpy(weight.value).tolist()
    [0.5, 1.0]
    >>> optimizer.apply([ops.array([1.0, float("inf")])], [weight])
    >>> optimizer.last.applied, optimizer.scale
    (False, 4.0)

    Args:
        inner_optimizer: The optimizer to wrap. Clipping, weight decay, averaging and
            accumulation are set on it, and see unscaled gradients. Its
            `loss_scale_factor` is cleared.
        initial_scale: The first scale.
        dynamic_growth_steps: Finite steps in a row after which the scale doubles.
        name: The name of the optimizer.
        policy: Settings and rule, instead of the two before: `DynamicScale`,
            `StaticScale` or `NoScale`.
        kwargs: Accepted and refused as by Keras' own class.

    Raises:
        ConfigError: A setting can never work, or the inner optimizer is not an
            optimizer or is wrapped already. It is a ValueError.
        ValueError: An argument belongs to the inner optimizer.

    Attributes:
        policy: The policy in use.
        inner_optimizer: As given.
        initial_scale: The first scale of the policy.
        dynamic_growth_steps: The growth interval of the policy, if it has one.
        dynamic_scale: f32[], the scale for the next loss; a variable once built.
        step_counter: int[], finite steps in a row; a variable once built.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float = INITIAL_SCALE,
        dynamic_growth_steps: int = GROWTH_STEPS,
        name: str | None = None,
        *,
        policy: Policy | None = None,
        **kwargs: Any,
    ) -> None:
        _check_inner(inner_optimizer)
        rule = policy_of(policy, initial_scale, dynamic_growth_steps)
        super().__init__(
            inner_optimizer,
            initial_scale=rule.init_state().scale,
            dynamic_growth_steps=getattr(rule, "growth_interval", dynamic_growth_steps),
            name=name,
            **kwargs,
        )
        self.policy: Any = rule
        self._last_step: LastStep | None = None

    def build(self, var_list: Sequence[Any]) -> None:
        """Create the variables; called by the first `apply` if it was not before.

        Args:
            var_list: The trainable variables.
        """
        var_list = list(var_list)
        super().build(var_list)
        with keras.name_scope(self.name, caller=self):
            self._last_step = LastStep(len(var_list), self.initial_scale)

    @property
    def variables(self) -> list[Any]:
        """The variables of Keras' own class, in its order, then two of gradscale's."""
        if self._last_step is None:
            return list(super().variables)
        return [*super().variables, *self._last_step.variables]

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times the scale, in float32 at least.

        Args:
            loss: float[...].
        """
        loss = ops.convert_to_tensor(loss)
        scale = self.dynamic_scale if self.built else self.initial_scale
        return multiplied(loss, scale)

    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None
    ) -> None:
        """Unscale the gradients and apply them, or skip the step; move the scale.

        Args:
            grads: float[...] each, of the scaled loss; None for a variable without
                one.
            trainable_variables: Their variables; by default those of `build`.

        Raises:
            GradientError: There is no gradient, or their number is wrong. It is a
                ValueError.
            StateError: The variables are not known yet. It is a ValueError.
        """
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is None:
            self._facts()
            variables = list(self._trainable_variables)
        else:
            variables = list(trainable_variables)
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        _check_number(grads, variables)
        self._check_variables_are_known(variables)

        scale = ops.convert_to_tensor(self.dynamic_scale)
        scaled = [not self._overwrite_variable_with_gradient(v) for v in variables]
        reading = read(grads, scaled, scale)
        on_tensorflow = keras.backend.backend() == "tensorflow"
        if on_tensorflow:
            from gradscale.keras.replicas import branch, largest_of_replicas

            reading = judged(largest_of_replicas(reading.peaks), scaled)

        def step(*grads: Any) -> None:
            self.inner_optimizer.apply(
                [
                    divided(grad, scale) if flag and grad is not None else grad
                    for grad, flag in zip(grads, scaled, strict=True)
                ],
                trainable_variables=variables,
            )

        def settle() -> None:
            peaks = self._in_order(reading.peaks, variables)
            self._settle(reading.finite, reading.amax, peaks)

        if on_tensorflow:
            branch(reading.finite, step, settle, *grads)
        else:
            self._branch(reading.finite, lambda: step(*grads))
            settle()

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Return the values of all variables after `apply`; change none.

        Not on the TensorFlow backend.

        Args:
            optimizer_variables: The values of `variables`.
            grads: As for `apply`.
            trainable_variables: The values of the trainable variables.

        Returns:
            The new values of the trainable variables and of `variables`.
        """
        # Keras' own class implements its rule a second time here.
        base: Any = super(KerasLossScaleOptimizer, self)
        return base.stateless_apply(optimizer_variables, grads, trainable_variables)

    @property
    def scale(self) -> float:
        """The scale for the next loss. Waits for the device."""
        if not self.built:
            return float(self.initial_scale)
        return float(ops.convert_to_numpy(self.dynamic_scale.value))

    @property
    def last(self) -> StepOutcome:
        """The outcome of the last step. Never waits; reading a field does.

        Raises:
            StateError: The optimizer was not built.
        """
        return outcome(*self._facts().values(), self.variable_names)

    @property
    def applied_steps(self) -> int:
        """Steps taken, those of a loaded state included. Waits for the device."""
        return self._counts().applied

    @property
    def skipped_steps(self) -> int:
        """Steps skipped since the state was loaded. Waits for the device."""
        return self._counts().skipped

    @property
    def variable_names(self) -> list[str]:
        """The names of the trainable variables, in order."""
        return [
            getattr(variable, "path", variable.name)
            for variable in self._trainable_variables
        ]

    def save_own_variables(self, store: Any) -> None:
        """Write the state, exactly as Keras' own class does.

        A policy with a tolerance has one entry more.
        """
        for place, variable in enumerate(super().variables):
            store[str(place)] = variable.numpy()
        if self._tolerant():
            store[DEBT] = ops.convert_to_numpy(self._facts().counted().debt)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Read the state that this class or Keras' own has written.

        Raises:
            StateError: The saved scale is outside the bounds of the policy. Nothing
                was loaded.
        """
        variables = super().variables
        if len(set(store.keys()) - {DEBT}) != len(variables):
            # As Keras does.
            warnings.warn(
                f"Skipping variable loading for optimizer '{self.name}', because it "
                f"has {len(variables)} variables whereas the saved optimizer has "
                f"{len(store.keys())} variables.",
                stacklevel=2,
            )
            return
        if self.built:
            place = [variable is self.dynamic_scale for variable in variables]
            self._check_scale(float(store[str(place.index(True))]))
        for number, variable in enumerate(variables):
            variable.assign(store[str(number)])
        if self.built:
            taken = ops.convert_to_tensor(self.inner_optimizer.iterations)
            debt = store[DEBT] if DEBT in store.keys() else 0  # noqa: SIM118
            self._assign_counts(Counts(taken, 0, 0, debt if self._tolerant() else 0))

    def get_config(self) -> dict[str, Any]:
        """Return the configuration: Keras' four keys, or `policy` instead of two."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {
            "name": self.name,
            "inner_optimizer": inner,
            **settings_of(self.policy),
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> "LossScaleOptimizer":
        """Return an optimizer from a configuration of this class or of Keras' own."""
        settings = dict(config)
        if isinstance(settings.get("policy"), Mapping):
            settings["policy"] = policy_from(settings["policy"])
        inner = keras.saving.deserialize_keras_object(
            settings.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner, **settings)

    def _settle(self, finite: Any, amax: Any, peaks: Any) -> None:
        """Move the scale and store the outcome of the step."""
        facts = self._facts()
        counts = facts.counted()
        scale = ops.convert_to_tensor(self.dynamic_scale)
        before = ops.convert_to_tensor(facts.facts)[0]
        seen = packed(
            peaks,
            scale=scale,
            applied=finite,
            finite=finite,
            calibrated=counts.applied > 0,
            grown=ops.logical_and(scale > before, counts.applied + counts.skipped > 0),
            amax=amax,
        )
        state = self._state(scale, counts)
        moved = self.policy.next_state(state, Observed(finite, amax, True), ops.where)
        one = ops.cast(finite, counts.applied.dtype)
        counts = counts._replace(
            applied=counts.applied + one, skipped=counts.skipped + 1 - one
        )
        # A scale that cannot move has no floor to fall to.
        if self.policy.min_scale < self.policy.max_scale:
            stuck = ops.logical_and(
                ops.logical_not(finite), scale <= self.policy.min_scale
            )
            floor = ops.where(stuck, counts.at_floor + 1, 0)
            counts = counts._replace(at_floor=floor)
        # Assigned last: on the torch backend, tensors above share their memory with
        # the variables.
        self._put(facts.facts, seen)
        if isinstance(moved, ScaleState):
            counts = counts._replace(debt=moved.debt)
            self.dynamic_scale.assign(moved.scale)
            self.step_counter.assign(moved.finite_steps)
        self._assign_counts(counts)

    def _state(self, scale: Any, counts: Counts) -> FixedState | ScaleState:
        """Return the state of the policy, as tensors."""
        kind = type(self.policy.init_state())
        fields = {
            "scale": scale,
            "finite_steps": ops.convert_to_tensor(self.step_counter),
            "debt": counts.debt,
        }
        return kind(**{name: fields[name] for name in kind._fields})

    def _in_order(self, peaks: Any, variables: Sequence[Any]) -> Any:
        """Return f32[n]: the peaks in the order of `build`, 0 where there is none."""
        places = [self._get_variable_index(variable) for variable in variables]
        if places == list(range(len(self._trainable_variables))):
            return peaks
        found = {place: peaks[row] for row, place in enumerate(places)}
        zero = ops.zeros((), "float32")
        return ops.stack(
            [found.get(place, zero) for place in range(len(self._trainable_variables))]
        )

    def _branch(self, applied: Any, step: Callable[[], None]) -> None:
        """Call `step` if `applied`, on the JAX and torch backends.

        Args:
            applied: bool[].
            step: A step of the inner optimizer.
        """
        try:
            taken = bool(applied)
        except TypeError:
            # jax.errors.TracerBoolConversionError: the step is being compiled. A
            # branch then has to return the values that it would assign.
            pass
        else:
            if taken:
                step()
            return
        written = [*self._trainable_variables, *self.inner_optimizer.variables]
        before = [variable.value for variable in written]

        def after() -> list[Any]:
            mapping = list(zip(written, before, strict=True))
            with keras.StatelessScope(state_mapping=mapping) as scope:
                step()
            return [scope.get_current_value(variable) for variable in written]

        values = ops.cond(applied, after, lambda: before)
        for variable, value in zip(written, values, strict=True):
            self._put(variable, value)

    def _facts(self) -> LastStep:
        if self._last_step is None:
            raise StateError(
                "The optimizer has no variables yet, so it has taken no step. They are "
                "created by the first apply(), by fit(), or by build(variables). Call "
                "one of them first.",
                code="GS302",
            )
        return self._last_step

    def _counts(self) -> Counts:
        if self._last_step is None:
            return Counts(0, 0, 0, 0)
        return Counts(*ops.convert_to_numpy(self._last_step.counts.value).tolist())

    def _assign_counts(self, counts: Counts) -> None:
        variable = self._facts().counts
        self._put(variable, ops.stack([ops.cast(n, variable.dtype) for n in counts]))

    def _put(self, variable: Any, value: Any) -> None:
        # As all assignments of a step, by the optimizer that is wrapped.
        self.inner_optimizer.assign(variable, value)

    def _tolerant(self) -> bool:
        """Return True if the policy has a state that Keras' own class lacks."""
        return self.built and getattr(self.policy, "tolerance", 0.0) > 0.0

    def _check_scale(self, scale: float) -> None:
        low, high = self.policy.min_scale, self.policy.max_scale
        if not low <= scale <= high:
            raise StateError(
                f"The saved scale is {scale:g}, outside [{low:g}, {high:g}], the "
                "bounds of the policy. Gradients unscaled by it may become zero or "
                "infinite. Nothing was loaded: start without this state, or pass a "
                "policy whose bounds include the scale.",
                code="GS302",
            )


def _check_inner(inner: Any) -> None:
    if isinstance(inner, KerasLossScaleOptimizer):
        raise ConfigError(
            f"inner_optimizer is a {type(inner).__name__}. The loss would be scaled "
            "once and the gradients unscaled twice. Pass the optimizer inside it, "
            "inner_optimizer.inner_optimizer, or convert it with loss_scaled().",
            code="GS101",
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ConfigError(
            f"inner_optimizer={inner!r} is a {type(inner).__name__}. A step needs an "
            "optimizer of Keras. Pass one, such as keras.optimizers.Adam(), or use "
            "loss_scaled(), which takes names and configurations too.",
            code="GS101",
        )


def _check_number(grads: Sequence[Any], variables: Sequence[Any]) -> None:
    if len(grads) != len(variables):
        raise GradientError(
            f"There are {len(grads)} gradients for {len(variables)} variables. The "
            "optimizer would pair the wrong ones. Pass one gradient for each variable, "
            "None where there is none.",
            code="GS106",
        )
    if all(grad is None for grad in grads):
        raise GradientError(
            "No gradients provided for any variable. There is nothing to apply and "
            "nothing to check. Compute the gradients of the loss with respect to the "
            "variables that are passed.",
            code="GS103",
        )
