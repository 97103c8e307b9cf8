"""Compiles launches of kernels for GPUs that need not be there.

Reads JSON from stdin, [[module, kernel, pointers, numbers, constants], ...]: types of
the pointers and numbers, values of the constants; {"dtype": name} is one of Triton's.
Prints how many of these were compiled. Runs in a process of its own: where kernels are
interpreted, none can be compiled.
"""

import importlib
import inspect
import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Of the T4, which has no bf16, and of the H200.
T4, H200 = 75, 90
DTYPES = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}


def source_of(module, name, pointers, numbers, constants):
    """Return the source of one kernel with its types, and its compile options."""
    launch = getattr(importlib.import_module(module), name)
    parameters = list(inspect.signature(launch.body).parameters)
    types = (*pointers, *numbers, *["constexpr"] * len(constants))
    values = {
        key: DTYPES[value["dtype"]] if isinstance(value, dict) else value
        for key, value in constants.items()
    }
    signature = dict(zip(parameters, types, strict=True))
    return ASTSource(launch._kernel, signature, constexprs=values), launch._options


def main():
    compiled = 0
    for each in json.load(sys.stdin):
        source, options = source_of(*each)
        brain = "bf16" in json.dumps(each)
        for capability in (H200,) if brain else (T4, H200):
            made = triton.compile(
                source, target=GPUTarget("cuda", capability, 32), options=options
            )
            assert made.asm["cubin"]
        compiled += 1
    print(compiled)


if __name__ == "__main__":
    main()
