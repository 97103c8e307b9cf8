"""Any order of calls: the scaler against a model of it in a few lines of Python."""

import math
import pickle
import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from gradscale import DynamicScale, GradscaleWarning, ScaleCollapsed
from gradscale.torch import GradScaler
from gradscale.torch.device_state.async_copy import LAG, PERIOD
from tests.torch.training import INF, NAN, parameter, planted

FLOOR, INTERVAL = 1.0, 3
POLICY = DynamicScale(init_scale=4.0, min_scale=FLOOR, growth_interval=INTERVAL)
READY, UNSCALED, STEPPED = "ready", "unscaled", "stepped"


@dataclass
class Side:
    """One optimizer in the model.

    Attributes:
        grad: The unscaled gradient of each element; None if there is none.
        bad: An element is not finite.
        stage: As in the scaler.
        clipped: A clip was requested.
        found: Whether the last read found a bad element; None without a read since
            the last update.
        touched: The scaler knows of it since the last update.
        carried: An update came before its step.
        weight: Each element of the parameter.
        exact: No division by a norm has rounded the weight.
    """

    grad: float | None = None
    bad: bool = False
    stage: str = READY
    clipped: bool = False
    found: bool | None = None
    touched: bool = False
    carried: bool = False
    weight: float = 0.0
    exact: bool = True
    applied: int = 0
    skipped: int = 0

    def drop(self):
        """Forget the gradient and its stage."""
        self.grad, self.bad, self.found = None, False, None
        self.stage, self.clipped, self.touched = READY, False, False
        self.carried = False


sides = st.sampled_from([0, 1])


class Shell(RuleBasedStateMachine):
    """Two optimizers, plain and fused, on one scaler."""

    @initialize()
    def begin(self):
        self.scaler = GradScaler("cpu", policy=POLICY)
        self.params = [parameter(2), parameter(2)]
        self.optimizers = [
            torch.optim.SGD([self.params[0]], lr=0.5),
            torch.optim.SGD([self.params[1]], lr=0.5, fused=True),
        ]
        self.sides = [Side(), Side()]
        self.scale, self.tracker, self.floor_steps = 4.0, 0, 0
        self.applied = self.skipped = 0
        self.scaled = False
        self._restart_rows()

    def _restart_rows(self):
        """Count updates from the loaded counts; no row is on its way to the host."""
        self.updates = self.applied + self.skipped
        self.rows, self.copied, self.copied_at = [], [], None

    def _rows_due(self):
        """Count an update; return the rows that are read in it."""
        self.updates += 1
        self.rows.append(self.floor_steps)
        if self.updates % PERIOD == 0:
            self.rows, self.copied, self.copied_at = [], self.rows, self.updates
        elif self.copied_at is not None and self.updates == self.copied_at + LAG:
            self.copied_at = None
            return self.copied
        return []

    def _refused(self, side, call, *, stepped, unscaled=None):
        """Return whether the model refuses the call; if so, the scaler must too."""
        words = None
        if not self.scaled:
            words = "Attempted .* but _scale is None"
        elif side.stage == STEPPED:
            words = stepped
        elif side.stage == UNSCALED:
            words = unscaled
        if words is None:
            return False
        with pytest.raises((RuntimeError, AssertionError), match=words):
            call()
        return True

    def _may_run_backward(self, which):
        side = self.sides[which]
        return side.stage == READY and not side.clipped

    @rule(
        which=sides,
        grad=st.sampled_from([0.5, 1.0, -0.25]),
        bad=st.sampled_from([None, None, None, INF, NAN]),
    )
    def backward(self, which, grad, bad):
        if not self._may_run_backward(which):
            return
        side, param = self.sides[which], self.params[which]
        values = [grad, grad if bad is None else bad]
        self.scaler.scale(planted(param, values)).backward()
        self.scaled = True
        side.grad = grad + (side.grad or 0.0)
        side.bad = side.bad or bad is not None
        if not side.bad:
            assert param.grad.tolist() == [side.grad * self.scale] * 2

    @rule(which=sides)
    def unscale(self, which):
        side, optimizer = self.sides[which], self.optimizers[which]
        if side.carried and side.stage == UNSCALED:
            return
        if self._refused(
            side,
            lambda: self.scaler.unscale_(optimizer),
            unscaled="already been called on this optimizer",
            stepped="is being called after step",
        ):
            return
        self.scaler.unscale_(optimizer)
        side.stage, side.touched = UNSCALED, True
        if side.grad is not None:
            side.found = side.bad
            if not side.bad and side.exact and not side.clipped:
                assert self.params[which].grad.tolist() == [side.grad] * 2

    @rule(which=sides, max_norm=st.sampled_from([0.25, 1024.0]))
    def clip(self, which, max_norm):
        side, optimizer = self.sides[which], self.optimizers[which]

        def call():
            return self.scaler.clip_grad_norm_(optimizer, max_norm)

        if self._refused(side, call, stepped="after step"):
            return
        norm = call().item()
        side.touched = True
        if side.grad is None:
            assert norm == 0.0
            return
        side.clipped = True
        if side.bad:
            assert not math.isfinite(norm)
            return
        expected = abs(side.grad) * math.sqrt(2.0)
        assert norm == pytest.approx(expected, rel=1e-6)
        coef = max_norm / (expected + 1e-6)
        if coef < 1.0:
            side.grad *= coef
            side.exact = False

    @rule(which=sides)
    def step(self, which):
        side, optimizer = self.sides[which], self.optimizers[which]
        if self._refused(
            side, lambda: self.scaler.step(optimizer), stepped="already been called"
        ):
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=GradscaleWarning)
            self.scaler.step(optimizer)
        if side.grad is not None:
            if side.found is None:
                side.found = side.bad
            if not side.found:
                side.weight -= 0.5 * side.grad
        side.stage, side.touched = STEPPED, True
        optimizer.zero_grad()

    @rule(new_scale=st.sampled_from([None, None, None, 2, 16.0, torch.tensor([8.0])]))
    def update(self, new_scale):
        parts = [s for s in self.sides if s.touched and s.found is not None]
        idle = [
            s for s in self.sides if s.touched and s.found is None and s.stage != READY
        ]
        refusal = None
        if not self.scaled:
            refusal = "Attempted update but _scale is None"
        elif new_scale is None and not parts and not idle:
            refusal = "No inf checks were recorded prior to update"
        if refusal is not None:
            with pytest.raises(AssertionError, match=refusal):
                self.scaler.update(new_scale)
            return
        collapsed = self._move(parts, idle, new_scale)
        if collapsed:
            with pytest.raises(ScaleCollapsed):
                self.scaler.update(new_scale)
            # All rows up to here are dropped.
            self.rows, self.copied, self.copied_at = [], [], None
        else:
            self.scaler.update(new_scale)
        if parts or idle:
            self._compare_outcome(parts, idle)
        for side in self.sides:
            if side.stage == STEPPED or (side.stage == UNSCALED and side.grad is None):
                side.drop()
            elif side.touched:
                side.touched = False
                side.carried = side.stage == UNSCALED or side.clipped
                if side.stage == READY:
                    side.found = None

    def _move(self, parts, idle, new_scale):
        """Move the model's scale and counts; return whether a collapse is due."""
        if parts:
            bad = any(side.found for side in parts)
            stuck = bad and self.scale <= FLOOR
            self.floor_steps = self.floor_steps + 1 if stuck else 0
            if new_scale is None:
                if bad:
                    self.scale, self.tracker = max(self.scale / 2, FLOOR), 0
                else:
                    self.tracker += 1
                    if self.tracker >= INTERVAL:
                        self.scale, self.tracker = self.scale * 2, 0
            stepped = [side for side in parts if side.stage == STEPPED]
            for side in stepped:
                side.applied += not side.found
                side.skipped += side.found
            if stepped:
                self.applied += not bad
                self.skipped += bad
        if new_scale is not None:
            self.scale = float(new_scale)
        if not parts and not idle:
            return False
        return any(steps >= 3 for steps in self._rows_due())

    def _compare_outcome(self, parts, idle):
        last = self.scaler.last
        stepped = [side for side in parts if side.stage == STEPPED]
        assert last.applied is (bool(stepped) and not any(s.found for s in parts))
        for side, optimizer in zip(self.sides, self.optimizers, strict=True):
            if side in parts:
                taken = side.stage == STEPPED and not side.found
                assert last[optimizer].applied is taken
                assert bool(last[optimizer].culprits) is side.found
            elif side in idle:
                assert not last[optimizer].applied

    @rule(which=st.sampled_from([0, 1, None]))
    def reset(self, which):
        chosen = [0, 1] if which is None else [which]
        self.scaler.reset(None if which is None else self.optimizers[which])
        for index in chosen:
            self.optimizers[index].zero_grad()
            self.sides[index].drop()

    def _is_between_iterations(self):
        return not any(s.touched or s.carried or s.grad is not None for s in self.sides)

    @precondition(lambda self: self._is_between_iterations())
    @rule(way=st.sampled_from(["state_dict", "pickle", "load over"]))
    def copy(self, way):
        state = self.scaler.state_dict()
        if way == "state_dict":
            self.scaler = GradScaler("cpu")
            self.scaler.load_state_dict(state)
        elif way == "pickle":
            self.scaler = pickle.loads(pickle.dumps(self.scaler))
        else:
            self.scaler.load_state_dict(state)
        assert self.scaler.state_dict() == state
        self._restart_rows()
        if way != "load over":
            self.scaled = False
            # Counts go by the order in which the optimizers come.
            for side in self.sides:
                side.applied = side.skipped = 0

    @precondition(lambda self: any(side.touched for side in self.sides))
    @rule()
    def pickle_inside(self):
        with pytest.raises(
            AssertionError, match="may only be pickled at the beginning"
        ):
            pickle.dumps(self.scaler)

    @invariant()
    def scale_and_tracker_are_the_models(self):
        assert self.scaler.get_scale() == self.scale
        assert self.scaler._get_growth_tracker() == self.tracker
        assert POLICY.min_scale <= self.scale <= POLICY.max_scale

    @invariant()
    def weights_are_the_models_and_finite(self):
        for side, param in zip(self.sides, self.params, strict=True):
            if side.exact:
                assert param.tolist() == [side.weight] * 2
            else:
                # Up to 50 steps of at most 0.5, each a few ulp from the exact one.
                near = pytest.approx([side.weight] * 2, rel=1e-5, abs=1e-5)
                assert param.tolist() == near

    @invariant()
    def counts_are_the_models(self):
        assert self.scaler.applied_steps == self.applied
        assert self.scaler.skipped_steps == self.skipped


Shell.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
)
test_any_order_of_calls_agrees_with_the_model = Shell.TestCase
