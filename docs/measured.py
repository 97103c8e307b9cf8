"""Tables of measured results, from the JSON files in benchmarks/results."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
NOTHING = "–"
TORCH, BARE = "torch.amp + fused", "bare fused"
OWN, FUSED = "gradscale + own AdamW", "gradscale + fused"
STEPPERS = (
    "fused AdamW alone",
    "`torch.amp`, fused AdamW",
    "gradscale, torch's fused AdamW",
    "gradscale and its AdamW",
)
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
    lines = []
    for record in _records("step"):
        for name, rows in _by_set(record).items():
            some = next(iter(rows.values()))
            clock = ", device time" if some.get("clock") == "device" else ""
            floor = f"{some['floor_ms']:.3g} ms" if "floor_ms" in some else NOTHING
            figures = (
                (BARE, ()),
                (TORCH, ()),
                (FUSED, (("torch", "ratio_to_torch"),)),
                (OWN, (("torch", "ratio_to_torch"), ("floor", "ratio_to_floor"))),
            )
            cells = [_time(rows.get(impl), shown) for impl, shown in figures]
            lines.append([f"{name}, {record['device']}{clock}", floor, *cells])
    head = ["after backward: check, unscale, clip, AdamW, update", "floor", *STEPPERS]
    return _table(head, lines)


def host_table() -> str:
    """Return the host's time for a step, a row a number of tensors."""
    against = (("torch", "ratio_to_torch"),)
    lines = []
    for record in _records("host"):
        for count in dict.fromkeys(row["tensors"] for row in record["rows"]):
            rows = {r["impl"]: r for r in record["rows"] if r["tensors"] == count}
            cells = [_time(rows.get(impl), ()) for impl in (BARE, TORCH)]
            cells += [_time(rows.get(impl), against) for impl in (FUSED, OWN)]
            lines.append([f"{count} tensors, {record['device']}", *cells])
    return _table(["host time of a step", *STEPPERS], lines)


def train_table(device: str = "") -> str:
    """Return what each scaler adds to a training step, a row a batch and optimizer.

    Args:
        device: Only what was measured on such a device.
    """
    lines = []
    for record in _records("train"):
        if device not in record["device"]:
            continue
        for batch in dict.fromkeys(row["batch"] for row in record["rows"]):
            rows = {r["impl"]: r for r in record["rows"] if r["batch"] == batch}
            size = f"{next(iter(rows.values()))['elements'] / 1e6:.3g} M parameters"
            for kind in ("fused", "foreach"):
                base = rows.get(f"no scaler + {kind}")
                if base is None:
                    continue
                own = rows.get(OWN) if kind == "fused" else None
                names = ("torch.amp", "gradscale", "gradscale, torch's loop")
                compared = [*(rows.get(f"{name} + {kind}") for name in names), own]
                label = f"{size}, batch {batch}, {kind} AdamW, {record['device']}"
                cells = [_overhead(row) for row in compared]
                lines.append([label, f"{base['p50']:.4g} ms", *cells])
    head = (
        "training step, and what a scaler adds (at most, with 95 % confidence)",
        "no scaler",
        "`torch.amp`",
        "gradscale",
        "gradscale, torch's loop",
        "gradscale and its AdamW",
    )
    return _table(head, lines)


def _records(what: str) -> list[dict[str, Any]]:
    files = sorted(RESULTS.glob(f"{what}_*.json"))
    return [json.loads(file.read_text()) for file in files]


def _table(head: Sequence[str], lines: list[list[str]]) -> str:
    if not lines:
        return "Not measured yet."
    rule = "|---" * len(head) + "|"
    return "\n".join([_line(head), rule, *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _time(row: dict[str, Any] | None, ratios: Sequence[tuple[str, str]]) -> str:
    if row is None:
        return NOTHING
    shown = [f"{row[field]:.2f} × {word}" for word, field in ratios if field in row]
    ms = row["p50"]
    return ", ".join([f"{ms:.3g} ms" if ms < 999.5 else f"{ms:.0f} ms", *shown])


def _overhead(row: dict[str, Any] | None) -> str:
    if row is None:
        return NOTHING
    middle, bound = row["overhead_percent"], row["overhead_bound_percent"]
    return f"{middle:+.1f} % ({bound:+.1f} %)"


def _by_set(record: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    sets: dict[str, dict[str, dict[str, Any]]] = {}
    for row in record["rows"]:
        name = f"{row['elements'] / 1e6:.0f} M parameters in {row['tensors']} tensors"
        if row["dtype"] == "f16":
            name += " of f16"
        sets.setdefault(name, {})[row["impl"]] = row
    return sets


# A CPU has only one of them: its kernels are not told apart from the host.
JAX_FIGURES = (
    ("all kernels together", "device_ms", " ms"),
    ("a step while the device is busy", "queued_p50", " ms"),
    ("a step by itself, host included", "p50", " ms"),
    ("number of kernels", "kernels", ""),
)


def jax_table(figures: Sequence[tuple[str, str, str]] = JAX_FIGURES) -> str:
    """Return the time of a compiled JAX update, rows for each set of arrays."""
    lines = [
        "| compiled update | clip and AdamW, no scaling | flax way | gradscale |",
        "|---|---|---|---|",
    ]
    for file in sorted(RESULTS.glob("jax_update_*.json")):
        record = json.loads(file.read_text())
        for name, rows in _by_set(record).items():
            for what, field, unit in figures:
                if not all(field in row for row in rows.values()):
                    continue
                cells = " | ".join(f"{r[field]:.4g}{unit}" for r in rows.values())
                where = f"{name}, {record['device']}"
                if "command_buffer=" in record.get("xla_flags", ""):
                    where += " without command buffers"
                lines.append(f"| {where}, {what} | {cells} |")
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


TABLES: dict[str, Callable[[], str]] = {
    "jax": jax_table,
    "jax-short": partial(jax_table, JAX_FIGURES[1:2]),
    "jax-defects": jax_defects_table,
    "step": step_table,
    "host": host_table,
    "train": train_table,
    # A model that a CPU can train in no time says little of a training step.
    "train-gpu": partial(train_table, "NVIDIA"),
    "defects": defects_table,
    "defects-short": partial(defects_table, WORST),
}
