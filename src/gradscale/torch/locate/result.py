"""The result of a search: the module and operation of the first non-finite value."""

from dataclasses import asdict, dataclass
from typing import Any

from gradscale.core.formatting import power
from gradscale.judge.unsafe_ops import Pattern
from gradscale.torch.locate.module_tracker import NO_MODULE, ModuleName

# Values of `tensor` that belong to no module.
LOSSES = {"loss": "the loss itself", "scaled loss": "the scaled loss"}


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where the first non-finite value appeared. Holds no tensor.

    Attributes:
        found: A non-finite value was found. If not, the fields below are empty.
        instrument: "replay", which observes every operation, or "hooks": module hooks
            in an ordinary iteration, which observe modules and gradients.
        scale: The scale that multiplied the loss.
        loss_finite: The unscaled loss was finite; None if not known.
        direction: "forward" or "backward".
        module: The dotted name from `named_modules()`, "" for the model itself; None
            outside the model.
        module_class: The name of the module's class.
        operation: The operation; in backward, the one whose gradient it is.
        tensor: "output", "grad_input", "grad_output", "gradient of NAME",
            "parameter NAME", "input", "target", "loss" or "scaled loss".
        kind: "inf" or "nan".
        count: Number of elements of that kind.
        elements: Number of all elements.
        dtype: Of the tensor.
        peak: The largest finite magnitude among the operation's inputs.
        forward_peak: The largest finite magnitude of the forward pass.
        was_float16: The tensor is infinite, and its finite values are float16 values:
            it left the range of float16 in a cast or before.
        given: It was an input that no module has computed: part of the batch.
        given_peak: The largest finite magnitude of such inputs.
        gain: In forward, by how much the weight of the module multiplies independent
            inputs: its root mean square times the root of its inputs; 0 if unknown.
        line: File and line in the user's code, where known.
        fits_at: The largest scale, by powers of two below `scale`, at which all
            gradients are finite; None if there is none or `searched` is False.
        searched: `fits_at` was searched for.
        context: A related operation before or after it, in words; "" for none.
        pattern: The known unsafe pattern, if one matches.
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
    was_float16: bool = False
    given: bool = False
    given_peak: float = 0.0
    gain: float = 0.0
    line: str | None = None
    fits_at: float | None = None
    searched: bool = False
    context: str = ""
    pattern: Pattern | None = None

    @property
    def where(self) -> str:
        """The location in one line.

        >>> Location(
        ...     found=True, instrument="replay", scale=65536.0, direction="backward",
        ...     module="decoder.3.ffn.wo", module_class="Linear", operation="addmm",
        ...     tensor="grad_input", kind="inf", count=3, elements=4194304,
        ... ).where
        'backward of decoder.3.ffn.wo (Linear), addmm, grad_input: 3 of 4,194,304 inf'
        >>> Location(
        ...     found=True, instrument="hooks", scale=65536.0, direction="forward",
        ...     tensor="loss", kind="nan", count=1, elements=1,
        ... ).where
        'the loss itself, outside any module: 1 of 1 NaN'
        """
        if not self.found:
            return (
                "nowhere: the loss and all gradients are finite at scale "
                f"{power(self.scale)}"
            )
        module = ModuleName(self.module, self.module_class)
        parts = [f"{self.direction} of {module}", self.operation, self.tensor]
        if module == NO_MODULE:
            parts[0] = f"{self.direction}, outside any module"
            if self.tensor in LOSSES:
                parts = [f"{LOSSES[self.tensor]}, outside any module"]
        kind = "NaN" if self.kind == "nan" else self.kind
        counted = f": {self.count:,} of {self.elements:,} {kind}"
        return ", ".join(part for part in parts if part) + counted

    @property
    def before(self) -> str:
        """The magnitudes before the location, in one line."""
        if not self.found:
            return f"largest magnitude of the forward pass {self.forward_peak:.3g}"
        parts = []
        if self.direction == "backward":
            parts.append(f"forward pass finite (absmax {self.forward_peak:.3g})")
        # An input may have no finite element.
        if self.peak or self.tensor != "input":
            parts.append(f"largest finite input of the operation {self.peak:.3g}")
        if self.fits_at is not None:
            parts.append(f"S <= {power(self.fits_at)} is needed")
        elif self.searched:
            parts.append("no lower scale helps")
        return "; ".join(parts)

    def text(self) -> str:
        """Return the lines of a message."""
        rows = [("where", self.where), ("before", self.before)]
        rows.append(("line", self.line or ""))
        rows.append(("with", self.context))
        if self.pattern is not None:
            rows += [("cause", self.pattern.what), ("try", self.pattern.instead)]
        return "\n".join(f"  {label:<7} {value}" for label, value in rows if value)

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

    Of several non-finite gradients, the first in this order is the likely origin.

    Args:
        names: In the order of registration.
        recorded: The order observed in a backward pass, `ModuleHooks.backward_order`,
            if there is one.

    Returns:
        The names in order, and "recorded" or "assumed": without a record, the order
        is that of registration, reversed.

    >>> order_of_backward(["first.weight", "last.weight"])
    (['last.weight', 'first.weight'], 'assumed')
    """
    if not recorded:
        return names[::-1], "assumed"
    known = {name: index for index, name in enumerate(recorded)}
    # Parameters that took no part come last.
    ordered = names[::-1]
    ordered.sort(key=lambda name: known.get(name, len(known)))
    return ordered, "recorded"
