"""Tables of measured results, from the JSON files in benchmarks/results."""

import json
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
BEGIN, END = "<!-- {name}: made by python -m docs.render -->", "<!-- end -->"


def filled(text: str) -> str:
    """Return a page with each of its marked tables made anew."""
    for name, table in TABLES.items():
        begin = BEGIN.format(name=name)
        if begin in text:
            head, rest = text.split(begin, 1)
            _, tail = rest.split(END, 1)
            text = f"{head}{begin}\n\n{table()}\n\n{END}{tail}"
    return text


def step_table() -> str:
    """Return the time of everything after backward, a row a set of tensors."""
    lines = [
        "| after backward: check, unscale, clip, fused AdamW, update "
        "| `torch.amp.GradScaler` | gradscale | ratio |",
        "|---|---|---|---|",
    ]
    for file in sorted(RESULTS.glob("step_*.json")):
        record = json.loads(file.read_text())
        for name, rows in _by_set(record).items():
            theirs, ours = rows["torch.amp.GradScaler"], rows["gradscale"]
            lines.append(
                f"| {name}, {record['device']} | {theirs['p50']:.3g} ms "
                f"| {ours['p50']:.3g} ms | {ours['ratio_to_torch']:.2f} |"
            )
    return "\n".join(lines)


def _by_set(record: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    sets: dict[str, dict[str, dict[str, Any]]] = {}
    for row in record["rows"]:
        name = f"{row['elements'] / 1e6:.0f} M parameters in {row['tensors']} tensors"
        sets.setdefault(name, {})[row["impl"]] = row
    return sets


# A CPU has only one of them: its kernels are not told apart from the host.
JAX_FIGURES = (
    ("all kernels together", "device_ms", " ms"),
    ("a step while the device is busy", "queued_p50", " ms"),
    ("a step by itself, host included", "p50", " ms"),
    ("number of kernels", "kernels", ""),
)


def jax_table() -> str:
    """Return the time of a compiled JAX update, a row a set of arrays."""
    lines = [
        "| compiled update | clip and AdamW, no scaling | flax way | gradscale |",
        "|---|---|---|---|",
    ]
    for file in sorted(RESULTS.glob("jax_update_*.json")):
        record = json.loads(file.read_text())
        for name, rows in _by_set(record).items():
            for what, field, unit in JAX_FIGURES:
                if not all(field in row for row in rows.values()):
                    continue
                figures = " | ".join(f"{r[field]:.4g}{unit}" for r in rows.values())
                lines.append(f"| {name}, {record['device']}, {what} | {figures} |")
    return "\n".join(lines)


def jax_defects_table() -> str:
    """Return what each scaler of JAX does right, a row a behaviour."""
    record = json.loads((RESULTS / "jax_defects.json").read_text())
    kinds = ("jmp", "flax", "MPX", "gradscale")
    lines = [f"| | {' | '.join(kinds)} |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        cells = " | ".join(_mark(row[kind], 1) for kind in kinds)
        lines.append(f"| {row['behaviour']} | {cells} |")
    return "\n".join(lines)


# What costs people runs, for a page that must stay short.
WORST = (
    "weights survive a scale that collapses",
    "an unscale that overflows is a skip",
    "fused momentum survives a skipped first step",
    "update between two steps keeps the scale of the backward",
    "accumulation after unscale is reported",
    "a skip can be told from a step",
    "a positional closure never runs on scaled gradients",
    "a bad state changes nothing",
)


def defects_table(wanted: tuple[str, ...] = ()) -> str:
    """Return what each scaler does right, a row a behaviour; all of them by default."""
    record = json.loads((RESULTS / "defects.json").read_text())
    kinds = ("torch.amp.GradScaler", "gradscale")
    lines = ["| | `torch.amp.GradScaler` | gradscale |", "|---|---|---|"]
    rows = {row["behaviour"]: row for row in record["rows"]}
    for row in [rows[name] for name in wanted or rows]:
        cells = [_mark(row[kind], row["variants"]) for kind in kinds]
        lines.append(f"| {row['behaviour']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def _mark(passed: int, variants: int) -> str:
    if passed in (0, variants):
        return "yes" if passed else "no"
    return f"{passed} of {variants}"


TABLES = {
    "jax": jax_table,
    "jax-defects": jax_defects_table,
    "step": step_table,
    "defects": defects_table,
    "defects-short": partial(defects_table, WORST),
}
