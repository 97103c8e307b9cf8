"""The underflow meter: what float16 does to the gradients, sampled now and then."""

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.errors import ConfigError
from gradscale.runfile.thinning import due
from gradscale.torch.device_state.host_copy import LAG
from gradscale.torch.device_state.late import Late
from gradscale.torch.grads.read_plain import peaks_on_host
from gradscale.torch.grads.stats import Reading, by_kind
from gradscale.torch.kernels import Kernels
from gradscale.torch.names import apart, names_of
from gradscale.torch.tensor_list import GradSnapshot
from gradscale.torch.underflow.activations import HALF, ActivationGradients
from gradscale.torch.underflow.exponent_counter import Counter
from gradscale.torch.underflow.sample import Taken, UnderflowSample


class Meter:
    """Samples what float16 does to the gradients, every N-th step.

    In a step that is not sampled it costs one addition and one comparison. In one
    that is, the gradients are read once more. No host sync: counts are copied to the
    host behind the step and handed over two updates later.

    >>> from gradscale.torch.grads.collect import gather
    >>> weight = torch.nn.Parameter(torch.zeros(4))
    >>> meter = Meter(every=10)
    >>> for step in (1, 2, 3):
    ...     weight.grad = torch.tensor([0.0, 2.0**-30, 2.0**-20, 1.0])
    ...     if meter.wanted:
    ...         meter.sample(gather([weight], allow_fp16=False), torch.tensor(8.0))
    ...     if meter.turn():
    ...         samples = meter.due()
    >>> [(sample.step, sample.scale) for sample in samples]
    [(1, 8.0)]
    >>> samples[0].whole.lost, samples[0].whole.zero_share
    (0.3333333333333333, 0.5)

    Args:
        every: The distance of the steps to sample; None to sample none. Before the
            first of them, steps that are a power of two are sampled, so that a short
            run has samples too.
        names: Modules and optimizers that know names of parameters.
        kernels: As for the scaler.

    Attributes:
        step: How many steps have ended.
        wanted: The step that is under way is to be sampled.
        busy_at: The step at whose end there is something to do.
    """

    def __init__(
        self,
        every: int | None = 100,
        names: Iterable[Any] = (),
        kernels: Kernels = "auto",
    ) -> None:
        if every is not None and every < 1:
            raise ConfigError(
                f"every={every} is no distance between steps. Every every-th step is "
                "sampled, so it must be 1 or more. Pass 100.",
                code="GS101",
            )
        self.step = 0
        self.wanted = False
        self._every = every
        self._names = tuple(names)
        self._kernels = kernels
        self._counter = Counter(kernels)
        self._watched: list[ActivationGradients] = []
        self._taken: Taken | None = None
        self._posted: deque[Taken] = deque()
        self._begin_step()

    def start(self, step: int) -> None:
        """Count from here on; what was sampled and not handed over is dropped.

        Args:
            step: How many steps have ended: those of a run that is resumed. If it is
                the present count, nothing is changed.
        """
        if step == self.step:
            return
        self.step, self.wanted = step, False
        self._posted.clear()
        self.forget()
        self._begin_step()

    def watch_activations(
        self, model: nn.Module, dtypes: Sequence[torch.dtype] = HALF
    ) -> None:
        """Also count in the gradients of module outputs, in sampled steps only.

        There it is that a backward pass in float16 flushes. Hooks are on the modules
        in sampled steps and in no other. A compiled model is not watched.

        Args:
            model: Its modules are known by their names in it.
            dtypes: GradSnapshot of other dtypes are passed over.
        """
        watched = ActivationGradients(model, Counter(self._kernels), dtypes)
        self._watched.append(watched)
        if self.wanted:
            watched.turn_on()

    def ignore_activations(self) -> None:
        """Remove every hook and watch activations no more."""
        for watched in self._watched:
            watched.turn_off()
        self._watched = []

    @torch.no_grad()
    def sample(
        self,
        gradients: GradSnapshot,
        scale: Tensor,
        names: Iterable[Any] = (),
        reading: Reading | None = None,
    ) -> None:
        """Count in the gradients of an optimizer. No host sync.

        For steps that are `wanted`, before anybody writes to the gradients. Not while
        a graph is being captured or compiled.

        Args:
            gradients: As `gather` returns them, still scaled.
            scale: f32[], the scale that is in them.
            names: As in the constructor; looked at after those.
            reading: What they showed when they were read, for their peaks.
        """
        if not gradients.tensors:
            return
        if self._taken is None:
            self._taken = Taken(Late(scale.detach().reshape(1)))
        own = names_of(gradients.params, (*self._names, *names))
        called = apart(own, self._taken.names)
        for kind, places, tensors in by_kind(gradients.tensors):
            counts = Late(self._counter.count(tensors, kind))
            self._taken.tensors.append(([called[i] for i in places], counts))
        for read in () if reading is None else reading.kinds:
            peaks = read.each()
            if peaks is None:
                # Nobody asked as long as none of them could be a culprit.
                peaks = peaks_on_host([gradients.tensors[i] for i in read.positions])
            here = [called[place] for place in read.positions]
            self._taken.peaks.append((here, Late(peaks)))

    def forget(self) -> None:
        """Forget what was sampled of the step that is under way, as in `reset()`."""
        self._taken = None
        for watched in self._watched:
            watched.turn_off()
            if self.wanted:
                watched.turn_on()

    def turn(self) -> bool:
        """End a step; return whether samples are `due()`. No host sync."""
        self.step = step = self.step + 1
        if step < self.busy_at:
            return False
        return self._turn()

    def end_step(self) -> UnderflowSample | None:
        """End a step; return what was counted two updates ago, if anything was."""
        samples = self.due() if self.turn() else None
        return samples[-1] if samples else None

    def due(self) -> list[UnderflowSample]:
        """Return the samples of two updates ago and before, each once.

        Waits only if they have not arrived yet.
        """
        ready = []
        while self._posted and self._posted[0].step + LAG <= self.step:
            ready.append(self._posted.popleft().read())
        self.busy_at = self._next_busy()
        return ready

    def finish(self) -> list[UnderflowSample]:
        """Return all samples that are left. Waits for them."""
        left = [taken.read() for taken in self._posted]
        self._posted.clear()
        return left

    def _turn(self) -> bool:
        if self.wanted:
            self._end_sampled_step()
        self._begin_step()
        return bool(self._posted) and self._posted[0].step + LAG <= self.step

    def _end_sampled_step(self) -> None:
        taken, self._taken = self._taken, None
        seen = [watched.turn_off() for watched in self._watched]
        if taken is None:
            return
        taken.step = self.step
        for counts in seen:
            for device in {each.device for each in counts.values()}:
                here = [name for name in counts if counts[name].device == device]
                stacked = torch.stack([counts[name] for name in here])
                taken.activations.append((here, Late(stacked)))
        self._posted.append(taken)

    def _begin_step(self) -> None:
        self.wanted = self._every is not None and due(self.step + 1, self._every)
        if self.wanted:
            for watched in self._watched:
                watched.turn_on()
        self.busy_at = self._next_busy()

    def _next_busy(self) -> int:
        """Return the step after which there is something to do."""
        if self._every is None:
            return sys.maxsize
        if self.wanted:
            return self.step + 1
        upcoming = self.step + 1
        # A sampled step is prepared by the one before it.
        multiple = -(-(upcoming + 1) // self._every) * self._every - 1
        power = (1 << upcoming.bit_length()) - 1
        times = [multiple]
        if power + 1 < self._every:
            times.append(power)
        if self._posted:
            times.append(self._posted[0].step + LAG)
        return max(min(times), upcoming)
