"""The rank of this process, and whether it may write."""

import os
from collections.abc import Callable
from typing import NamedTuple


class Process(NamedTuple):
    """The role of a process in a run.

    Attributes:
        rank: Its rank; rank 0 writes and prints.
        world_size: The number of ranks.
        worker: A data-loader worker, which records nothing.
    """

    rank: int = 0
    world_size: int = 1
    worker: bool = False


# Each framework integration passes its own, based on its process groups.
FindProcess = Callable[[], Process]


def process_from_environment() -> Process:
    """Return the role that launchers such as torchrun set in the environment.

    >>> process_from_environment()
    Process(rank=0, world_size=1, worker=False)
    """
    return Process(_number("RANK", 0), _number("WORLD_SIZE", 1))


def _number(name: str, missing: int) -> int:
    given = os.environ.get(name, "")
    return int(given) if given.isdecimal() else missing
