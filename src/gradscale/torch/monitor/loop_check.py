"""Samples how the training loop uses the scaler: backward, writes, clears, steps.

Wrong use is systematic, so a few updates suffice: the first to the eighth, the 21st
and the 34th, then every 64th. No value is read from the device; identities and
versions of gradients are compared, and three numbers are copied without waiting.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import Optimizer

from gradscale.torch.device_state.async_copy import LAG, AsyncTensor
from gradscale.torch.locate.autograd_graph import (
    half_dtype,
    leaves_of,
    nodes_of,
    params_behind,
)
from gradscale.torch.monitor.model_lookup import ModelLookup, instances_of
from gradscale.torch.monitor.step_hook import step_hook
from gradscale.torch.names import names_of, yielded_by
from gradscale.torch.step.dispatch import StepMode
from gradscale.torch.step.foreign_grads import (
    ForeignGrads,
    are_handed_on,
    has_other_hooks,
)
from gradscale.torch.step.iteration import Iteration
from gradscale.torch.step.optimizer_step import OptimizerStep
from gradscale.torch.tensor_list import Mark, mark_of

# Each update that follows one of these is sampled: early ones, then two at a distance
# that is no usual window of micro-batches. Later every EVERY-th is sampled.
FIRST = frozenset((*range(1, 8), 20, 33))
EVERY = 64
# Model and optimizers are compared after update SETUP and in later samples; from EVERY
# on, only at powers of two and multiples of COMPARE. Takes 1.1 ms for 148 parameters.
SETUP = 4
COMPARE = 512
# Losses whose dtypes are searched for float16.
DTYPES = 8
# Gradients that are compared for each optimizer.
PARAMS = 8
# Scaled losses that are watched before an update.
MOST_LOSSES = 64
# The smallest scale by which gradients are divided again on purpose, and the relative
# difference from it.
LEAST_SCALE = 16.0
CLOSE = 0.01
# The number of norms from which their spread is meaningful.
ENOUGH = 3
# The maximum number of parameter names that are recorded.
MOST_NAMES = 20
_HALF = (torch.float16, torch.bfloat16)
# The modes in which float16 parameters have f32 masters.
_WITH_MASTERS = (StepMode.OWN, StepMode.MASTERS)


class LoopCheck:
    """Compares gradients at the points of a training step at which they may change.

    Reads no gradient of an optimizer that another thread steps: a backward pass there
    frees and replaces gradients without the GIL, and a concurrent read crashes.

    Args:
        observe: Called with a step and data for the judge.
        lookup: Finds the model of the optimizers.
        optimizers: Also watch the steps of optimizers that the scaler does not step.

    Attributes:
        due: The current update is sampled.
        stepping: The scaler is stepping an optimizer.
        foreign: Detects gradients accumulated from an unscaled loss.
    """

    def __init__(
        self,
        observe: Callable[[int, Mapping[str, Any]], None],
        lookup: ModelLookup,
        *,
        optimizers: bool,
    ) -> None:
        self._observe = observe
        self._lookup = lookup
        self.due, self.stepping = True, False
        self.foreign = ForeignGrads()
        self._counts = dict.fromkeys(
            (
                *("looks", "unscaled", "uncleared", "written", "cleared_early"),
                *("late_backward", "renewed", "direct_steps", "unguarded_steps"),
                *("repeated_updates", "divided_again"),
            ),
            0,
        )
        self._iteration: Iteration | None = None
        # The thread of the last scaled loss, and that of each optimizer's last step.
        self._thread = threading.get_ident()
        # By id: an optimizer may define `__eq__`, and then has no hash.
        self._threads: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        # By parameter id: gradients after the last scaled backward, and after the step.
        self._after_backward: dict[int, Mark] = {}
        self._after_step: dict[int, Mark] = {}
        # How many scaled backward passes have added to each of them since then.
        self._added: dict[int, int] = {}
        # Scaled gradients may have been passed on to another graph.
        self._handed_on = False
        # Gradients of a backward pass that no step has used, and the versions of their
        # parameters.
        self._unused: list[Mark] = []
        self._unused_of: dict[int, int] = {}
        # Scaled losses since the last update, and before it.
        self._scaled = self._scaled_before = 0
        self._foreign = self._left_over = self._cleared = self._renewed = False
        self._compared: set[int] = set()
        # Parameters whose gradients were not cleared before some sampled update.
        self._left: set[int] = set()
        # In this update, their names and the number of gradients compared; their names
        # in the last update in which only some gradients were cleared.
        self._left_names: list[str] = []
        self._gradients = 0
        self._uncleared_names: list[str] = []
        # Gradients of the previous sampled update.
        self._looked: dict[int, Mark] = {}
        # The norm at the end of the last scaled backward, by optimizer.
        self._raw: dict[int, Tensor] = {}
        # Each with the number of the sample that started it.
        self._sizes: list[tuple[int, AsyncTensor]] = []
        # How much smaller gradients are at the step than once unscaled, and the scale.
        self._shrunk_again: list[tuple[int, AsyncTensor]] = []
        # The scales by which gradients were divided again.
        self._divisors: set[float] = set()
        # The optimizers of the last update.
        self._ended: set[int] = set()
        self._norms: list[float] = []
        self._peaks: list[float] = []
        self._shrunk = 0.0
        # Search the next scaled loss for casts; for each cast its parameters, and the
        # counts of non-zero elements in its gradient before and after.
        self._search_casts = False
        self._casts: list[tuple[list[Tensor], AsyncTensor]] = []
        # The number of parameters with a gradient in the last comparison.
        self._live = -1
        self._dtypes: list[str | None] = []
        self._watches_optimizers = optimizers
        if optimizers:
            step_hook.add(self)

    def close(self) -> None:
        """Stop watching."""
        self.due = False
        self.foreign.close()
        if self._watches_optimizers:
            step_hook.remove(self)

    def has_stepped(self, optimizer: Any) -> bool:
        """Return whether an optimizer has taken a step since the scaler was made."""
        stepped = self._threads.get(id(optimizer))
        return stepped is not None and stepped[0]() is optimizer

    def _params_of_thread(self) -> list[Tensor]:
        """Return the parameters of all optimizers that the scaler's thread steps."""
        # A list: other threads add optimizers concurrently.
        threads = list(self._threads.values())
        return [
            param
            for ref, thread in threads
            if thread == self._thread and (optimizer := ref()) is not None
            for param in _params_of(optimizer)
        ]

    def watch_casts(self) -> None:
        """Observe in the next update which casts to float16 flush gradients to 0."""
        self.due = self._search_casts = True

    # --- Called by the scaler, in sampled updates -------------------------------------

    def scaled_in_block(self) -> None:
        """Count a loss that is scaled by a scale of its own."""
        self._scaled += 1

    def scaled(self, scaled: Tensor, loss: Tensor, iteration: Iteration) -> None:
        """Watch the backward pass of a scaled loss."""
        if scaled.grad_fn is None:
            return
        self._scaled += 1
        self._thread = threading.get_ident()
        self._iteration = iteration
        if self.foreign.watching or len(self._dtypes) < DTYPES:
            nodes = nodes_of([loss])
            known = {id(param) for param in self._params_of_thread()}
            known |= {id(p) for s in iteration.settled.values() for p in _some_of(s)}
            handed_on = are_handed_on(leaves_of(nodes, [loss]), known)
            self._handed_on = self._handed_on or handed_on
            if len(self._dtypes) < DTYPES:
                self._dtypes.append(None if handed_on else half_dtype(loss, nodes))
        if self._scaled > MOST_LOSSES:
            self.foreign.close()
            return
        if self._search_casts:
            self._search_casts = False
            for node in nodes_of([loss]):
                if node.name().startswith("ToCopyBackward"):
                    node.register_hook(partial(self._on_cast, params_behind(node)))
        params = [p for step in iteration.settled.values() for p in _some_of(step)]

        def before(_: tuple[Tensor | None, ...]) -> None:
            if self._unused and not any(mark.is_there() for mark in self._unused):
                # The gradients of a micro-batch, cleared before a step used them;
                # other code may have used them, as SAM does to move the weights.
                versions = {
                    id(p): p._version for p in params if id(p) in self._unused_of
                }
                self._cleared = self._cleared or all(
                    versions.get(key, old) == old
                    for key, old in self._unused_of.items()
                )
            self.foreign.in_scaled_backward = True
            marks = _marks([*params, *self._params_of_thread()])
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: after(marks)
            )

        def after(before: dict[int, Mark]) -> None:
            self.foreign.in_scaled_backward = False
            # Includes optimizers that the scaler does not step.
            others = self._params_of_thread()
            if iteration.first:
                leaves = (ref() for ref in iteration.leaves.values())
                others += [leaf for leaf in leaves if leaf is not None]
            self._after_backward = _marks([*params, *others])
            for key, step in iteration.settled.items():
                sizes = _sizes_of(step)
                if sizes is not None:
                    self._raw[key] = sizes[0]
            # `autograd.grad` leaves the gradients of the step before as they are.
            new = {
                key: mark
                for key, mark in self._after_backward.items()
                if not mark.equals(before.get(key))
            }
            self._unused = list(new.values())
            self._unused_of = {id(p): p._version for p in params if id(p) in new}
            for key, mark in before.items():
                now = self._after_backward.get(key)
                if now is not None and now.follows(mark):
                    self._added[key] = self._added.get(key, 0) + 1

        scaled.grad_fn.register_prehook(before)

    def _on_cast(
        self,
        params: list[Tensor],
        passed: tuple[Tensor | None, ...],
        given: tuple[Tensor | None, ...],
    ) -> None:
        before, after = given[0], passed[0]
        if not params or before is None or after is None:
            return
        if after.dtype in _HALF and before.dtype not in _HALF:
            both = torch.stack([before.count_nonzero(), after.count_nonzero()])
            self._casts.append((params, AsyncTensor(both)))

    def before_read(self, step: OptimizerStep) -> None:
        """Compare the gradients of an optimizer before the scaler touches them."""
        if id(step) in self._compared:
            return
        self._compared.add(id(step))
        self._unused = []
        params = [p for p in _some_of(step) if p.grad is not None]
        # Some parameters may be cleared and others not.
        renewed = any(id(p) in self._left and self._is_renewed(p) for p in params)
        self._renewed = self._renewed or renewed
        left = [param for param in params if self._is_left(param)]
        self._left_over = self._left_over or bool(left)
        self._left |= set(map(id, left))
        if left:
            self._left_names += names_of(left, step.name_sources)
        self._gradients += len(params)
        known = [p for p in _some_of(step) if id(p) in self._after_backward]
        marks = [(p.grad, self._after_backward[id(p)]) for p in known]
        if any(grad is not None and not mark.is_of(grad) for grad, mark in marks):
            # Put there by other code, perhaps from the gradients that were cleared.
            self._cleared = False
        if marks and all(grad is None for grad, _ in marks):
            self._cleared = True
        elif self._scaled and not self._handed_on and self.foreign.among(params):
            self._foreign = True
        elif not all(mark.holds(grad) for grad, mark in marks) or any(
            map(has_other_hooks, params)
        ):
            self._written(step)

    def _written(self, step: OptimizerStep) -> None:
        """Count a write to gradients after backward, and copy their sizes."""
        self._counts["written"] += 1
        sizes = _sizes_of(step)
        if sizes is not None:
            raw = self._raw.get(id(step.owner()), sizes[0])
            both = AsyncTensor(torch.stack([*sizes, raw.to(sizes[0].device)]))
            self._sizes.append((self._counts["looks"], both))

    def before_unscaled_step(self, step: OptimizerStep, scale: Tensor) -> None:
        """Compare the norm of unscaled gradients with that at the end of backward.

        Args:
            step: Its gradients were unscaled, and perhaps written to since.
            scale: f32[], that of its gradients.
        """
        raw, sizes = self._raw.get(id(step.owner())), _sizes_of(step)
        if raw is not None and sizes is not None:
            shrunk = raw.to(scale.device) / sizes[0].to(scale.device)
            both = AsyncTensor(torch.stack([shrunk / scale, scale]))
            self._shrunk_again.append((self._counts["looks"], both))

    def before_step(self, optimizer: Optimizer, *, scaled: bool) -> None:
        """Count a step that was not requested from the scaler. Called in any thread."""
        key, thread = id(optimizer), threading.get_ident()
        if not self.has_stepped(optimizer):
            weakref.finalize(optimizer, self._threads.pop, key, None).atexit = False
        self._threads[key] = weakref.ref(optimizer), thread
        if thread != self._thread or scaled or not self.due:
            return
        states = {} if self._iteration is None else self._iteration.states
        if id(optimizer) in states:
            stage = states[id(optimizer)]["stage"]
            self._counts["unguarded_steps"] += stage is OptState.UNSCALED
            return
        known = [p for p in _params_of(optimizer) if id(p) in self._after_backward]
        # The gradients are those of the scaled backward pass, unchanged.
        if known and self._after_backward[id(known[0])].holds(known[0].grad):
            self._counts["direct_steps"] += 1

    def late_backward(self, update: int, scale: float) -> None:
        """Count a backward pass that has added to unscaled gradients."""
        self._counts["late_backward"] += 1
        times = self._counts["late_backward"]
        if times & (times - 1) == 0:
            self._observe(update, {"observed": "loop", **self._counts, "scale": scale})

    # --- Called once an update --------------------------------------------------------

    def end_update(
        self, update: int, scale: float, steps: Mapping[int, OptimizerStep]
    ) -> None:
        """End a sampled update; decide whether the next one is sampled.

        Args:
            update: Its number, counted from 1.
            scale: The scale, as last known on the host.
            steps: The step of each optimizer.
        """
        params = [p for step in steps.values() for p in _some_of(step)]
        # Nothing is known of the gradients before the first update.
        if self.due and update > 1:
            self._count(update, scale, steps)
            self._looked = _marks(params)
        if self._casts:
            self._report_casts(update, steps)
        if update == SETUP:
            self._check_setup(update, steps)
        if self._watches_optimizers and self._compares(update):
            self._check_missing(update, steps)
        self.due = update in FIRST or (update + 1) % EVERY == 0
        self._scaled_before, self._scaled = self._scaled, 0
        self._ended = set(steps)
        self._foreign = self._left_over = self._cleared = self._renewed = False
        self._compared.clear()
        self._handed_on = False
        self._left_names, self._gradients = [], 0
        self._after_backward, self._added, self._unused = {}, {}, []
        self._raw = {}
        self.foreign.close()
        if update in FIRST:
            # Not in later samples: it takes 85 us for 8 parameters.
            self.foreign.watch(params)
        if self.due:
            self._after_step = _marks(params)

    def flush(self, update: int, scale: float) -> None:
        """Report direct steps that no update has followed."""
        if self.due and self._counts["direct_steps"]:
            self._report(update, scale)

    def _count(
        self, update: int, scale: float, steps: Mapping[int, OptimizerStep]
    ) -> None:
        counts = self._counts
        counts["looks"] += 1
        counts["uncleared"] += self._left_over
        counts["unscaled"] += self._foreign
        counts["cleared_early"] += self._cleared
        counts["renewed"] += self._renewed
        # Replays of a graph, which scale no loss here, follow one another.
        repeated = not self._scaled and self._scaled_before > 0
        # Of other optimizers: they have the gradients of the same backward pass.
        counts["repeated_updates"] += repeated and self._ended.isdisjoint(steps)
        while self._sizes and self._sizes[0][0] + LAG < counts["looks"]:
            norm, peak, raw = self._sizes.pop(0)[1].values().tolist()
            if math.isfinite(norm):
                self._norms.append(norm)
                self._peaks.append(peak)
                self._shrunk = raw / norm if norm > 0.0 else 0.0
        while self._shrunk_again and self._shrunk_again[0][0] + LAG < counts["looks"]:
            shrunk, by = self._shrunk_again.pop(0)[1].values().tolist()
            if by >= LEAST_SCALE and abs(shrunk / by - 1.0) < CLOSE:
                self._divisors.add(by)
                # A constant may be the scale by chance, such as a number of tokens.
                counts["divided_again"] = len(self._divisors)
        self._report(update, scale)

    def _report(self, update: int, scale: float) -> None:
        """Report the counts if any of them indicates a fault."""
        counts = self._counts
        data: dict[str, Any] = {"observed": "loop", **counts, "scale": scale}
        if 0 < len(self._left_names) < self._gradients:
            self._uncleared_names = self._left_names
        if self._uncleared_names:
            data["left"] = self._uncleared_names
        if len(self._norms) >= ENOUGH:
            data |= {
                "norm": self._norms[-1],
                "peak": self._peaks[-1],
                "norm_spread": _spread(self._norms),
                "peak_spread": _spread(self._peaks),
                "shrunk": self._shrunk if math.isfinite(self._shrunk) else 0.0,
            }
        if any(counts[name] for name in set(counts) - {"looks", "renewed"}):
            self._observe(update, data)

    def _report_casts(self, update: int, steps: Mapping[int, OptimizerStep]) -> None:
        """Report the layers whose gradients a cast has flushed. Syncs."""
        found: dict[str, list[str]] = {"flushed": [], "unreached": []}
        sources = tuple(s for step in steps.values() for s in step.name_sources)
        for params, counts in self._casts:
            before, after = counts.values().tolist()
            if not after:
                names = names_of(params, sources)
                found["flushed" if before else "unreached"] += names[:MOST_NAMES]
        self._casts = []
        self._observe(update, {"observed": "casts", **found})

    def _check_setup(self, update: int, steps: Mapping[int, OptimizerStep]) -> None:
        """Compare the parameters of the model with those of the optimizers."""
        data: dict[str, Any] = {"observed": "setup"}
        dtypes = {*self._dtypes}
        half = [
            param
            for step in steps.values()
            if step.mode not in _WITH_MASTERS and step.owner() is not None
            for param in step.params()
            if param.dtype is torch.float16
        ]
        if half:
            sources = tuple(s for step in steps.values() for s in step.name_sources)
            data["float16_params"] = len(half)
            data["float16_param"] = names_of(half[:1], sources)[0]
        elif self._watches_optimizers and dtypes and not {None, "float16"} & dtypes:
            names = sorted(map(str, dtypes))
            data |= {"float16": False, "dtype": " and ".join(names)}
        if len(data) > 1:
            self._observe(update, data)

    def _check_missing(self, update: int, steps: Mapping[int, OptimizerStep]) -> None:
        """Report parameters of the model that have a gradient but no optimizer."""
        params = [
            p for s in steps.values() if s.owner() is not None for p in s.params()
        ]
        found = self._lookup.of_params(params) if params else None
        model = None if found is None else found()
        if model is None:
            return
        live = [
            (name, param)
            for name, param in yielded_by(partial(named_params, model))
            if param.requires_grad and param.grad is not None
        ]
        if len(live) == self._live:
            return
        self._live = len(live)
        held = {
            id(param)
            for each in live_optimizers()
            # One that wraps another may have no groups.
            for param in yielded_by(partial(_params_of, each))
        }
        missing = [name for name, param in live if id(param) not in held]
        if missing:
            data = {"observed": "missing", "names": missing[:MOST_NAMES]}
            self._observe(update, {**data, "count": len(missing)})

    def _compares(self, update: int) -> bool:
        """Whether model and optimizers are compared after an update."""
        if not self.due or update <= SETUP:
            return update == SETUP
        return update < EVERY or update % COMPARE == 0 or update & (update - 1) == 0

    def _is_renewed(self, param: Tensor) -> bool:
        """Whether a gradient was replaced since the previous sampled update."""
        mark = self._looked.get(id(param))
        return mark is not None and not mark.is_of(param.grad)

    def _is_left(self, param: Tensor) -> bool:
        """Whether backward only accumulated into the gradient of the previous step."""
        mark, added = self._after_step.get(id(param)), self._added.get(id(param), 0)
        grad = param.grad
        if mark is None or grad is None or not mark.is_of(grad):
            return False
        return added > 0 and grad._version == mark.version + added


def named_params(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model, and of modules in its plain lists and dicts.

    >>> model = torch.nn.Module()
    >>> model.blocks = [torch.nn.Linear(1, 1)]
    >>> [name for name, _ in named_params(model)]
    ['blocks.0.weight', 'blocks.0.bias']
    """
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in pairs:
                if isinstance(each, torch.nn.Module):
                    path = ".".join(filter(None, (prefix, attribute, str(key))))
                    yield from each.named_parameters(path)


def _sizes_of(step: OptimizerStep) -> tuple[Tensor, Tensor] | None:
    """Return norm and peak of an optimizer's plain gradients; None without any."""
    if step.owner() is None:
        return None
    grads = [p.grad for p in step.params() if p.grad is not None]
    plain = [
        grad
        for grad in grads
        # An empty gradient has no peak.
        if type(grad) is Tensor and grad.layout is torch.strided and grad.numel()
    ]
    if not plain or len({grad.device for grad in plain}) != 1:
        return None
    norm = torch.nn.utils.get_total_norm(plain).float()
    return norm, torch.nn.utils.get_total_norm(plain, math.inf).float()


def _some_of(step: OptimizerStep) -> list[Tensor]:
    """Return a few parameters of an optimizer, from the first to the last."""
    if step.owner() is None:
        return []
    params = step.params()
    if len(params) > PARAMS:
        last = len(params) - 1
        params = [params[last * i // (PARAMS - 1)] for i in range(PARAMS)]
    # Non-tensors are refused when the gradients are read.
    return [param for param in params if isinstance(param, Tensor)]


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def live_optimizers() -> list[Optimizer]:
    """Return every optimizer of the process. Searches all tracked objects."""
    return instances_of(Optimizer)


def _marks(params: Iterable[Tensor]) -> dict[int, Mark]:
    return {
        id(param): mark_of(param.grad)
        for param in params
        # Inference tensors have no version.
        if param.grad is not None and not param.grad.is_inference()
    }


def _spread(values: list[float]) -> float:
    """Return the ratio of the largest to the smallest; infinite if that is 0."""
    low, high = min(values), max(values)
    return high / low if low > 0.0 and math.isfinite(high) else math.inf
