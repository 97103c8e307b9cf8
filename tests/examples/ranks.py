"""Runs an example as one of several ranks, without torchrun."""

import os
import runpy
import sys
from pathlib import Path

from tests.torch.parallel.launch import leave

EXAMPLES = Path(__file__).parents[2] / "examples"


def main(rank, ranks, folder, name, place, port, *arguments) -> None:
    """Run an example in `place`, with the variables that torchrun sets.

    Its output goes to `folder`, in a file for each rank.
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    with (folder / f"{rank}.out").open("w") as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
    os.chdir(place)
    script = str(EXAMPLES / f"{name}.py")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    leave()
