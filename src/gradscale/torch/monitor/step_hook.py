"""One torch hook before the steps of all optimizers, shared by all recorded scalers."""

import threading
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class StepCheck(Protocol):
    """A check that runs before each step."""

    stepping: bool

    def before_step(self, optimizer: Optimizer, *, scaled: bool) -> None:
        """Inspect an optimizer, in the thread that steps it.

        Args:
            optimizer: Before its step.
            scaled: A scaler is stepping it.
        """


class StepHook:
    """Calls checks before each step of any optimizer of the process.

    All checks share one torch hook: adding or removing a hook during a step in another
    thread makes that step raise `OrderedDict mutated during iteration`.
    """

    def __init__(self) -> None:
        # Reentrant: a check may be deleted at any point, including here.
        self._lock = threading.RLock()
        self._checks: dict[int, weakref.ref[StepCheck]] = {}
        self._handle: RemovableHandle | None = None

    def add(self, check: StepCheck) -> None:
        """Call a check until it is removed or deleted."""
        key = id(check)
        weakref.finalize(check, self._remove, key).atexit = False
        with self._lock:
            self._checks[key] = weakref.ref(check)
            if self._handle is None:
                self._handle = register_optimizer_step_pre_hook(self._before_step)

    def remove(self, check: StepCheck) -> None:
        """Stop calling a check."""
        self._remove(id(check))

    def _remove(self, key: int) -> None:
        with self._lock:
            self._checks.pop(key, None)
            if not self._checks and self._handle is not None:
                self._handle.remove()
                self._handle = None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            # Dynamo traces hooks too, and does not support threads.
            return
        found = [ref() for ref in list(self._checks.values())]
        checks = [check for check in found if check is not None]
        # A scaler may step another optimizer in another thread. The step is then not
        # counted; a wrong loop repeats it.
        scaled = any(check.stepping for check in checks)
        for check in checks:
            check.before_step(optimizer, scaled=scaled)


step_hook = StepHook()
