"""Quantisation-aware training in float16 beside float32, over several seeds.

Needs the environment of `make example-qat`:

    .venv-qat/bin/python -m benchmarks.bench_qat --out benchmarks/results/qat_cpu.json

Every seed trains one net in float32 and quantises it; each row then trains a copy of it
further on the same batches. The rows with loss_weight=1e-6 are built so that float16
gradients are too small; the others are an ordinary case, which does not need scaling.
"""

import argparse
import copy
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import Place, result, torch_place, write
from examples.qat_tensorrt import (
    QAT_STEPS,
    STEPS,
    Images,
    accuracy,
    exported,
    lost_gradients,
    made,
    onnx_figures,
    overflows_change_nothing,
    quantized,
    train,
)

TINY = 1e-6
RUNS = [
    ("fp32", 1.0),
    ("fp16", 1.0),
    ("fp16 without scaling", 1.0),
    ("fp16", TINY),
    ("fp16 without scaling", TINY),
]


def measure_seed(seed: int) -> list[dict[str, Any]]:
    """Return one row for each run of a seed."""
    images, model = Images(seed), made(seed)
    train(model, images, STEPS, "fp32")
    bare = accuracy(model, seed)
    model = quantized(model, images)
    rows: list[dict[str, Any]] = [
        {"seed": seed, "run": "fp32, not quantised", "accuracy": bare},
        {"seed": seed, "run": "quantised", "accuracy": accuracy(model, seed)},
    ]
    for precision, weight in RUNS:
        trained, batches = copy.deepcopy(model), copy.deepcopy(images)
        lost = None
        if precision != "fp32":
            scale = 2.0**16 if precision == "fp16" else 1.0
            lost = lost_gradients(trained, copy.deepcopy(images), weight, scale)
        scaler = train(trained, batches, QAT_STEPS, precision, loss_weight=weight)
        rows.append(
            {
                "seed": seed,
                "run": f"quantised, trained in {precision}",
                "loss_weight": weight,
                "accuracy": accuracy(trained, seed),
                "lost_gradients": lost,
                "skipped": scaler.skipped_steps,
            }
        )
        if (precision, weight) == ("fp16", 1.0):
            figures = checked(trained, copy.deepcopy(images))
            rows.append({"seed": seed, "run": "exported", **figures})
    return rows


def checked(model: Any, images: Images) -> dict[str, Any]:
    """Return the ONNX Runtime figures, and whether an overflow changes a value."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        return {
            "overflows_change_nothing": overflows_change_nothing(model, images),
            **exported(model, path),
            **onnx_figures(path, model, images),
        }


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [row for seed in range(options.seeds) for row in measure_seed(seed)]
    table = Table("seed", "run", "loss weight", "accuracy", "lost gradients")
    for row in rows:
        if "accuracy" in row:
            figures = [row["accuracy"], row.get("lost_gradients")]
            shown = ["" if figure is None else f"{figure:.4f}" for figure in figures]
            weight = str(row.get("loss_weight", ""))
            table.add_row(str(row["seed"]), row["run"], weight, *shown)
    Console().print(table)
    for row in rows:
        if row["run"] == "exported":
            print(json.dumps(row))
    if options.out:
        torch = torch_place("cpu")
        names = ("nvidia-modelopt", "onnx", "onnxruntime")
        versions = {**torch.versions, **{name: version(name) for name in names}}
        place = Place(torch.device, versions)
        write(
            options.out,
            result("qat", place, rows) | {"unit": "accuracy"},
        )


if __name__ == "__main__":
    main()
