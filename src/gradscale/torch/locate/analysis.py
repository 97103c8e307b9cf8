"""From what instruments saw in an iteration to where a value was lost. Pure."""

from functools import partial
from typing import Any, NamedTuple

from gradscale.judge.unsafe_ops import Evidence, Maker, recognise
from gradscale.torch.locate.module_tracker import NOWHERE, Place
from gradscale.torch.locate.result import Diagnosis, named_place
from gradscale.torch.locate.tensor_stats import Magnitude

# How far the graph is followed for the neighbours of an operation.
NEIGHBOURS = 4


class Event(NamedTuple):
    """One tensor that was looked at.

    Attributes:
        what: "input" or "output" of a module, "loss", "scaled loss", "grad_input",
            "grad_output" or "gradient of NAME".
        place: The module it belongs to.
        around: For an input, the module that called `place`.
        sighting: Which sighting it was.
        step: Which step of backward; -1 in forward.
    """

    what: str
    place: Place
    around: Place
    sighting: int
    step: int = -1


class Step(NamedTuple):
    """One node of the graph.

    Attributes:
        operation: Whose gradient it computes.
        place: The module in which it was made.
        following: The nodes its gradients go to.
        leaves: For each gradient, the parameter it belongs to, None if it is not one.
    """

    operation: str
    place: Place
    following: list[int]
    leaves: list[str | None]


def finding(
    events: list[Event],
    steps: list[Step],
    seen: list[Magnitude],
    dtypes: list[Any],
    scale: float,
) -> Diagnosis:
    """Return the diagnosis of one iteration. Pure.

    Args:
        events: In the order in which they happened.
        steps: The nodes of the graph; an event in backward names one.
        seen: What each sighting showed.
        dtypes: The dtype of each sighting.
        scale: The scale that multiplied the loss.
    """
    forward = [each for each in events if each.step < 0]
    losses = [each for each in forward if each.what in {"loss", "scaled loss"}]
    bad_losses = [each for each in losses if not seen[each.sighting].finite]
    base = partial(
        Diagnosis,
        instrument="armed",
        scale=scale,
        loss_finite=_loss_finite(losses, seen),
        forward_peak=max((seen[e.sighting].peak for e in forward), default=0.0),
    )
    if bad_losses:
        nan = any(seen[each.sighting].nan for each in bad_losses)
        first = _first_in_forward(forward, seen, nan)
        return base(**_in_forward(first, forward, seen, dtypes))
    backward = [each for each in events if each.step >= 0]
    event = _first_bad(backward, seen)
    if event is None:
        return base(found=False)
    return base(**_in_backward(event, backward, steps, seen, dtypes))


def _loss_finite(losses: list[Event], seen: list[Magnitude]) -> bool | None:
    plain = [each for each in losses if each.what == "loss"]
    return all(seen[each.sighting].finite for each in plain) if plain else None


def _first_bad(events: list[Event], seen: list[Magnitude]) -> Event | None:
    return next((e for e in events if not seen[e.sighting].finite), None)


def _first_in_forward(
    events: list[Event], seen: list[Magnitude], nan_reaches_the_loss: bool
) -> Event:
    """Return the event that the bad loss follows from.

    An input in which only -inf is not finite may be masked. Where the loss is NaN,
    such inputs count only if nothing else was not finite before the loss.
    """
    bad = [each for each in events if not seen[each.sighting].finite]
    if nan_reaches_the_loss:
        bad = [each for each in bad if not _may_be_masked(each, seen)] or bad
    within = [each for each in bad if each.what in {"input", "output"}]
    return (within or bad)[0]


def _may_be_masked(event: Event, seen: list[Magnitude]) -> bool:
    magnitude = seen[event.sighting]
    return event.what == "input" and not (magnitude.nan or magnitude.above)


def _in_forward(
    event: Event, events: list[Event], seen: list[Magnitude], dtypes: list[Any]
) -> dict[str, Any]:
    place, tensor, context = event.place, event.what, ""
    if event.what == "input" and event.around != NOWHERE:
        # Every tensor made by a module was looked at before: this one was not.
        place, tensor = event.around, "output"
        context = f"between its modules, before {named_place(event.place)}"
    elif event.what in {"loss", "scaled loss"}:
        context = "after the last module, or in the product with the scale"
    before = [each for each in events if each.sighting < event.sighting]
    inputs = [e for e in before if e.place == event.place and e.what == "input"]
    peak = max((seen[e.sighting].peak for e in inputs or before[-1:]), default=0.0)
    return _fields("forward", place, "", tensor, event, seen, dtypes) | {
        "peak": peak,
        "context": context,
    }


def _in_backward(
    event: Event,
    events: list[Event],
    steps: list[Step],
    seen: list[Magnitude],
    dtypes: list[Any],
) -> dict[str, Any]:
    step = steps[event.step]
    fields = _fields(
        "backward", step.place, step.operation, event.what, event, seen, dtypes
    )
    evidence = Evidence(
        operation=step.operation,
        direction="backward",
        kind=fields["kind"],
        dtype=fields["dtype"],
        makers=tuple(Maker(name) for name in _neighbours(event.step, steps)),
        module=step.place.kind,
    )
    peak = _peak_before(event.step, events, steps, seen)
    return fields | {"peak": peak, "pattern": recognise(evidence)}


def _fields(
    direction: str,
    place: Place,
    operation: str,
    tensor: str,
    event: Event,
    seen: list[Magnitude],
    dtypes: list[Any],
) -> dict[str, Any]:
    magnitude = seen[event.sighting]
    return {
        "found": True,
        "direction": direction,
        "module": place.name,
        "module_class": place.kind,
        "operation": operation,
        "tensor": tensor,
        "kind": "nan" if magnitude.nan else "inf",
        "count": magnitude.nan or magnitude.inf,
        "elements": magnitude.elements,
        "dtype": str(dtypes[event.sighting]).removeprefix("torch."),
    }


def _neighbours(number: int, steps: list[Step]) -> list[str]:
    """Return the operations whose outputs an operation used, the nearest first."""
    found: list[str] = []
    layer = [number]
    for _ in range(NEIGHBOURS):
        layer = [following for each in layer for following in steps[each].following]
        found += [steps[each].operation for each in layer]
    return found


def _peak_before(
    number: int, events: list[Event], steps: list[Step], seen: list[Magnitude]
) -> float:
    """Return the largest magnitude among the gradients that came to a step.

    Steps that only move gradients were not looked at: those before them were.
    """
    looked: set[int] = set()
    waiting = [number]
    peak = 0.0
    while waiting:
        target = waiting.pop()
        feeding = [i for i, step in enumerate(steps) if target in step.following]
        for feeder in set(feeding) - looked:
            looked.add(feeder)
            own = [seen[e.sighting].peak for e in events if e.step == feeder]
            peak = max([peak, *own])
            waiting += [] if own else [feeder]
    return peak
