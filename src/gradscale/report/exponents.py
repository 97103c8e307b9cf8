"""The histogram of gradient exponents, against the range of float16."""

from typing import Any

from gradscale.core.formatting import percent, power
from gradscale.diagnosis.underflow import Underflow
from gradscale.report.figure_theme import MUTED, WIDTH, alt, caption
from gradscale.report.style import fixed_percent, thousands
from gradscale.runfile import BINS, LOWEST_EXPONENT

LINE = "#0072B2"
# Exponents of float16: first subnormal, first normal, first out of range.
_SUBNORMAL, _NORMAL, _END = LOWEST_EXPONENT, -14, 16


def exponent_panel(underflow: Underflow) -> alt.LayerChart | alt.FacetChart:
    """Draw the share of gradient elements by exponent, with float16's ranges shaded."""
    sample = underflow.seen
    total = max(sample.total, 1)
    bars: list[dict[str, Any]] = [
        {
            "from": exponent + 0.06,
            "to": exponent + 0.94,
            "share": count / total,
            "range": "subnormal" if exponent < _NORMAL else "normal",
        }
        for exponent, count in enumerate(sample.bins, start=LOWEST_EXPONENT)
    ]
    # Two bars left of all exponents: zeros, and non-zero elements below float16.
    zero, below = _SUBNORMAL - 7.5, _SUBNORMAL - 4.5
    flushed = underflow.whole.flushed
    bars += [
        _bar(zero, sample.zeros / total, "exactly 0"),
        _bar(below, sample.deep / total, "below float16"),
    ]
    if flushed:
        # Drawn over the bar of all zeros.
        bars.append(_bar(zero, flushed, "below float16"))
    labels = [{"x": zero + 0.5, "text": "0"}, {"x": below + 0.5, "text": "<2^-24"}]
    if sample.above:
        bars.append(_bar(_END + 1.0, sample.above / total, "beyond float16"))
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
                "range:N",
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
        f"Gradients at step {thousands(underflow.step)}: {lost} of the elements lost, "
        f"{fixed_percent(whole.subnormal)} of non-zero elements subnormal"
    )
    layers = [*_bands(domain), columns, names]
    if flushed:
        layers.append(_flushed_note(x, y, zero, flushed))
    return alt.layer(*layers).properties(width=WIDTH, height=200, title=caption(text))


def _flushed_note(x: alt.X, y: alt.Y, zero: float, flushed: float) -> alt.Chart:
    """Return the label of the zeros that backward probably flushed."""
    rows = [{"from": zero + 1.0, "share": flushed, "text": "probably flushed"}]
    return (
        alt.Chart(alt.Data(values=rows))
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


def _bar(left: float, share: float, label: str) -> dict[str, Any]:
    return {"from": left, "to": left + 1.0, "share": share, "range": label}
