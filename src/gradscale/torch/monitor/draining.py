"""The facts that are on their way when a run ends."""

import os
from typing import TYPE_CHECKING

from gradscale.torch.device_state.host_copy import LAG, Mailbox
from gradscale.torch.device_state.layout import Ledger

if TYPE_CHECKING:
    from gradscale.torch.monitor.monitor import Monitor


def drain(monitor: "Monitor", mailbox: Mailbox, ledger: Ledger, pid: int) -> None:
    """Judge all that has not been judged. Syncs.

    Args:
        monitor: Who judges; not its owner, which would never be let go of.
        mailbox, ledger: Where the facts come from.
        pid: The process that may; what was forked from it leaves it to its parent.
    """
    if os.getpid() != pid:
        return
    monitor.module_hooks.disable()
    for _ in range(LAG):
        monitor.look(ledger, {})
        monitor.see(mailbox.exchange(ledger), None)
    monitor.hurry()
    monitor.module_hooks.disable()
