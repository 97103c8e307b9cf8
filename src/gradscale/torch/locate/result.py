"""Which module and which operation lost a value, and what it was before."""

from dataclasses import asdict, dataclass
from typing import Any

from gradscale.core.formatting import power
from gradscale.judge.unsafe_ops import Pattern
from gradscale.torch.locate.module_tracker import Place


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Where a value first stopped being finite. A value: it holds no tensor.

    Attributes:
        found: Something was not finite. All below is empty if not.
        instrument: "replay" saw every operation; "armed" saw modules and gradients of
            an ordinary iteration.
        scale: The scale that multiplied the loss.
        loss_finite: The loss was finite before it was scaled; None if not known.
        direction: "forward" or "backward".
        module: The dotted name as `named_modules()` has it, "" the model itself; None
            if it happened outside of the model.
        module_class: The name of the module's class.
        operation: The operation; in backward, the one whose gradient it is.
        tensor: "output", "grad_input", "grad_output", "gradient of NAME",
            "parameter NAME", "input" or "scaled loss".
        kind: "inf" or "nan".
        count: How many elements of that kind.
        elements: Of how many.
        dtype: Of the tensor.
        peak: The largest finite magnitude among the operation's inputs.
        forward_peak: The largest finite magnitude of the forward pass.
        line: File and line in the user's code, where known.
        fits_at: The largest scale, by powers of two below `scale`, at which all
            gradients are finite; None if there is none or none was looked for.
        searched: `fits_at` was looked for.
        context: What came before or after it, in words; "" if there is nothing to say.
        pattern: The known unsafe pattern, if it is one.
    """

    found: bool
    instrument: str
    scale: float
    loss_finite: bool | None = None
    direction: str = ""
    module: str | None = None
    module_class: str = ""
    operation: str = ""
    tensor: str = ""
    kind: str = ""
    count: int = 0
    elements: int = 0
    dtype: str = ""
    peak: float = 0.0
    forward_peak: float = 0.0
    line: str | None = None
    fits_at: float | None = None
    searched: bool = False
    context: str = ""
    pattern: Pattern | None = None

    @property
    def where(self) -> str:
        """The place in one line.

        >>> Diagnosis(
        ...     found=True, instrument="replay", scale=65536.0, direction="backward",
        ...     module="decoder.3.ffn.wo", module_class="Linear", operation="addmm",
        ...     tensor="grad_input", kind="inf", count=3, elements=4194304,
        ... ).where
        'backward of decoder.3.ffn.wo (Linear), addmm, grad_input: 3 of 4,194,304 inf'
        """
        if not self.found:
            return (
                "nowhere: the loss and all gradients are finite at scale "
                f"{power(self.scale)}"
            )
        named = named_place(Place(self.module, self.module_class))
        kind = "NaN" if self.kind == "nan" else self.kind
        parts = [f"{self.direction} of {named}", self.operation, self.tensor]
        counted = f": {self.count:,} of {self.elements:,} {kind}"
        return ", ".join(part for part in parts if part) + counted

    @property
    def before(self) -> str:
        """What was seen before it, in one line."""
        if not self.found:
            return f"largest magnitude of the forward pass {self.forward_peak:.3g}"
        parts = []
        if self.direction == "backward":
            parts.append(f"forward clean (absmax {self.forward_peak:.3g})")
        parts.append(f"largest finite input of the operation {self.peak:.3g}")
        if self.fits_at is not None:
            parts.append(f"S <= {power(self.fits_at)} would be needed")
        elif self.searched:
            parts.append("no lower scale helps")
        return "; ".join(parts)

    def text(self) -> str:
        """Return the lines that a message shows."""
        rows = [("where", self.where), ("before", self.before)]
        rows.append(("line", self.line or ""))
        rows.append(("with", self.context))
        if self.pattern is not None:
            rows += [("cause", self.pattern.what), ("try", self.pattern.instead)]
        return "\n".join(f"  {label:<7} {said}" for label, said in rows if said)

    def as_dict(self) -> dict[str, Any]:
        """Return numbers, strings and None by name, for JSON."""
        fields = asdict(self)
        pattern = self.pattern
        fields["pattern"] = None if pattern is None else pattern._asdict()
        return fields


def order_of_backward(
    names: list[str], recorded: list[str] | None = None
) -> tuple[list[str], str]:
    """Return parameters in the order in which backward computes their gradients.

    Of several gradients that are not finite the first in this order is the likely
    origin.

    Args:
        names: In the order of registration.
        recorded: The order seen in a backward pass, `Armed.order`, if there was one.

    Returns:
        The names in order, and "recorded" or "assumed": without a record it is the
        order of registration turned around.

    >>> order_of_backward(["first.weight", "last.weight"])
    (['last.weight', 'first.weight'], 'assumed')
    """
    if not recorded:
        return names[::-1], "assumed"
    known = {name: place for place, name in enumerate(recorded)}
    # Parameters that took no part come last.
    turned = names[::-1]
    turned.sort(key=lambda name: known.get(name, len(known)))
    return turned, "recorded"


def named_place(place: Place) -> str:
    """Return a module's name for a message.

    >>> named_place(Place("decoder.3", "Block")), named_place(Place("", "Net"))
    ('decoder.3 (Block)', 'the model itself (Net)')
    """
    kind = f" ({place.kind})" if place.kind else ""
    if place.name is None:
        return f"{place.kind} outside the model" if place.kind else "no module"
    return (place.name or "the model itself") + kind
