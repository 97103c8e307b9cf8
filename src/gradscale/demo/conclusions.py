"""The conclusions of a comparison as sentences, computed from its values."""

import math

from gradscale.demo.comparison import Comparison
from gradscale.demo.precisions import FP16_BARE, FP16_DYNAMIC, FP16_STATIC
from gradscale.demo.training import Run


def headline(comparison: Comparison) -> str:
    """Return the main conclusion, used as the title of the figure."""
    bare, static, dynamic = _fp16(comparison)
    if not _matches(comparison, static, dynamic):
        return "FP32, BF16 and FP16 with and without loss scaling"
    if not math.isfinite(bare.final_loss):
        return "Bare FP16 fails; with loss scaling FP16 follows FP32"
    if _matches(comparison, bare):
        return "FP16 follows FP32 here, with and without loss scaling"
    gap = comparison.distance(bare)
    side = "above" if gap > 0 else "below"
    return (
        f"Bare FP16 ends {abs(gap):.2f} {side} FP32; with loss scaling it follows FP32"
    )


def sentences(comparison: Comparison) -> list[str]:
    """Return the conclusions, one sentence each."""
    bare, static, dynamic = _fp16(comparison)
    return [
        _about_bare(comparison, bare),
        _about_scaled(comparison, static, dynamic),
        _about_dynamic(comparison, dynamic),
    ]


def _fp16(comparison: Comparison) -> list[Run]:
    runs = {run.name: run for run in comparison.runs}
    return [
        runs[precision.name] for precision in (FP16_BARE, FP16_STATIC, FP16_DYNAMIC)
    ]


def _matches(comparison: Comparison, *runs: Run) -> bool:
    noise = comparison.seed_noise
    # In this form a NaN loss does not match.
    return all(abs(comparison.distance(run)) <= noise for run in runs)


def _about_bare(comparison: Comparison, bare: Run) -> str:
    lost = (
        f"{100 * bare.lost_share:.0f} % of its gradient elements were flushed to zero"
    )
    if not math.isfinite(bare.final_loss):
        return f"FP16 bare failed: its loss is not finite, and {lost}."
    gap = comparison.distance(bare)
    if _matches(comparison, bare):
        return f"FP16 bare ends within the seed noise here, although {lost}."
    side = "above" if gap > 0 else "below"
    return (
        f"FP16 bare ends {abs(gap):.2f} {side} FP32: {lost}. Its loss is "
        f"{bare.final_loss:.2f}; guessing by character frequency alone gives "
        f"{comparison.frequency_loss:.2f}."
    )


def _about_scaled(comparison: Comparison, *runs: Run) -> str:
    names = " and ".join(run.name for run in runs)
    noise = f"changing only the seed moves FP32 by up to {comparison.seed_noise:.3f}"
    gap = max(abs(comparison.distance(run)) for run in runs)
    if _matches(comparison, *runs):
        return f"{names} match FP32: they end within {gap:.3f} of it; {noise}."
    return f"{names} do not both match FP32: they end up to {gap:.3f} away; {noise}."


def _about_dynamic(comparison: Comparison, run: Run) -> str:
    low, high = (
        round(math.log2(scale)) for scale in (min(run.scales), max(run.scales))
    )
    steps, skipped = comparison.settings.steps, len(run.skipped)
    moves = f"The dynamic scale moved between 2^{low} and 2^{high}"
    if low == high:
        moves = f"The dynamic scale stayed at 2^{low}"
    if not skipped:
        return f"{moves} and skipped none of {steps} steps."
    return f"{moves}; {skipped} of {steps} steps were skipped because it was too high."
