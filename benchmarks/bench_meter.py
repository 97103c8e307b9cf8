"""Time the underflow meter: a sampled step, a step without a sample, and a plain read.

The gradients are those of a model, with zeros among them. "read" is the scaler's read
in every step, for comparison: a sampled step reads the same bytes once more. "sampled,
plain" is the meter without kernels. "not sampled" and "handed over" are host time only:
the end of a step without a sample, and the conversion of one sample to host integers.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.command import parser_for, save, show
from benchmarks.models import gpt2_shapes, llama_shapes
from benchmarks.record import quantiles
from benchmarks.timing import Queue, Stopwatch, in_turns, queue_of, ratio
from gradscale.torch.grads.collect import collect
from gradscale.torch.grads.stats import read
from gradscale.torch.kernels.grad_reader import GradReader
from gradscale.torch.underflow.meter import Meter

SETS = {
    "tiny": [(64, 64), (64,)],
    "gpt2-124M": gpt2_shapes(),
    "gpt2-xl-1.56B": gpt2_shapes(1600, 48),
    "llama-1.24B": llama_shapes(),
    "4000x1024": [(1024,)] * 4000,
}
DTYPES = {"f32": torch.float32, "f16": torch.float16}
# Timed together: one takes less than the resolution of the clock.
STEPS = 1000
COLUMNS = {
    "set": "set",
    "dtype": "dtype",
    "what": "impl",
    "p20": "p20",
    "p50": "p50",
    "p80": "p80",
    "GB/s": "gb_per_s",
    "× read": "ratio_to_read",
    "host p50": "host_p50",
}


def measure(
    name: str, kind: str, device: str, rounds: int, queue: Queue | None
) -> list[dict[str, Any]]:
    """Return the rows of one set of tensors."""
    params = []
    for shape in SETS[name]:
        param = torch.nn.Parameter(
            torch.empty(shape, dtype=DTYPES[kind], device=device)
        )
        # Typical float16 magnitudes; an eighth of the elements are zeros.
        param.grad = torch.randn_like(param).mul_(2.0**-8)
        param.grad.masked_fill_(torch.rand_like(param.grad) < 0.125, 0.0)
        params.append(param)
    gradients = collect(params, allow_fp16=True)
    scale = torch.ones((), device=device)
    home, reader = torch.device(device), GradReader("auto")
    meters = {"sampled": Meter(), "sampled, plain": Meter(kernels="plain")}

    def sampled(meter: Meter) -> Callable[[], None]:
        return lambda: meter.sample(gradients, scale)

    steps: dict[str, Callable[[], object]] = {
        "read": lambda: read(gradients, home, None, reader, scale)
    }
    steps |= {impl: sampled(meter) for impl, meter in meters.items()}
    prepare = {impl: meter.forget for impl, meter in meters.items()}
    watches = {
        impl: Stopwatch(step, prepare.get(impl, lambda: None), device, queue)
        for impl, step in steps.items()
    }
    for watch in watches.values():
        watch.warm_up()
    for impl in in_turns(list(watches), rounds, f"{name} {kind}"):
        watches[impl].take()
    about = {
        "set": name,
        "dtype": kind,
        "elements": sum(param.numel() for param in params),
        "tensors": len(params),
    }
    size = sum(param.nbytes for param in params)
    rows = []
    for impl, watch in watches.items():
        row = {"impl": impl, **about, **watch.figures()}
        row["gb_per_s"] = size / row["p50"] / 1e6
        row["ratio_to_read"] = ratio(watch.main(), watches["read"].main())
        rows.append(row)
    for impl, times in host_times(gradients, scale, rounds).items():
        rows.append({"impl": impl, **about, "clock": "host", **quantiles(times)})
    return rows


def host_times(gradients: Any, scale: Any, rounds: int) -> dict[str, list[float]]:
    """Return host times in ms, by kind of work."""
    times: dict[str, list[float]] = {"not sampled": [], "handed over": []}
    for _ in range(rounds):
        meter = Meter(every=10 * STEPS)
        meter.start(10 * STEPS)
        meter.end_step()
        begin = time.perf_counter()
        for _ in range(STEPS):
            meter.end_step()
        times["not sampled"].append(1e3 * (time.perf_counter() - begin) / STEPS)
        meter.start(0)
        meter.sample(gradients, scale)
        meter.end_step()
        if scale.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        meter.finish()
        times["handed over"].append(1e3 * (time.perf_counter() - begin))
    return times


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the JSON file, print the table."""
    parser = parser_for(__doc__, "meter", rounds=15)
    parser.add_argument(
        "--set", action="append", choices=tuple(SETS), help="only these tensors"
    )
    parser.add_argument(
        "--dtype", action="append", choices=tuple(DTYPES), help="only of this dtype"
    )
    args = parser.parse_args(arguments)
    queue = queue_of(args.device)
    small = ["tiny", "4000x1024"]
    names = args.set or ([*SETS] if args.device == "cuda" else small)
    rows: list[dict[str, Any]] = []
    for name in names:
        for kind in args.dtype or DTYPES:
            rows += measure(name, kind, args.device, args.rounds, queue)
            save(args, "meter", rows)
    show(args, "meter", rows, COLUMNS, "The underflow meter, ms")


if __name__ == "__main__":
    main()
