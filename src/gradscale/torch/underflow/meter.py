"""Samples exponent histograms of the gradients every N-th step."""

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.errors import ConfigError
from gradscale.runfile.thinning import due
from gradscale.torch.device_state.async_copy import LAG, AsyncTensor
from gradscale.torch.grads.read_plain import peaks_on_host
from gradscale.torch.grads.stats import GradStats, by_kind
from gradscale.torch.kernels import Kernels
from gradscale.torch.names import apart, names_of
from gradscale.torch.tensor_list import GradSnapshot
from gradscale.torch.underflow.activations import HALF, ActivationGradients
from gradscale.torch.underflow.exponent_counter import Counter
from gradscale.torch.underflow.sample import PendingSample, UnderflowSample


class Meter:
    """Samples exponent histograms of the gradients, every N-th step.

    A step that is not sampled costs one addition and one comparison; a sampled one
    reads the gradients once more. No host sync: the counts are copied to the host
    asynchronously and returned `LAG` updates later.

    >>> from gradscale.torch.grads.collect import collect
    >>> weight = torch.nn.Parameter(torch.zeros(4))
    >>> meter, samples = Meter(every=10), []
    >>> for step in (1, 2, 3):
    ...     weight.grad = torch.tensor([0.0, 2.0**-30, 2.0**-20, 1.0])
    ...     if meter.wanted:
    ...         meter.sample(collect([weight], allow_fp16=False), torch.tensor(8.0))
    ...     samples.append(meter.end_step())
    >>> samples[:2]
    [None, None]
    >>> samples[2].step, samples[2].scale, samples[2].whole.lost
    (1, 8.0, 0.3333333333333333)

    Args:
        every: Sample every `every`-th step; None to sample none. Before the first of
            them, steps that are a power of two are sampled, so that a short run has
            samples too.
        names: Modules and optimizers that name the parameters.
        kernels: As for the scaler.

    Attributes:
        step: Number of steps that have ended.
        wanted: The current step is to be sampled.
        busy_at: The next step at whose end there is work to do.
        failures: Exceptions inside the hooks on modules, in words, to be reported.
    """

    def __init__(
        self,
        every: int | None = 100,
        names: Iterable[Any] = (),
        kernels: Kernels = "auto",
    ) -> None:
        if every is not None and every < 1:
            raise ConfigError(
                f"every={every} is not an interval. The meter samples every every-th "
                "step, so it must be 1 or more. Pass 100.",
                code="GS101",
            )
        self.step = 0
        self.wanted = False
        self.failures: list[str] = []
        self._every = every
        self._names = tuple(names)
        self._kernels = kernels
        self._counter = Counter(kernels)
        self._activations: list[ActivationGradients] = []
        self._current: PendingSample | None = None
        self._pending: deque[PendingSample] = deque()
        self._begin_step()

    def start(self, step: int) -> None:
        """Set the step count and drop pending samples.

        Args:
            step: Number of steps that have ended, for a run that is resumed. If it is
                the present count, nothing changes.
        """
        if step == self.step:
            return
        self.step, self.wanted = step, False
        self._pending.clear()
        self.forget()
        self._begin_step()

    def watch_activations(
        self, model: nn.Module, dtypes: Sequence[torch.dtype] = HALF
    ) -> None:
        """Also sample the gradients of module outputs, in sampled steps only.

        A float16 backward pass flushes small values there. The hooks are registered in
        sampled steps only. A compiled model is not watched.

        Args:
            model: Names the modules.
            dtypes: Gradients of other dtypes are ignored.
        """
        activations = ActivationGradients(model, Counter(self._kernels), dtypes)
        self._activations.append(activations)
        if self.wanted:
            activations.enable()

    @torch.no_grad()
    def sample(
        self,
        gradients: GradSnapshot,
        scale: Tensor,
        names: Iterable[Any] = (),
        stats: GradStats | None = None,
    ) -> None:
        """Count the exponents of one optimizer's gradients. No host sync.

        Call it in steps that are `wanted`, before the gradients are written to, and
        not while a graph is captured or compiled.

        Args:
            gradients: As `collect` returns them, still scaled.
            scale: f32[], the scale of the gradients.
            names: As in the constructor; searched after those.
            stats: The statistics of the gradients, for their peaks.
        """
        if not gradients.tensors:
            return
        if self._current is None:
            self._current = PendingSample(AsyncTensor(scale.detach().reshape(1)))
        own = names_of(gradients.params, (*self._names, *names))
        unique = apart(own, self._current.names)
        for kind, indices, tensors in by_kind(gradients.tensors):
            counts = AsyncTensor(self._counter.count(tensors, kind))
            self._current.tensors.append(([unique[i] for i in indices], counts))
        for read in () if stats is None else stats.kinds:
            peaks = read.peaks if read.stats is None else read.stats.peaks
            if peaks is None:
                # Computed on demand: none of them was a possible culprit.
                peaks = peaks_on_host([gradients.tensors[i] for i in read.positions])
            here = [unique[i] for i in read.positions]
            self._current.peaks.append((here, AsyncTensor(peaks)))

    def forget(self) -> None:
        """Drop the samples of the current step, as in `reset()`."""
        self._current = None
        for activations in self._activations:
            activations.disable()
            if self.wanted:
                activations.enable()

    def remove_hooks(self) -> None:
        """Stop watching activations."""
        for activations in self._activations:
            activations.disable()
        self._activations = []

    def end_step(self) -> UnderflowSample | None:
        """End a step; return the sample of `LAG` updates ago, if there is one.

        Waits only if that sample has not arrived yet.
        """
        self.step += 1
        if self.step < self.busy_at:
            return None
        if self.wanted:
            self._end_sampled_step()
        sample = None
        # One at most: a step adds at most one.
        if self._pending and self._pending[0].step + LAG <= self.step:
            sample = self._pending.popleft().read()
        self._begin_step()
        return sample

    def finish(self) -> list[UnderflowSample]:
        """Return all pending samples. Waits for them."""
        samples = [pending.read() for pending in self._pending]
        self._pending.clear()
        return samples

    def _end_sampled_step(self) -> None:
        current, self._current = self._current, None
        counted = [activations.disable() for activations in self._activations]
        failed = [each for each in self._activations if each.failure is not None]
        for activations in failed:
            self.failures.append(str(activations.failure))
            self._activations.remove(activations)
        if current is None:
            return
        current.step = self.step
        for counts in counted:
            for device in {each.device for each in counts.values()}:
                names = [name for name in counts if counts[name].device == device]
                stacked = torch.stack([counts[name] for name in names])
                current.activations.append((names, AsyncTensor(stacked)))
        self._pending.append(current)

    def _begin_step(self) -> None:
        self.wanted = self._every is not None and due(self.step + 1, self._every)
        if self.wanted:
            for activations in self._activations:
                activations.enable()
        self.busy_at = self._next_busy()

    def _next_busy(self) -> int:
        """Return the next step at whose end there is work to do."""
        if self._every is None:
            return sys.maxsize
        if self.wanted:
            return self.step + 1
        upcoming = self.step + 1
        # The step before a sampled one enables its hooks.
        multiple = -(-(upcoming + 1) // self._every) * self._every - 1
        power = (1 << upcoming.bit_length()) - 1
        times = [multiple]
        if power + 1 < self._every:
            times.append(power)
        if self._pending:
            times.append(self._pending[0].step + LAG)
        return max(min(times), upcoming)
