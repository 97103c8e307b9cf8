"""Sweep the launch parameters of the kernels: elements per chunk, and warps.

Device times over the tensors of a model: the read of the gradients with the decision,
the pass of AdamW, and the replacement for torch's fused AdamW, which also writes the
gradients. The tuning constants in gradscale/torch/kernels come from this sweep. Needs a
CUDA device.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import parser_for, show
from benchmarks.models import gpt2_shapes, llama_shapes
from benchmarks.record import quantiles
from benchmarks.timing import Queue
from gradscale.torch.kernels.args import AdamConfig, AmpArgs
from gradscale.torch.kernels.pointer_table import PointerTable, Table
from gradscale.torch.tensor_list import addresses

SETS = {
    "gpt2-124M": gpt2_shapes(),
    "gpt2-xl-1.56B": gpt2_shapes(1600, 48),
    "llama-1.24B": llama_shapes(),
}
# Kernel, elements of a chunk, warps.
CHUNKS = {
    "read": (1024, 2048, 4096, 8192),
    "adam": (512, 1024, 2048),
    "fused adam": (512, 1024, 2048),
}
SIZES = [
    (k, chunk, w) for k, some in CHUNKS.items() for chunk in some for w in (2, 4, 8)
]
# Long enough for the host to enqueue two launches.
BUSY_MS = 2.0
COLUMNS = {
    "set": "set",
    "kernel": "impl",
    "chunk": "chunk",
    "warps": "warps",
    "p20": "p20",
    "p50": "p50",
    "p80": "p80",
}


class Tensors:
    """Parameters, gradients and state of one model."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.lists = [
            [torch.randn(shape, device="cuda") for shape in shapes] for _ in range(4)
        ]
        self.steps = list(torch.zeros(len(shapes), device="cuda"))
        self.numels = [tensor.numel() for tensor in self.lists[0]]

    def table(self, lists: list[list[Tensor]], chunk: int) -> Table:
        """Return the pointer table of some lists."""
        cache = PointerTable(torch.device("cuda"), chunk)
        return cache.of(self.numels, [addresses(one) for one in lists])


def launch_of(
    kernel: str, chunk: int, warps: int, tensors: Tensors
) -> Callable[[], object]:
    """Return a function that launches a kernel with these parameters."""
    from gradscale.torch.kernels import adam, fused_adam
    from gradscale.torch.kernels import read as reading
    from gradscale.torch.kernels.decide import gather_and_decide
    from gradscale.torch.kernels.launch import Launch

    how_compiled = {"num_warps": warps, "enable_fp_fusion": True}
    scale, found = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    if kernel == "read":
        reading.CHUNK = chunk
        reading._read = Launch(reading._read.body, how_compiled)
        table = tensors.table(tensors.lists[1:2], chunk)
        f32 = torch.float32
        return lambda: gather_and_decide(
            reading.read_chunks(table, f32), f32, scale, None
        )
    how = AdamConfig(1e-5, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
    table = tensors.table([*tensors.lists, tensors.steps], chunk)
    if kernel == "fused adam":
        how_compiled["enable_fp_fusion"] = False
        body = fused_adam._adam.body
        fused_adam.CHUNK, fused_adam._adam = chunk, Launch(body, how_compiled)
        powers = torch.tensor([0.9, 0.999], device="cuda")
        given = how, powers, scale, found
        return lambda: fused_adam.adam_(table, *given, amsgrad=False)
    adam.CHUNK, adam._adam = chunk, Launch(adam._adam.body, how_compiled)
    amp = AmpArgs(scale, found, False)
    dtypes = torch.float32, torch.float32
    return lambda: adam.launch_(table, *dtypes, how, amp, masters=False, amsgrad=False)


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Return one row per kernel and launch parameters."""
    tensors, queue, rows = Tensors(SETS[name]), Queue(), []
    for kernel, chunk, warps in SIZES:
        launch = launch_of(kernel, chunk, warps, tensors)
        # The first launch compiles.
        launch()
        times = [queue.timed(launch, BUSY_MS).device for _ in range(rounds)]
        rows.append(
            {
                "set": name,
                "impl": kernel,
                "dtype": "f32",
                "elements": sum(tensors.numels),
                "tensors": len(tensors.numels),
                "chunk": chunk,
                "warps": warps,
                **quantiles(times),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the JSON file, print the table."""
    parser = parser_for(__doc__, "kernels", rounds=12)
    parser.add_argument(
        "--set", action="append", choices=tuple(SETS), help="only these tensors"
    )
    args = parser.parse_args(arguments)
    if args.device != "cuda" or not torch.cuda.is_available():
        sys.exit(
            "The kernels need a CUDA device. Pass --device cuda on a machine with one."
        )
    rows = [row for name in args.set or SETS for row in measure(name, args.rounds)]
    show(args, "kernels", rows, COLUMNS, "Kernels by size, ms")


if __name__ == "__main__":
    main()
