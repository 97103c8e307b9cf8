"""One flag on its way to the host, read without waiting for what comes after it."""

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

# Pinned memory and an event, for each device those that no flag uses.
_free: dict[torch.device, list[tuple[Tensor, torch.cuda.Event]]] = {}


class Flag:
    """Whether a step is to be skipped; its copy to the host starts at once.

    Not for use while a graph is being captured or compiled.

    >>> Flag.start(torch.tensor(1.0)).value()
    True
    """

    def __init__(
        self, skip: Tensor, landing: tuple[Tensor, torch.cuda.Event] | None
    ) -> None:
        self._skip = skip
        self._version = skip._version
        self._landing = landing
        self._value: bool | None = None

    @classmethod
    def start(cls, skip: Tensor) -> "Flag":
        """Start the copy. No host sync.

        On CUDA it runs on the current stream, before whatever is queued from here on.
        Elsewhere nothing is started: `value` reads the tensor itself.

        Args:
            skip: f32 of one element, 0 if the step is to be taken. To be recognised by
                `stands_for`, it must be the very tensor that decides.
        """
        if skip.device.type != "cuda":
            return cls(skip, None)
        pinned, arrived = _landing_on(skip.device)
        pinned.copy_(skip.reshape(()), non_blocking=True)
        arrived.record(torch.cuda.current_stream(skip.device))
        return cls(skip, (pinned, arrived))

    def stands_for(self, flags: Mapping[torch.device, Tensor]) -> bool:
        """Return whether these flags are this one alone, not written to since."""
        skips = list(flags.values())
        return (
            len(skips) == 1
            and skips[0] is self._skip
            and self._skip._version == self._version
        )

    def value(self) -> bool:
        """Return True if the step is to be skipped. Waits for the flag alone."""
        if self._value is None:
            source = self._skip
            if self._landing is not None:
                source, arrived = self._landing
                arrived.synchronize()
            # As in `skip_of`, whatever is not at most 0 skips, NaN too.
            self._value = not source.item() <= 0.0
            if self._landing is not None:
                _free[self._skip.device].append(self._landing)
                self._landing = None
        return self._value


def _landing_on(device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
    # Another thread may take the last one: asking first would not help.
    with suppress(IndexError):
        return _free.setdefault(device, []).pop()
    pinned = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)
    return pinned, torch.cuda.Event()
