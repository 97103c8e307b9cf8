"""Late, non-blocking reading of device facts."""

from collections import deque

import torch
from torch import Tensor

# A guard acts on the facts of exactly this many steps ago, so that every rank and
# every resumed run acts in the same call.
LAG = 2


class Mailbox:
    """Carries one small tensor a step to the host without waiting for the device.

    >>> box = Mailbox()
    >>> [box.exchange(torch.tensor([float(i)])) for i in range(4)]
    [None, None, [0.0], [1.0]]
    """

    def __init__(self) -> None:
        self._posted: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def clear(self) -> None:
        """Forget the facts that are on their way."""
        self._posted.clear()

    def exchange(self, facts: Tensor) -> list[float] | None:
        """Post this step's facts; return those of `LAG` steps ago, if there are any.

        Waits only if those have not arrived yet. Not for use while a graph is being
        captured or compiled.

        Args:
            facts: float[n]; copied, so it may be overwritten afterwards.
        """
        if facts.device.type == "cuda":
            pinned = torch.empty(facts.shape, dtype=facts.dtype, pin_memory=True)
            pinned.copy_(facts, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(facts.device))
            self._posted.append((pinned, arrived))
        else:
            # On other devices the read itself waits, for a value two steps old.
            self._posted.append((facts.clone(), None))
        if len(self._posted) <= LAG:
            return None
        slot, event = self._posted.popleft()
        if event is not None:
            event.synchronize()
        return slot.tolist()
