"""The gradients of a run by exponent, against the range of float16."""

from typing import Any

from gradscale.core.formatting import percent, power
from gradscale.diagnosis.underflow import Underflow
from gradscale.report.figure_theme import MUTED, WIDTH, alt, caption
from gradscale.report.style import fixed_percent, shown_step
from gradscale.runfile import BINS, LOWEST_EXPONENT

LINE = "#0072B2"
# The exponents of float16: subnormal from the first on, normal from the second.
_SUBNORMAL, _NORMAL, _END = LOWEST_EXPONENT, -14, 16


def exponent_panel(underflow: Underflow) -> alt.LayerChart:
    """Draw the share of gradient elements of each exponent, and what float16 holds."""
    seen = underflow.seen
    total = max(seen.total, 1)
    bars: list[dict[str, Any]] = [
        {
            "from": LOWEST_EXPONENT + place + 0.06,
            "to": LOWEST_EXPONENT + place + 0.94,
            "share": count / total,
            "kind": _kind(LOWEST_EXPONENT + place),
        }
        for place, count in enumerate(seen.bins)
    ]
    # Left of all exponents: what float16 has as 0, and what is smaller still.
    zero, below = _SUBNORMAL - 7.5, _SUBNORMAL - 4.5
    flushed = underflow.whole.flushed
    bars += [
        _bar(zero, seen.zeros / total, "exactly 0"),
        _bar(below, seen.deep / total, "below float16"),
    ]
    if flushed:
        # In front of all zeros.
        bars.append(_bar(zero, flushed, "below float16"))
    labels = [{"x": zero + 0.5, "text": "0"}, {"x": below + 0.5, "text": "<2^-24"}]
    if seen.above:
        bars.append(_bar(_END + 1.0, seen.above / total, "beyond float16"))
        labels.append({"x": _END + 1.5, "text": "≥2^16"})
    most = max(bar["share"] for bar in bars) or 1.0
    domain = alt.Scale(domain=[zero - 1.0, BINS + LOWEST_EXPONENT + 3], nice=False)
    x = alt.X(
        "from:Q",
        title=f"log2 of a gradient element, scaled by {power(underflow.scale)}",
        scale=domain,
        axis=alt.Axis(grid=False, values=list(range(_SUBNORMAL, _END + 1, 4))),
    )
    heights = alt.Scale(domain=[0.0, 1.22 * most], nice=False)
    y = alt.Y(
        "share:Q",
        title="share of elements",
        scale=heights,
        axis=alt.Axis(format=".0%", tickCount=5),
    )
    colours = {
        "exactly 0": "#999999",
        "below float16": "#D55E00",
        "subnormal": "#E69F00",
        "normal": LINE,
        "beyond float16": "#000000",
    }
    columns = (
        alt.Chart(alt.Data(values=bars))
        .mark_rect()
        .encode(
            x=x,
            x2="to:Q",
            y=y,
            y2=alt.datum(0.0),
            color=alt.Color(
                "kind:N",
                legend=None,
                scale=alt.Scale(domain=list(colours), range=list(colours.values())),
            ),
        )
    )
    names = (
        alt.Chart(alt.Data(values=labels))
        .mark_text(dy=8, baseline="top", fontSize=12, color=MUTED)
        .encode(x=alt.X("x:Q", scale=domain), y=alt.value(200), text="text:N")
    )
    whole = underflow.whole
    lost = f"about {percent(whole.lost)}" if flushed else fixed_percent(whole.lost)
    text = (
        f"Gradients at step {shown_step(underflow.step)}: {lost} of the elements lost, "
        f"{fixed_percent(whole.subnormal)} of what is not 0 subnormal"
    )
    layers = [*_bands(domain), columns, names]
    if flushed:
        layers.append(_flushed_note(x, y, zero, flushed))
    return alt.layer(*layers).properties(width=WIDTH, height=200, title=caption(text))


def _flushed_note(x: alt.X, y: alt.Y, zero: float, flushed: float) -> alt.Chart:
    """Return the words beside the zeros that backward has flushed by an estimate."""
    words = [{"from": zero + 1.0, "share": flushed, "text": "probably flushed"}]
    return (
        alt.Chart(alt.Data(values=words))
        .mark_text(align="left", dx=5, dy=8, fontSize=12, color="#D55E00")
        .encode(x=x, y=y, text="text:N")
    )


def _bands(domain: alt.Scale) -> list[alt.Chart]:
    bands = [
        {"a": _SUBNORMAL, "b": _NORMAL, "text": "FP16 subnormal", "colour": "#E69F00"},
        {"a": _NORMAL, "b": _END, "text": "FP16 normal", "colour": LINE},
    ]
    data = alt.Data(values=bands)
    colour = alt.Color("colour:N", scale=None)
    left = alt.X("a:Q", scale=domain)
    shade = (
        alt.Chart(data).mark_rect(opacity=0.1).encode(x=left, x2="b:Q", color=colour)
    )
    text = (
        alt.Chart(data)
        .mark_text(align="left", dx=6, fontSize=12)
        .encode(x=left, y=alt.value(10), text="text:N", color=alt.value(MUTED))
    )
    return [shade, text]


def _bar(left: float, share: float, kind: str) -> dict[str, Any]:
    return {"from": left, "to": left + 1.0, "share": share, "kind": kind}


def _kind(exponent: int) -> str:
    return "subnormal" if exponent < _NORMAL else "normal"
