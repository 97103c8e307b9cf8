"""Collects evidence before a step is judged: culprits, peaks, weights, a sample."""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradscale.core.records import StepRecord
from gradscale.torch.device_state.async_copy import AsyncTensor
from gradscale.torch.grads.read_plain import peaks_on_device, peaks_on_host
from gradscale.torch.grads.stats import by_kind
from gradscale.torch.locate.result import order_of_backward
from gradscale.torch.monitor.model_lookup import ModelLookup
from gradscale.torch.names import apart, names_of
from gradscale.torch.step.optimizer_step import OptimizerStep
from gradscale.torch.underflow.sample import UnderflowSample

_LARGEST_F32 = torch.finfo(torch.float32).max
# The largest move of a weight in a step of an adaptive optimizer, in learning rates.
ADAPTIVE_REACH = 10.0
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class StepEvidence(NamedTuple):
    """The evidence on a step when it is judged.

    Attributes:
        record: The step's record.
        culprits: Names of the gradients or weights that were not finite.
        peaks: The largest scaled magnitude of each gradient; empty unless recorded.
        tensors: Number of gradients that were read; 0 for a healthy step.
        weights: Facts on weights and learning rates; empty if not checked.
    """

    record: StepRecord
    culprits: list[str]
    peaks: Mapping[str, float]
    tensors: int
    weights: Mapping[str, Any] = MappingProxyType({})


class EvidenceCollector:
    """Collects evidence on steps that are not finite. Costs nothing in others.

    Args:
        model: Names the parameters; None to search for it once a step is not finite.
        lookup: Searches for the model.
        peaks: Collect the peaks of such steps.
    """

    def __init__(
        self, model: nn.Module | None, lookup: ModelLookup, *, peaks: bool
    ) -> None:
        self._model = model
        self._lookup = lookup
        self._peaks = peaks
        self._first_weights: WeightCheck | None = None

    def model_of(self, steps: Sequence[OptimizerStep]) -> nn.Module | None:
        """Return the model that the steps' optimizers train, None if unknown."""
        if self._model is not None:
            return self._model
        optimizers = _optimizers_of(steps)
        if len(optimizers) == 1:
            found = self._lookup.of_optimizer(optimizers[0])
        else:
            params = [p for s in steps if s.owner() is not None for p in s.params()]
            found = self._lookup.of_params(params) if params else None
        return None if found is None else found()

    def start(
        self,
        record: StepRecord,
        steps: Sequence[OptimizerStep],
        sample: UnderflowSample | None,
        *,
        suspect: bool,
    ) -> "PendingEvidence":
        """Start the checks that a step requires. No host sync.

        Args:
            record: The step's record.
            steps: The step of each optimizer; empty if the host did not take part.
            sample: The underflow sample of the step.
            suspect: Earlier steps in a row were skipped without a normal explanation.
        """
        if record.loss is not None and math.isfinite(record.loss):
            fits = abs(record.loss * record.scale) <= _LARGEST_F32
            record = record._replace(scaled_loss_finite=fits)
        if sample is not None:
            lost, layer = sample.lost_and_layer()
            record = record._replace(lost=lost, lost_layer=layer)
        finite = record.finite and record.norm_finite and record.loss_finite
        if finite or not record.read:
            return PendingEvidence(record, steps, sample)
        record = record._replace(nan=math.isnan(record.amax))
        weights = None
        if suspect or not record.loss_finite:
            weights = self._check_weights(steps)
        return PendingEvidence(record, steps, sample, CulpritCopy(steps), weights)

    def finish(
        self, pending: "PendingEvidence", order: list[str], *, suspect: bool
    ) -> StepEvidence:
        """Return the evidence. Waits for the checks.

        Args:
            pending: From `start`.
            order: Parameters in the order of backward, if it was observed.
            suspect: As in `start`; a search for the model is then worth its cost.
        """
        record, steps, sample, copy, weights = pending
        if copy is None:
            return StepEvidence(record, [], {} if sample is None else sample.peaks, 0)
        model = self.model_of(steps) if suspect else self._model
        culprits, _ = order_of_backward(copy.names(model), order or None)
        bad_weights = [] if weights is None else weights.not_finite()
        if bad_weights:
            record, culprits = record._replace(weights_finite=False), bad_weights
        peaks = copy.peaks(model) if self._peaks else {}
        facts = (
            {} if weights is None else self._weight_facts(weights, steps, record.step)
        )
        return StepEvidence(record, culprits, peaks, copy.tensors, facts)

    def keep_weights(self, step: OptimizerStep) -> None:
        """Keep the size of the weights before the first step. No host sync."""
        if self._first_weights is None:
            named = zip(map(str, range(len(step.params()))), step.params(), strict=True)
            self._first_weights = WeightCheck(named, buffers_of(self._model))

    def _weight_facts(
        self, weights: "WeightCheck", steps: Sequence[OptimizerStep], step: int
    ) -> dict[str, Any]:
        """Return the facts on weights and learning rates for the judge."""
        if not _optimizers_of(steps):
            return {}
        groups = [
            group for each in _optimizers_of(steps) for group in each.param_groups
        ]
        rates = [group["lr"] for group in groups if isinstance(group.get("lr"), float)]
        first = self._first_weights
        (peak, name), start = weights.peak(), 0.0 if first is None else first.peak()[0]
        adaptive = all("betas" in group for group in groups)
        reach = ADAPTIVE_REACH * max(rates, default=0.0) * max(1, step)
        known = set() if first is None else set(first.bad_buffers())
        return {
            "observed": "weights",
            "peak": peak,
            "largest": name,
            "first_peak": start,
            "rates": sorted(set(rates))[-3:],
            # Adaptive optimizers move a weight by little more than their rate a step.
            "beyond_rate": adaptive and bool(rates) and peak - start > reach,
            "buffer": next((b for b in weights.bad_buffers() if b not in known), ""),
        }

    def _check_weights(self, steps: Sequence[OptimizerStep]) -> "WeightCheck | None":
        # Each rank has its own part of sharded weights, and all must judge the same.
        if not steps or any(step.channel is not None for step in steps):
            return None
        try:
            model = self.model_of(steps)
            weights = weights_of(model, _optimizers_of(steps))
            return WeightCheck(weights, buffers_of(model))
        except Exception:
            # named_parameters() may run user code and weights may be of any subclass,
            # so anything may be raised; a check must not end the run.
            return None


class PendingEvidence(NamedTuple):
    """A step whose checks have been started.

    Attributes:
        record: The step's record, as far as it is known.
        steps: The step of each optimizer; empty if the host did not take part.
        sample: The underflow sample of the step, if it was sampled.
        culprits: None if all gradients were finite.
        weights: None if the weights were not checked.
    """

    record: StepRecord
    steps: Sequence[OptimizerStep]
    sample: UnderflowSample | None = None
    culprits: "CulpritCopy | None" = None
    weights: "WeightCheck | None" = None

    @property
    def in_flight(self) -> bool:
        """Whether a copy may not have arrived yet; the same on every rank."""
        culprits, weights = self.culprits, self.weights
        return (culprits is not None and culprits.in_flight) or (
            weights is not None and weights.in_flight
        )


class CulpritCopy:
    """Peaks and non-finite flags of a step's gradients, copied asynchronously.

    Making it costs no host sync; reading it may wait.

    Args:
        steps: The step of each optimizer, after the update.

    Attributes:
        in_flight: The copies may not have arrived yet; the same on every rank.
    """

    def __init__(self, steps: Sequence[OptimizerStep]) -> None:
        # For each: float[2, n] of peaks and flags, n parameters, sources of names.
        self._copies: list[tuple[AsyncTensor, list[Tensor | str], tuple[Any, ...]]] = [
            (AsyncTensor(peaks), params, step.name_sources)
            for step in steps
            if step.stats is not None and step.decision is not None
            for params, peaks in step.stats.named_peaks(step.decision.multiplier)
        ]
        # By the device of the scaler: a rank without gradients waits like the others.
        stats = [step.stats for step in steps if step.stats is not None]
        self.in_flight = any(each.home.type == "cuda" for each in stats)

    @property
    def tensors(self) -> int:
        """Number of gradients."""
        return sum(len(params) for _, params, _ in self._copies)

    def names(self, model: nn.Module | None = None) -> list[str]:
        """Return the names of the non-finite gradients, in the order of optimizers.

        Args:
            model: Names the parameters that the step cannot name.
        """
        found = []
        for copy, params, sources in self._copies:
            flags = copy.values()[1].tolist()
            bad = [p for p, flag in zip(params, flags, strict=True) if flag]
            found += names_of(bad, (model, *sources)) if bad else []
        return found

    def peaks(self, model: nn.Module | None = None) -> dict[str, float]:
        """Return the largest magnitude of each gradient by name.

        Args:
            model: As for `names`.
        """
        peaks: dict[str, float] = {}
        for copy, params, sources in self._copies:
            unique = apart(names_of(params, (model, *sources)), set(peaks))
            peaks.update(zip(unique, copy.values()[0].tolist(), strict=True))
        return peaks


class WeightCheck:
    """Checks whether weights are finite. No host sync; reading the result may wait.

    >>> bad = torch.tensor([1.0, torch.nan])
    >>> WeightCheck([("a", torch.ones(2)), ("b", bad)]).not_finite()
    ['b']

    Args:
        weights: The weights of this rank, by name. Non-floating tensors are ignored.
        buffers: Buffers with their names, likewise.
    """

    @torch.no_grad()
    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        buffers: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        self._weights = _peaks_of(weights)
        self._buffers = _peaks_of(buffers)

    @property
    def in_flight(self) -> bool:
        """Whether a copy may not have arrived yet."""
        return any(peaks.pending for _, peaks in self._weights + self._buffers)

    def not_finite(self) -> list[str]:
        """Return the names of the weights that are not finite, in order."""
        return _not_finite(self._weights)

    def bad_buffers(self) -> list[str]:
        """Return the names of the buffers that are not finite."""
        return _not_finite(self._buffers)

    def peak(self) -> tuple[float, str]:
        """Return the largest finite magnitude of a weight, and its name."""
        named = [
            (value, name)
            for names, peaks in self._weights
            for name, value in zip(names, peaks.values().tolist(), strict=True)
            if math.isfinite(value)
        ]
        return max(named, default=(0.0, ""))


def _peaks_of(
    tensors: Iterable[tuple[str, Tensor]],
) -> list[tuple[list[str], AsyncTensor]]:
    """Start to copy the largest magnitude of each tensor to the host, by device."""
    named = [(name, _elements(tensor)) for name, tensor in tensors]
    named = [(n, v) for n, v in named if v.dtype in _FLOATS and v.numel()]
    found = []
    for (device, _), indices, values in by_kind([value for _, value in named]):
        on_host = device.type == "cpu"
        peaks = peaks_on_host(values) if on_host else peaks_on_device(values)
        found.append(([named[i][0] for i in indices], AsyncTensor(peaks)))
    return found


def _not_finite(found: list[tuple[list[str], AsyncTensor]]) -> list[str]:
    return [
        name
        for names, peaks in found
        for name, peak in zip(names, peaks.values().tolist(), strict=True)
        if not math.isfinite(peak)
    ]


def buffers_of(model: nn.Module | None) -> list[tuple[str, Tensor]]:
    """Return the buffers of a model with their names."""
    return [] if model is None else list(model.named_buffers())


def weights_of(
    model: nn.Module | None, optimizers: Iterable[Any]
) -> list[tuple[str, Tensor]]:
    """Return the names and parameters of a model and of optimizers.

    Args:
        model: Its parameters, frozen ones included.
        optimizers: Parameters that the model does not own.
    """
    named: list[tuple[str, Tensor]] = []
    if model is not None:
        named += model.named_parameters()
    known = {id(tensor) for _, tensor in named}
    for optimizer in optimizers:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        others = [param for param in params if id(param) not in known]
        named += zip(names_of(others, (optimizer,)), others, strict=True)
    return named


def _elements(weight: Tensor) -> Tensor:
    """Return the elements on this rank, dense and real; empty if there are none."""
    if is_lazy(weight):
        return torch.empty(0)
    local = getattr(weight, "_local_tensor", weight).detach()
    # Tensor subclasses of a library may not hold plain elements.
    if type(local) is not Tensor or local.layout is not torch.strided or local.is_meta:
        return torch.empty(0)
    return torch.view_as_real(local.resolve_conj()) if local.is_complex() else local


def _optimizers_of(steps: Sequence[OptimizerStep]) -> list[Any]:
    return [owner for step in steps if (owner := step.owner()) is not None]
