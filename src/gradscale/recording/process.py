"""Which process of a run this is: its rank, and whether it may write."""

import os
from collections.abc import Callable
from typing import NamedTuple


class Process(NamedTuple):
    """The place of a process in a run.

    Attributes:
        rank: Its rank; rank 0 writes and prints.
        world_size: The number of ranks.
        worker: It only loads data for another process, and records nothing.
    """

    rank: int = 0
    world_size: int = 1
    worker: bool = False


# A framework room passes its own: only the framework knows its process groups.
FindProcess = Callable[[], Process]


def process_from_environment() -> Process:
    """Return what launchers such as torchrun write into the environment.

    >>> process_from_environment()
    Process(rank=0, world_size=1, worker=False)
    """
    return Process(_number("RANK", 0), _number("WORLD_SIZE", 1))


def _number(name: str, missing: int) -> int:
    given = os.environ.get(name, "")
    return int(given) if given.isdecimal() else missing
