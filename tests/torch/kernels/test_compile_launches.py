"""The kernels of real steps compile for GPUs, where only the interpreter runs them."""

import json
import os
import subprocess
import sys

import pytest
import torch
import triton.language as tl

from gradscale.torch import GradScaler, optim
from gradscale.torch.kernels.launch import Launch, probe_
from gradscale.torch.kernels.pointer_table import KERNEL_DTYPES
from gradscale.torch.underflow.exponent_counter import Counter

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
CASES = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, kernels="triton"),
    "amsgrad": lambda p: optim.Adam(
        p, lr=torch.tensor(0.01), amsgrad=True, write_back=True, kernels="triton"
    ),
    "SGD": lambda p: optim.SGD(
        p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1, kernels="triton"
    ),
    "dampened": lambda p: optim.SGD(
        p, lr=0.01, momentum=0.9, dampening=0.5, maximize=True, kernels="triton"
    ),
    "Lion": lambda p: optim.Lion(p, lr=0.01, kernels="triton"),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.01, foreach=True),
}
OWN = {name for name in CASES if name not in ("fused", "foreach")}


def kernels():
    """Return the module and the name of each kernel of the package."""
    return {
        found: (module.__name__, name)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("gradscale.torch.")
        for name, found in vars(module).items()
        if isinstance(found, Launch)
    }


def described(launch, pointers, numbers, constants):
    """Return a launch as `compile_launches` reads it."""
    return json.dumps(
        (
            *kernels()[launch],
            [POINTERS[pointer.dtype] for pointer in pointers],
            ["fp32" if type(number) is float else "i32" for number in numbers],
            {
                name: {"dtype": value.name} if isinstance(value, tl.dtype) else value
                for name, value in constants.items()
            },
        )
    )


def train(make, dtype, clip):
    """Take three steps, one of them skipped, in the three orders of calls."""
    model = torch.nn.Linear(3, 2, dtype=dtype)
    optimizer = make(model.parameters())
    scaler = GradScaler("cpu", 1024.0, kernels="triton", allow_fp16=True)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3, dtype=dtype)).float().square().mean()
        scaler.scale(loss * factor).backward()
        if clip == "scaler":
            scaler.clip_grad_norm_(optimizer, 1.0)
        elif clip == "torch":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


# Triton's interpreter truncates to bf16 where a GPU rounds, as the masters are.
@pytest.mark.filterwarnings("ignore:After a step.*written to through")
@pytest.mark.usefixtures("few_are_many")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run natively here")
def test_every_kernel_compiles_for_a_gpu(monkeypatch):
    found, called = set(), Launch.__call__

    def note(launch, programs, pointers, numbers, **constants):
        found.add(described(launch, pointers, numbers, constants))
        called(launch, programs, pointers, numbers, **constants)

    monkeypatch.setattr(Launch, "__call__", note)
    for name, make in CASES.items():
        for clip in ("", "scaler", "torch"):
            train(make, torch.float32, clip)
        for dtype in (torch.float16, torch.bfloat16) if name in OWN else ():
            train(make, dtype, "")
    for dtype in KERNEL_DTYPES:
        kind = torch.device("cpu"), dtype
        Counter("triton").count([torch.ones(3, dtype=dtype)], kind)
    probe_(torch.zeros(1))
    assert {tuple(json.loads(each)[:2]) for each in found} == {*kernels().values()}
    compiled = subprocess.run(
        [sys.executable, "-m", "tests.torch.kernels.compile_launches"],
        input=f"[{','.join(sorted(found))}]",
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    assert int(compiled.stdout) == len(found)
