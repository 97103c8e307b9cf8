"""Tables of measured results, from the JSON files in benchmarks/results."""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
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
    "gradscale, fused AdamW",
    "gradscale and its AdamW",
)
PLAIN = 'gradscale, fused AdamW, `kernels="plain"`'
PAIRED = (("torch", "ratio_to_torch"),)
QAT_FP32 = "quantised, trained in fp32"
PRECISION_IMPLS = ("own masters", "master_weights", "no masters")
BEGIN, END = "<!-- {name}: made by python -m docs.render -->", "<!-- end -->"


def filled(text: str) -> str:
    """Return a page with each of its marked tables rendered again."""
    for name, table in TABLES.items():
        begin = BEGIN.format(name=name)
        if begin in text:
            head, rest = text.split(begin, 1)
            _, tail = rest.split(END, 1)
            text = f"{head}{begin}\n\n{table()}\n\n{END}{tail}"
    return text


def step_table() -> str:
    """Return the time of everything after backward, one row for each set of tensors.

    A CPU has no floor: its caches hold part of what the floor takes to be moved.
    """
    lines = []
    for record in _records("step"):
        for name, rows in _by_set(record).items():
            some = next(iter(rows.values()))
            on_device = some.get("clock") == "device"
            floor = f"{some['floor_ms']:.3g} ms" if on_device else NOTHING
            own = (*PAIRED, ("floor", "ratio_to_floor")) if on_device else PAIRED
            figures = ((BARE, ()), (TORCH, ()), (FUSED, PAIRED), (OWN, own))
            cells = [_time(rows.get(impl), shown) for impl, shown in figures]
            clock = ", device time" if on_device else ""
            lines.append([f"{name}, {record['device']}{clock}", floor, *cells])
    head = ["after backward: check, unscale, clip, AdamW, update", "floor", *STEPPERS]
    return _table(head, lines)


def step_short_table() -> str:
    """Return device times of f32 parameters only, for a page that must stay short."""
    lines = []
    for record in _records("step"):
        for name, rows in _by_set(record).items():
            torchs = rows.get(TORCH)
            if torchs is None or torchs.get("clock") != "device":
                continue
            cells = [_time(rows.get(impl), PAIRED) for impl in (FUSED, OWN)]
            lines.append([name, _time(torchs, ()), *cells])
    return _table(["device time after backward", *STEPPERS[1:]], lines)


def wall_table() -> str:
    """Return the time of a step by itself, host included, on a GPU."""
    impls = (FUSED, OWN, "gradscale, plain + fused")
    lines = []
    for record in _records("step"):
        for name, rows in _by_set(record).items():
            timed = {n: row for n, row in rows.items() if row.get("clock") == "device"}
            if TORCH not in timed:
                continue
            torchs = f"{timed[TORCH]['wall_p50']:.3g} ms"
            walls = [torchs, *(_wall(timed.get(impl)) for impl in impls)]
            lines.append([f"{name}, {record['device']}", *walls])
    head = ("one step by itself, host included", *STEPPERS[1:], PLAIN)
    return _table(head, lines)


def _wall(row: dict[str, Any] | None) -> str:
    if row is None:
        return NOTHING
    return f"{row['wall_p50']:.3g} ms, {row['wall_ratio_to_torch']:.2f} × torch"


def loop_table() -> str:
    """Return the time of a step of torch's documented loop, under either scaler."""
    lines = []
    for record in _records("loop"):
        for name, rows in _by_set(record).items():
            torchs, ours = rows[TORCH], rows["gradscale, torch's loop + fused"]
            lines.append(
                [
                    f"{name}, {record['device']}",
                    _time(torchs, ()),
                    _time(ours, PAIRED),
                    f"{torchs['wall_p50']:.3g} ms",
                    _wall(ours),
                ]
            )
    loops = ("`torch.amp`", "gradscale")
    head = [
        f"{loop}, {clock}" for clock in ("device", "host included") for loop in loops
    ]
    return _table(["torch's loop, fused AdamW", *head], lines)


def memory_table() -> str:
    """Return the GPU memory that a scaler needs, as a share of the parameters."""
    impls = (TORCH, FUSED, OWN, "gradscale, plain + fused")
    lines = []
    for record in _records("step"):
        for name, rows in _by_set(record).items():
            if not any("memory_share" in row for row in rows.values()):
                continue
            shares = [rows.get(impl, {}).get("memory_share") for impl in impls]
            cells = [NOTHING if s is None else f"{100 * s:.2f} %" for s in shares]
            lines.append([f"{name}, {record['device']}", *cells])
    head = ("memory of the scaler", *STEPPERS[1:], PLAIN)
    return _table(head, lines)


def host_table() -> str:
    """Return the host time of a step, one row for each number of tensors."""
    lines = []
    for record in _records("host"):
        for count in dict.fromkeys(row["tensors"] for row in record["rows"]):
            rows = {r["impl"]: r for r in record["rows"] if r["tensors"] == count}
            cells = [_time(rows.get(impl), ()) for impl in (BARE, TORCH)]
            cells += [_time(rows.get(impl), PAIRED) for impl in (FUSED, OWN)]
            lines.append([f"{count} tensors, {record['device']}", *cells])
    return _table(["host time of a step", *STEPPERS], lines)


def train_table() -> str:
    """Return what each scaler adds to a training step, by batch and optimizer."""
    lines = []
    for record, batch, rows in _batches():
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
        "training step, and what a scaler adds (95 % upper bound)",
        "no scaler",
        "`torch.amp`",
        "gradscale",
        "gradscale, loop unchanged",
        "gradscale and its AdamW",
    )
    return _table(head, lines)


# Settings of gradscale that the table of training steps has no column for.
VARIANTS = {
    'fused AdamW, `kernels="plain"`': "gradscale, plain + fused",
    "fused AdamW, recorded": "gradscale, recorded + fused",
    "gradscale's AdamW, recorded": "gradscale, recorded + own AdamW",
}


def variants_table() -> str:
    """Return what gradscale adds to a training step in other settings."""
    lines = []
    for record, batch, rows in _batches():
        if not record["device"].startswith("CPU"):
            cells = [_overhead(rows.get(impl)) for impl in VARIANTS.values()]
            lines.append([f"batch {batch}, {record['device']}", *cells])
    return _table(["training step, what gradscale adds", *VARIANTS], lines)


def _batches() -> Iterator[tuple[dict[str, Any], str, dict[str, dict[str, Any]]]]:
    """Yield (record, batch, rows by implementation) of all training steps."""
    for record in _records("train"):
        for batch in dict.fromkeys(row["batch"] for row in record["rows"]):
            rows = {r["impl"]: r for r in record["rows"] if r["batch"] == batch}
            yield record, batch, rows


def record_table() -> str:
    """Return the host time that verdicts and the run file take in a step."""
    lines = []
    for record in _records("record"):
        for row in record["rows"]:
            if "inside_us" in row:
                whose = "gradscale's" if row["optimizer"] == "own" else "torch's fused"
                label = f"{row['impl']}, {whose} AdamW, {record['device']}"
                figures = (row["inside_us"], row["inside_mean_us"])
                lines.append([label, *(f"{us:.0f} µs" for us in figures)])
    return _table(["host time within a step", "median", "mean"], lines)


WALKS = {
    "plain, no clip": "`torch.optim.AdamW(foreach=True)`, no clip",
    "plain": "`torch.optim.AdamW(foreach=True)`",
    "fused": "`torch.optim.AdamW(fused=True)`, kernels",
    "own": "`gradscale.torch.optim.AdamW`, kernels",
    "torch.amp, fused": "`torch.amp.GradScaler`, either of torch's",
}


def walk_table() -> str:
    """Return the Python calls of a step and the files that they enter."""
    methods = ("scale", "backward", "clip", "step", "update", "last")
    file = RESULTS / "walk.json"
    record = json.loads(file.read_text()) if file.exists() else {"rows": []}
    rows = {row["impl"]: row for row in record["rows"]}
    lines = []
    for impl, label in WALKS.items():
        if impl in rows:
            row = rows[impl]
            calls = [str(row[f"{method}_calls"] or NOTHING) for method in methods]
            lines.append([label, str(row["files"]), str(row["calls"]), *calls])
    return _table(["one step", "files", "calls", *methods], lines)


def sources_table() -> str:
    """Return which version was measured for each table, where and when."""
    lines = []
    for what in ("step", "host", "train", "record", "jax_update"):
        for file in sorted(RESULTS.glob(f"{what}_*.json")):
            record = json.loads(file.read_text())
            names = [f"{n} {v}" for n, v in record["versions"].items()]
            place = f"{record['device']}; {', '.join(names)}"
            lines.append([f"`{file.name}`", record["commit"], record["date"], place])
    return _table(["file in `benchmarks/results`", "commit", "date", "where"], lines)


def precision_table() -> str:
    """Return the losses of float16 weights, with and without masters, by optimizer."""
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    for record in _records("precision"):
        for row in record["rows"]:
            if "loss" in row:
                runs.setdefault(row["optimizer"], {})[row["impl"]] = row
    lines = [
        [
            name,
            f"{rows['fp32']['loss']:.4f}",
            f"{rows['master_weights']['noise']:.4f}",
            *(_gaps(rows.get(impl)) for impl in PRECISION_IMPLS),
        ]
        for name, rows in runs.items()
    ]
    head = ["optimizer", "fp32", "noise of the seeds", "own masters"]
    return _table([*head, "`master_weights`", "no masters"], lines)


def _gaps(row: dict[str, Any] | None) -> str:
    if row is None:
        return NOTHING
    return f"{row['gap']:+.2g} ({row['least_gap']:+.2g} to {row['largest_gap']:+.2g})"


def qat_table() -> str:
    """Return the accuracy of quantised nets over the seeds of a run."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    wide: dict[int, float] = {}
    for row in _qat_rows("accuracy"):
        weight = f"{row['loss_weight']:g}" if "loss_weight" in row else NOTHING
        runs.setdefault((row["run"], weight), []).append(row)
        if row["run"] == QAT_FP32:
            wide[row["seed"]] = row["accuracy"]
    lines = []
    for (run, weight), rows in runs.items():
        values = [row["accuracy"] for row in rows]
        pairs = [
            row["accuracy"] - wide[row["seed"]] for row in rows if "skipped" in row
        ]
        found = [row.get("lost_gradients") for row in rows]
        lost = [share for share in found if share is not None]
        lines.append(
            [
                run,
                weight,
                _spread(values),
                NOTHING if run == QAT_FP32 or not pairs else _spread(pairs),
                f"{max(lost):.1%}" if lost else NOTHING,
            ]
        )
    head = ["run", "loss weight", "accuracy", "difference from fp32 of the same seed"]
    return _table([*head, "gradient elements that are 0 in float16 alone"], lines)


def _spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4f} ± {deviation:.4f}"


def qat_export_table() -> str:
    """Return how close ONNX Runtime is to the trained nets, one row for each seed."""
    lines = [
        [
            str(row["seed"]),
            f"{row['difference']:.1e}",
            f"{row['largest_difference']:.1e}",
            str(row["images_at_a_border"]),
            f"{row['same_class']:.1%}",
            "nothing" if row["overflows_change_nothing"] else "a value",
        ]
        for row in _qat_rows("same_class")
    ]
    head = ["seed", "largest difference, no optimisation", "with images at a border"]
    more = ["such images of 1000", "same class from INT8 kernels", "overflows change"]
    return _table([*head, *more], lines)


def _qat_rows(field: str) -> list[dict[str, Any]]:
    return [row for record in _records("qat") for row in record["rows"] if field in row]


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


# A CPU has only the third: its kernels run on the host.
JAX_FIGURES = (
    ("all kernels together", "device_ms", " ms"),
    ("a step while the device is busy", "queued_p50", " ms"),
    ("a step by itself, host included", "p50", " ms"),
    ("number of kernels", "kernels", ""),
)


def jax_table(figures: Sequence[tuple[str, str, str]] = JAX_FIGURES) -> str:
    """Return the time of a compiled JAX update, by set of arrays and clock."""
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
    """Return which behaviours each scaler of JAX has."""
    record = json.loads((RESULTS / "jax_defects.json").read_text())
    kinds = ("jmp", "flax", "MPX", "gradscale")
    lines = [f"| behaviour | {' | '.join(kinds)} |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        cells = " | ".join(_mark(row[kind], 1) for kind in kinds)
        lines.append(f"| {row['behaviour']} | {cells} |")
    return "\n".join(lines)


# The defects that cost runs, for a page that must stay short: scenario to label.
WORST = {
    "weights survive a scale that collapses": "weights survive a scale that falls to 0",
    "an unscale that overflows is a skip": (
        "a step is skipped if unscaling itself overflows"
    ),
    "fused momentum survives a skipped first step": (
        "fused SGD has valid momentum after a skipped first step"
    ),
    "update between two steps keeps the scale of the backward": (
        "gradients are unscaled with the scale of their own backward pass"
    ),
    "accumulation after unscale is reported": (
        "a backward pass after `unscale_` is reported"
    ),
    "a skip can be told from a step": (
        "the outcome of a step is known, with every optimizer"
    ),
    "a positional closure never runs on scaled gradients": (
        "a closure never runs on scaled gradients"
    ),
    "a bad state changes nothing": (
        "an invalid checkpoint is refused and changes nothing"
    ),
}


def defects_table(wanted: dict[str, str] | None = None) -> str:
    """Return which behaviours each scaler has; all of them by default.

    Args:
        wanted: Labels of the scenarios to show, by name.
    """
    record = json.loads((RESULTS / "defects.json").read_text())
    kinds = ("torch.amp.GradScaler", "gradscale")
    lines = ["| behaviour | `torch.amp.GradScaler` | gradscale |", "|---|---|---|"]
    rows = {row["behaviour"]: row for row in record["rows"]}
    for name, label in (wanted or {name: name for name in rows}).items():
        cells = [_mark(rows[name][kind], rows[name]["variants"]) for kind in kinds]
        lines.append(f"| {label} | {cells[0]} | {cells[1]} |")
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
    "step-short": step_short_table,
    "wall": wall_table,
    "loop": loop_table,
    "memory": memory_table,
    "host": host_table,
    "train": train_table,
    "train-variants": variants_table,
    "record": record_table,
    "precision": precision_table,
    "qat": qat_table,
    "qat-export": qat_export_table,
    "walk": walk_table,
    "sources": sources_table,
    "defects": defects_table,
    "defects-short": partial(defects_table, WORST),
}
