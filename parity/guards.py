"""The CUDA guards of tests that need no CUDA, lifted."""

import unittest
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import PurePosixPath
from typing import Any
from unittest import mock

from parity.inventory import Entry


def lift_guards(entries: Iterable[Entry]) -> None:
    """Let the tests of `entries`, and the classes around them, through CUDA guards.

    Works on decorators as they are applied, so it comes before the test files are
    imported. A guard is known by its reason: other skips stay.
    """
    # Here, not above: it takes seconds and needs expecttest.
    from torch.testing._internal import common_device_type

    tests = {(PurePosixPath(entry.file).stem, entry.test) for entry in entries}
    files = {file for file, _ in tests}
    skip_if, only_cuda = unittest.skipIf, common_device_type.onlyCUDA

    def free(item: Any) -> bool:
        file = item.__module__.rpartition(".")[2]
        if isinstance(item, type):
            return file in files
        return (file, item.__name__) in tests

    def lenient_skip_if(condition: object, reason: str) -> Callable[[Any], Any]:
        skip = skip_if(condition, reason)
        guard = "cuda" in reason.lower()
        return lambda item: item if guard and free(item) else skip(item)

    def lenient_only_cuda(item: Any) -> Any:
        return item if free(item) else only_cuda(item)

    unittest.skipIf = lenient_skip_if
    common_device_type.onlyCUDA = lenient_only_cuda


def sharded_on_cpu() -> AbstractContextManager[object]:
    """Make the CPU, where those tests' tensors are, ShardedGradScaler's default device.

    The default is CUDA, and without it the scaler would switch itself off.
    """
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    init = ShardedGradScaler.__init__
    return mock.patch.object(init, "__defaults__", ("cpu", *init.__defaults__[1:]))
