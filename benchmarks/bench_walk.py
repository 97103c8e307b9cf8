"""Count the Python calls of one training step, and the files that they enter.

One healthy step (scale, backward, clip at 1.0, step, update, `scaler.last.applied`) is
traced with `sys.setprofile`, for one optimizer over a few small tensors:

  plain, no clip  torch.optim.AdamW(foreach=True), plain PyTorch operations
  plain           the same with clip_grad_norm_
  fused           torch.optim.AdamW(fused=True), Triton kernels
  own             gradscale.torch.optim.AdamW, Triton kernels

It counts the frames of functions in the gradscale package and, for the same loop under
torch.amp.GradScaler, the frames in torch/amp/grad_scaler.py. Comprehensions and
generator expressions are left out, as are all frames below one of Triton, whose
interpreter runs kernel bodies as Python. Step rows reach the host and are judged
only at some updates, so steps 10 to 14 are traced and the one with the most calls is
reported.

Without a GPU the kernels run in Triton's interpreter: the script starts itself again
with TRITON_INTERPRET=1. The counts measure how much code a reader has to follow;
bench_host measures time.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from rich.console import Console

import gradscale
from benchmarks.command import table
from benchmarks.contestants import INIT_SCALE, LR, MAX_NORM
from benchmarks.record import result, torch_place, write

ROOT = Path(__file__).parent.parent
PACKAGE = f"{Path(gradscale.__file__).parent}{os.sep}"
TORCH_AMP = f"{Path(torch.amp.__file__).parent}{os.sep}"
TRITON = f"{os.sep}triton{os.sep}"
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
METHODS = ("scale", "backward", "clip", "step", "update", "last")
# The first steps create state and tables, and the loop is sampled up to the eighth; the
# traced steps span two copies to the host.
FIRST, LAST = 10, 14
ELEMENTS = 16


class Case(NamedTuple):
    """One optimizer under one scaler.

    Attributes:
        scaler: "gradscale" or "torch.amp".
        optimizer: "foreach" or "fused", which are torch's, or "own".
        clip: Whether the gradients are clipped.
        tensors: Number of parameters. Gradscale leaves up to 32 small parameters of a
            fused torch optimizer to torch's kernel, so that case has more of them.
    """

    scaler: str
    optimizer: str
    clip: bool = True
    tensors: int = 10


CASES = {
    "plain, no clip": Case("gradscale", "foreach", clip=False),
    "plain": Case("gradscale", "foreach"),
    "fused": Case("gradscale", "fused", tensors=33),
    "own": Case("gradscale", "own"),
    "torch.amp, foreach": Case("torch.amp", "foreach"),
    "torch.amp, fused": Case("torch.amp", "fused", tensors=33),
}


class Call(NamedTuple):
    """One call of a traced function.

    Attributes:
        method: Which part of the step made it, one of METHODS.
        file: Path within the traced package.
        function: Qualified name.
        depth: Number of traced callers.
    """

    method: str
    file: str
    function: str
    depth: int


@dataclass
class Walk:
    """The traced calls of one step, in order.

    Attributes:
        root: Folder whose functions are traced, with a separator at the end.
        traced: False runs the step without tracing: an interpreted kernel is slow.
        calls: Of functions in that folder.
    """

    root: str
    traced: bool = True
    calls: list[Call] = field(default_factory=list)

    @contextmanager
    def during(self, method: str) -> Iterator[None]:
        """Trace the body as one part of the step."""
        if not self.traced:
            yield
            return
        depth = 0
        in_triton: FrameType | None = None

        def profile(frame: FrameType, event: str, arg: object) -> None:
            nonlocal depth, in_triton
            if in_triton is not None:
                if frame is in_triton and event == "return":
                    in_triton = None
            elif event == "call":
                if TRITON in frame.f_code.co_filename:
                    in_triton = frame
                elif self._counts(frame.f_code):
                    self.calls.append(self._call(method, frame.f_code, depth))
                    depth += 1
            elif event == "return" and self._counts(frame.f_code):
                depth -= 1

        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _counts(self, code: CodeType) -> bool:
        inside = code.co_filename.startswith(self.root)
        return inside and code.co_name not in COMPREHENSIONS

    def _call(self, method: str, code: CodeType, depth: int) -> Call:
        file = code.co_filename.removeprefix(self.root)
        return Call(method, Path(file).as_posix(), code.co_qualname, depth)


def _unprofiled_interpreter() -> None:
    """Turn profiling off while Triton's interpreter runs a kernel.

    Its calls are not counted, and a profiled kernel takes twice as long.
    """
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def unprofiled(*args: Any, **kwargs: Any) -> Any:
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            return run(*args, **kwargs)
        finally:
            sys.setprofile(profile)

    GridExecutor.__call__ = unprofiled


def trace(case: Case, device: str = "cpu") -> Walk:
    """Take the steps of a case; return the walk of the one with the most calls.

    Kernels on a CPU need TRITON_INTERPRET=1 before they are imported, as `rows` and
    `main` set it.

    Args:
        case: Optimizer and scaler.
        device: "cpu" or "cuda".
    """
    torch.manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(ELEMENTS, device=device))
        for _ in range(case.tensors)
    ]
    optimizer, scaler = _optimizer(case, params, device), _scaler(case, device)
    root = PACKAGE if case.scaler == "gradscale" else TORCH_AMP
    walks = []
    # A collection could run finalizers in the middle of a step.
    gc.disable()
    try:
        for number in range(1, LAST + 1):
            optimizer.zero_grad()
            loss = torch.stack([param.square().sum() for param in params]).sum()
            walk = Walk(root, traced=number >= FIRST)
            _step(case, walk, scaler, optimizer, loss)
            walks.append(walk)
    finally:
        gc.enable()
    return max(walks, key=lambda walk: len(walk.calls))


def _optimizer(case: Case, params: list[torch.nn.Parameter], device: str) -> Any:
    if case.optimizer == "own":
        from gradscale.torch.optim import AdamW

        return AdamW(params, lr=LR, kernels=_kernels(device))
    how: Any = {case.optimizer: True}
    return torch.optim.AdamW(params, lr=LR, **how)


def _scaler(case: Case, device: str) -> Any:
    if case.scaler == "torch.amp":
        return torch.amp.GradScaler(device, init_scale=INIT_SCALE)
    from gradscale.torch import GradScaler

    kernels: Any = "plain" if case.optimizer == "foreach" else _kernels(device)
    return GradScaler(device, init_scale=INIT_SCALE, kernels=kernels)


def _kernels(device: str) -> Any:
    # "auto" takes plain operations on a CPU, interpreter or not.
    return "auto" if device == "cuda" else "triton"


def _step(
    case: Case, walk: Walk, scaler: Any, optimizer: Any, loss: torch.Tensor
) -> None:
    """Take one step and trace it."""
    ours = case.scaler == "gradscale"
    with walk.during("scale"):
        scaled = scaler.scale(loss)
    with walk.during("backward"):
        scaled.backward()
    if case.clip:
        with walk.during("clip"):
            if ours:
                scaler.clip_grad_norm_(optimizer, MAX_NORM)
            else:
                scaler.unscale_(optimizer)
                (group,) = optimizer.param_groups
                torch.nn.utils.clip_grad_norm_(group["params"], MAX_NORM)
    with walk.during("step"):
        scaler.step(optimizer)
    with walk.during("update"):
        scaler.update()
    if ours:
        with walk.during("last"):
            applied = scaler.last.applied
        # A skipped step makes fewer calls.
        assert applied


def row_of(name: str, walk: Walk) -> dict[str, Any]:
    """Return the counts of a walk: of the whole step and of each method."""
    row: dict[str, Any] = {"impl": name, "tensors": CASES[name].tensors}
    for method in ("", *METHODS):
        calls = [call for call in walk.calls if method in ("", call.method)]
        key = f"{method}_" if method else ""
        row[f"{key}files"] = len({call.file for call in calls})
        row[f"{key}calls"] = len(calls)
    row["functions"] = len({(call.file, call.function) for call in walk.calls})
    return row


def rows(device: str = "cpu") -> list[dict[str, Any]]:
    """Return the row of every case, traced in a process of its own.

    Args:
        device: "cpu", where kernels run in Triton's interpreter, or "cuda".

    Returns:
        For each of CASES its name as "impl", "files" and "calls" of the whole step, and
        of each method, such as "clip_files" and "clip_calls".
    """
    done = _traced_apart(
        ["--device", device, "--json"], stdout=subprocess.PIPE, check=True
    )
    record: dict[str, Any] = json.loads(done.stdout)
    found: list[dict[str, Any]] = record["rows"]
    return found


def _traced_apart(arguments: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run this script in a process whose kernels are interpreted, if on a CPU."""
    command = [sys.executable, "-m", "benchmarks.bench_walk", *arguments]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    interpreted = {} if "cuda" in arguments else {"TRITON_INTERPRET": "1"}
    env = {**os.environ, "PYTHONPATH": path, **interpreted}
    return subprocess.run(command, env=env, text=True, **how)


def listed(walk: Walk) -> str:
    """Return the calls of a walk in order, a line each, indented by depth."""
    lines = []
    for method in METHODS:
        calls = [call for call in walk.calls if call.method == method]
        if calls:
            lines.append(f"{method}: {len(calls)} calls")
        lines += [f"  {'  ' * c.depth}{c.file}  {c.function}" for c in calls]
    return "\n".join(lines)


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Return a row as the table shows it: calls and files of each method."""
    cells = {
        "impl": row["impl"],
        "files": str(row["files"]),
        "calls": str(row["calls"]),
    }
    for method in METHODS:
        calls, files = row[f"{method}_calls"], row[f"{method}_files"]
        cells[method] = f"{calls} in {files}" if calls else ""
    return cells


def main(arguments: list[str] | None = None) -> None:
    """Trace, write the JSON file, print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_walk",
        description=__doc__,
        epilog="example: python -m benchmarks.bench_walk --list plain",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--commit", default="", help="commit to record outside a git checkout"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    parser.add_argument(
        "--list", choices=tuple(CASES), help="print the ordered calls of one case only"
    )
    args = parser.parse_args(arguments)
    if args.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton decides when it decorates a kernel, that is on import.
        done = _traced_apart(sys.argv[1:] if arguments is None else arguments)
        if done.returncode:
            sys.exit(done.returncode)
        return
    if args.device == "cpu":
        _unprofiled_interpreter()
    if args.list:
        print(listed(trace(CASES[args.list], args.device)))
        return
    found = [row_of(name, trace(case, args.device)) for name, case in CASES.items()]
    place = torch_place(args.device)
    record = result("walk", place, found, args.commit) | {"unit": "calls"}
    if args.out:
        write(args.out, record)
    if args.json:
        print(json.dumps(record))
        return
    columns = {name: name for name in ("files", "calls", *METHODS)}
    title = f"One step: calls, and the files they enter ({record['device']})"
    cells = [shown(row) for row in found]
    Console(width=120).print(table(title, {"case": "impl", **columns}, cells))


if __name__ == "__main__":
    main()
