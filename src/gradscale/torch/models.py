"""Finding the model of a script that did not name it."""

import gc
from collections.abc import Sequence

import torch
from torch import Tensor


def model_of(params: Sequence[Tensor]) -> torch.nn.Module | None:
    """Return the module that holds most of the parameters, the outermost of such.

    Walks over every object of the process: for when something has gone wrong.

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> model_of(list(net.parameters())) is net
    True
    """
    wanted = {id(param) for param in params}
    best: tuple[int, int] = (0, 0)
    found = None
    for thing in gc.get_objects():
        # Others may lie about their class when they are asked for it.
        if not issubclass(type(thing), torch.nn.Module):
            continue
        try:
            own = {id(param) for param in thing.parameters()}
            size = sum(1 for _ in thing.modules())
        except Exception:
            continue
        rank = len(own & wanted), size
        if rank[0] and rank > best:
            best, found = rank, thing
    return found
