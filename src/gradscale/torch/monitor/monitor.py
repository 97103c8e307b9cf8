"""Judges the step rows that arrive from the device: reports, records, raises."""

import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gradscale.core.records import COLLAPSED_AFTER, StepRecord
from gradscale.errors import ScaleCollapsed
from gradscale.judge.judge import Judgement
from gradscale.judge.verdict_table import codes_where, verdicts_where
from gradscale.recording.recorded_run import RecordedRun
from gradscale.recording.recorder import Recorder
from gradscale.torch import messages
from gradscale.torch.device_state.async_copy import LAG, PERIOD, HostRow, RowCopies
from gradscale.torch.device_state.layout import DeviceRow, DeviceState
from gradscale.torch.kernels import Kernels
from gradscale.torch.locate.module_hooks import FINITE_STEPS, ModuleHooks
from gradscale.torch.monitor.evidence import EvidenceCollector, PendingEvidence
from gradscale.torch.monitor.location_report import LocationReport
from gradscale.torch.monitor.loop_check import EVERY, FIRST, LoopCheck
from gradscale.torch.monitor.model_lookup import ModelLookup
from gradscale.torch.monitor.recorder import process_here
from gradscale.torch.step.optimizer_step import OptimizerStep
from gradscale.torch.underflow.meter import Meter
from gradscale.torch.underflow.sample import UnderflowSample

# The sampling interval, in steps, if there are only sinks.
SAMPLE_EVERY = 100
# The multiple of the usual losses per update from which the excess counts as unused.
UNUSED_EXCESS = 8
# Consecutive bad steps, not explained by the calibration of the scale, before the
# module hooks are enabled.
HOOKED_AFTER = 3
# Consecutive bad steps before the next one is no longer an ordinary overflow.
SUSPECT = HOOKED_AFTER - 1
# The largest scale that no longer explains gradients that were never finite.
UNEXPLAINED_SCALE = 1.0
# Finite steps for which the hooks stay enabled until the next failure that the scale
# does not explain, such as a bad batch in every epoch; and how often per run.
LONG_SEARCH = 100
LONG_SEARCHES = 4
# Verdicts that need no module hooks.
_EXPLAINED = verdicts_where(lambda row: not row.module_hooks)


class Monitor:
    """Judges the steps of a scaler as their rows arrive.

    Rows are judged in order, and in the same update on every rank.

    Args:
        guard: "raise" stops a run that no scale can help.
        model: Names modules; None to search for it when something goes wrong.
        recorder: Writes the run file; None for none.
        sinks: Each gets every record and judgement.
        kernels: As for the scaler.
        warn: Issues warnings.

    Attributes:
        module_hooks: The module hooks.
        loop: Samples how the training loop uses the scaler.
        model_lookup: Finds the model of an optimizer.
        meter: The underflow meter; it samples where there is a run file or a sink.
        recorded: There is a run file or a sink.
        raises_at_floor: Raise `ScaleCollapsed`. If False, steps continue to be skipped
            and the finding is recorded.
        resumed: An optimizer had taken steps before the first of this scaler, whose
            state was not loaded.
    """

    def __init__(
        self,
        *,
        guard: str,
        model: torch.nn.Module | None,
        recorder: Recorder | None = None,
        sinks: Iterable[Any] = (),
        kernels: Kernels = "auto",
        warn: messages.WarnOnce | None = None,
    ) -> None:
        self.module_hooks = ModuleHooks()
        # Modules may outlive a scaler: a deleted scaler must not leave hooks on them.
        weakref.finalize(self, self.module_hooks.disable).atexit = False
        self._run = RecordedRun(
            recorder=recorder,
            sinks=sinks,
            guard="raise" if guard == "raise" else "report",
            process=process_here,
            versions={"torch": torch.__version__},
            # Issued as warnings, and raised by the guard at the floor.
            reported_elsewhere=codes_where(lambda row: row.warned),
            raised_elsewhere=codes_where(lambda row: row.raised),
        )
        self._warn = messages.WarnOnce() if warn is None else warn
        self.model_lookup = ModelLookup()
        self._evidence = EvidenceCollector(
            model, self.model_lookup, peaks=recorder is not None
        )
        every = SAMPLE_EVERY if recorder is None else recorder.sample_every
        self.recorded = self._run.observed
        self.raises_at_floor = True
        self.resumed = False
        self.meter = Meter(every if self.recorded else None, kernels=kernels)
        weakref.finalize(self, self.meter.remove_hooks).atexit = False
        self._copies = RowCopies()
        # By update: the step of each optimizer, and the sample of the meter. Rows are
        # at most LAG + PERIOD updates old when they are judged.
        self._steps: deque[Mapping[int, OptimizerStep]] = deque(maxlen=LAG + PERIOD)
        self._samples: dict[int, UnderflowSample] = {}
        # Each with the update in which it is judged, the same on every rank.
        self._waiting: deque[tuple[int, PendingEvidence]] = deque()
        self._bad = 0
        # Of the last step that was not finite.
        self._culprits: list[str] = []
        # Of a run that is not recorded, nothing has to be created.
        self._begun = not self.recorded
        self._unlocated = False
        # Layers for which casts were observed.
        self._casts_watched: set[str] = set()
        self._long_searches = LONG_SEARCHES
        # The last failing step that the module hooks have observed.
        self._observed = 0
        self._end: weakref.finalize[..., Any] | None = None
        self._locations = LocationReport(self._run)
        # Losses scaled since the last update, and before each earlier one.
        self.scaled_losses = 0
        # By an update without a step.
        self.scale_was_set = False
        self._windows: Counter[int] = Counter()
        self._last_weights: Mapping[str, Any] = {}
        self._last_scale = 0.0
        run = self._run
        self.loop = LoopCheck(
            lambda update, data: run.observe(run.step_of_update(update), data),
            self.model_lookup,
            optimizers=self.recorded,
        )

    def end_update(
        self, scaler: Any, state: DeviceState, steps: Mapping[int, OptimizerStep]
    ) -> None:
        """Count an update; judge the rows that are due.

        Args:
            scaler: Its policy bounds the scale, its state goes into a bundle.
            state: After the update.
            steps: The step of each optimizer. Must not change afterwards.

        Raises:
            ScaleCollapsed: The scale stays at its floor.
            HopelessRun: No scale can help, and `guard` is "raise".
        """
        # At the first update, so that a run of a few steps is recorded too.
        if not self._begun:
            self.begin(scaler, state)
        recorder = self._run.recorder
        if recorder is not None:
            if not self._windows:
                owners = (step.owner() for step in steps.values())
                recorder.trains(owners, resumed=self.resumed)
            recorder.begin_update(state.total.start)
        self._windows[self.scaled_losses] += 1
        self.scaled_losses = 0
        self._steps.append(steps)
        sample = self.meter.end_step() if self.recorded else None
        while self.meter.failures:
            self._report_failure("activation hooks", self.meter.failures.pop())
        if sample is not None:
            self._samples[sample.step] = sample
        if self.module_hooks.enabled:
            self._report_location(state)
        rows = self._copies.advance(state)
        updates = self._copies.updates
        if self.loop.due or updates in FIRST or (updates + 1) % EVERY == 0:
            scale = self._last_scale or scaler.policy.init_state().scale
            self.loop.end_update(updates, scale, steps)
        if not rows and not self._waiting:
            return
        self._judge_rows(rows, scaler.state_dict)
        error: Exception | None = self._run.hopeless
        if error is None:
            error = self._guard_scale(rows, scaler)
        if error is not None:
            # Rows up to here are recorded, and do not raise again if the caller
            # catches the error and continues.
            self._judge_rows(self._copies.drain(state), None)
            self._judge_waiting(None)
            self._run.hopeless = None
            raise error

    def report_late_backward(self) -> None:
        """Report a backward pass that has added to unscaled gradients."""
        self.loop.late_backward(self._copies.updates + 1, self._last_scale)

    def keep_weights(self, step: OptimizerStep) -> None:
        """Keep the size of the weights before the first step. No host sync."""
        self._evidence.keep_weights(step)

    def drop(self, key: int, param_groups: list[dict[str, Any]]) -> None:
        """Release the parameters of a deleted optimizer."""
        for steps in self._steps:
            if key in steps:
                steps[key].name_params(param_groups)

    def _report_location(self, state: DeviceState) -> None:
        """Report the location that the module hooks found in this update. Syncs."""
        if self._hooks_failed():
            return
        total = state.total
        record = DeviceRow(*total.row.tolist()).record(total.counts.tolist()[0])
        if record.finite and record.norm_finite:
            self.module_hooks.finite_step()
            if not self.module_hooks.enabled:
                self._locations.clear()
        else:
            location = self.module_hooks.locate(record.scale)
            self._observed = self._run.step_of_update(record.step)
            self._locations.report(location, self._observed)

    def _hooks_failed(self) -> bool:
        """Report and disable failed module hooks; return whether they have failed."""
        failure = self.module_hooks.failure
        if failure is not None:
            self._report_failure("module hooks", failure)
            self.module_hooks.disable()
        return failure is not None

    def _report_failure(self, hooks: str, failure: str) -> None:
        """Report an exception inside hooks, which have removed themselves for good."""
        self._run.report(
            f"The {hooks} failed and are off for the rest of the run: {failure}. They "
            "only observe: the training is not affected, but modules are not named. "
            "Replay the batch with scaler.diagnose(closure) to find the module."
        )

    def _guard_scale(
        self, rows: Sequence[HostRow], scaler: Any
    ) -> ScaleCollapsed | None:
        """Issue the warnings that rows require; return the error of a collapse."""
        policy = scaler.policy
        fixed = policy.min_scale == policy.max_scale
        for record, refused, _ in rows:
            if record.floor_steps >= COLLAPSED_AFTER and self.raises_at_floor:
                # Judged first: the error needs the finding and its names.
                self._judge_waiting(scaler.state_dict)
                finding, self._run.raised_text = self._run.raised_text, ""
                return messages.collapsed(record, policy, self._culprits, finding)
            if refused:
                self._warn.refused_scale(policy)
            if fixed and record.read and not record.applied:
                self._warn.static_skip(record.scale)
        return None

    def begin(self, owner: Any, state: DeviceState) -> None:
        """Create the run file in the first call, if one was requested.

        Args:
            owner: Its deletion closes the run file, unless the process ends before.
            state: The source of the rows that are not judged before the end.
        """
        if self._begun:
            return
        self._begun = True
        last = partial(_drain, self, state, os.getpid())
        self._run.begin()
        recorder = self._run.recorder
        if recorder is None:
            self._end = weakref.finalize(owner, last)
            return
        recorder.before_end(last)
        self._end = weakref.finalize(owner, recorder.let_go)
        # At the end of the process the recorder closes its file itself.
        self._end.atexit = False

    def flush(self, state: DeviceState | None) -> None:
        """Judge all rows without stopping the run, and drop the samples. Syncs."""
        if state is not None:
            self._samples.update((s.step, s) for s in self.meter.finish())
            self._judge_rows(self._copies.drain(state), None)
        self._judge_waiting(None)
        self.loop.flush(self._copies.updates + 1, self._last_scale)
        unused = self._unused_losses()
        if unused:
            data = {"observed": "end", "unused_losses": unused}
            step = self._run.step_of_update(self._copies.updates + 1)
            self._run.observe(step, data)

    def _unused_losses(self) -> int:
        """Return the excess of losses in windows far longer than the usual one.

        0 if other code steps, and sets the scale.
        """
        if self.scale_was_set and not self._windows:
            return 0
        [(usual, _)] = self._windows.most_common(1) or [(1, 0)]
        windows = [*self._windows.items(), (self.scaled_losses, 1)]
        long = UNUSED_EXCESS * max(1, usual)
        return sum((size - usual) * times for size, times in windows if size >= long)

    def write_bundle(self, parent: Path, state: dict[str, Any], batch: Any) -> Path:
        """Write the evidence of the last steps that have been judged."""
        save = None if batch is None else partial(torch.save, batch)
        return self._run.write_bundle(parent, state, save)

    def close(self, state: DeviceState | None) -> None:
        """Judge the remaining rows and close the run file. Syncs.

        Args:
            state: The source of the rows; None before the first loss.
        """
        if self._end is not None:
            self._end()
        else:
            self.flush(state)
            self._run.close()
        self.module_hooks.disable()
        self.meter.remove_hooks()
        self.loop.close()

    def _judge_rows(
        self,
        rows: Sequence[HostRow],
        state_dict: Callable[[], dict[str, Any]] | None,
    ) -> None:
        """Judge rows in order, each once its evidence has arrived.

        Args:
            rows: The rows that are due.
            state_dict: Returns the scaler's state, for a bundle; None not to stop.
        """
        now = self._copies.updates
        if rows:
            self._last_scale = rows[-1].record.scale
        for row in rows:
            record = row.record
            healthy = record.finite and record.norm_finite and record.loss_finite
            if healthy and record.read and not (self._waiting or self._samples):
                # No evidence to collect.
                self._bad = 0
                self._run.record_step(record)
                continue
            steps = self._steps_of(row)
            sample = None
            if row.update is not None:
                sample = self._samples.pop(row.update, None)
            suspect = self._bad >= SUSPECT
            case = self._evidence.start(record, steps, sample, suspect=suspect)
            if case.in_flight or self._waiting:
                # Copies of a few numbers arrive within a step.
                self._waiting.append((now + case.in_flight, case))
            else:
                self._judge_case(case, state_dict)
        while self._waiting and self._waiting[0][0] <= now:
            self._judge_case(self._waiting.popleft()[1], state_dict)

    def _judge_waiting(self, state_dict: Callable[[], dict[str, Any]] | None) -> None:
        while self._waiting:
            self._judge_case(self._waiting.popleft()[1], state_dict)

    def _steps_of(self, row: HostRow) -> list[OptimizerStep]:
        """Return the step of each optimizer; none for a replayed step."""
        if row.update is None:
            return []
        place = len(self._steps) - 1 - (self._copies.updates - row.update)
        return list(self._steps[place].values()) if place >= 0 else []

    def _judge_case(
        self, case: PendingEvidence, state_dict: Callable[[], dict[str, Any]] | None
    ) -> None:
        """Judge a step, record it, report the findings."""
        order, record = self.module_hooks.backward_order, case.record
        suspect = self._bad >= SUSPECT or record.floor_steps >= COLLAPSED_AFTER
        found = self._evidence.finish(case, order, suspect=suspect)
        judge, sample = self._run.judge, case.sample
        judge.tensors = max(judge.tensors, found.tensors)
        self._culprits = found.culprits
        if found.weights and found.weights != self._last_weights:
            self._last_weights = found.weights
            self._run.observe(self._run.step_of(found.record), found.weights)
        judged = self._run.record_step(
            found.record,
            found.culprits,
            found.peaks,
            None if sample is None else sample.rows(),
            state=state_dict,
        )
        self._follow(found.record, judged, case.steps)
        suspected = judge.suspected_layer
        if sample is not None and suspected and suspected not in self._casts_watched:
            self._casts_watched.add(suspected)
            self.loop.watch_casts()

    def _follow(
        self, record: StepRecord, judged: Judgement, steps: Sequence[OptimizerStep]
    ) -> None:
        """Enable the module hooks once a failure is no longer an ordinary one."""
        if record.finite and record.norm_finite:
            self._bad = 0
            return
        if judged.verdict not in _EXPLAINED or record.scale <= UNEXPLAINED_SCALE:
            self._bad += 1
        hooks = self.module_hooks
        if hooks.enabled or hooks.failure is not None:
            return
        search_long = (
            self._long_searches > 0
            and record.step > self._observed
            and self._run.judge.excludes_scale
        )
        if self._bad < HOOKED_AFTER and not search_long:
            return
        self._long_searches -= search_long
        model = self._evidence.model_of(steps)
        finite_steps = LONG_SEARCH if search_long else FINITE_STEPS
        enabled = model is not None and hooks.enable(model, finite_steps)
        if not enabled and not self._hooks_failed() and not self._unlocated:
            self._unlocated = True
            reason = "no model was found; pass model= to the scaler"
            if model is not None:
                reason = "hooks do not reach into a compiled model"
            what = f"the module that makes the first non-finite value: {reason}"
            data = {"observed": "not_judged", "what": what}
            self._run.observe(self._run.step_of(record), data)


def _drain(monitor: Monitor, state: DeviceState, pid: int) -> None:
    """Judge all rows that were not judged. Syncs.

    Args:
        monitor: The monitor; a reference to its owner would keep the owner alive.
        state: The source of the rows.
        pid: The process that judges; a process forked from it does nothing.
    """
    if os.getpid() == pid:
        monitor.module_hooks.disable()
        monitor.flush(state)
        monitor.module_hooks.disable()
