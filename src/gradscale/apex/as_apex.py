"""Makes `import apex` in an unmodified script resolve to gradscale.apex."""

import importlib
import pkgutil
import sys
from collections.abc import Callable

# `amp_C` is apex's compiled extension, a module of its own.
ROOTS = ("apex", "amp_C")


def install_as_apex() -> Callable[[], None]:
    """Make `import apex` resolve to gradscale.apex, even if apex is installed.

    >>> undo = install_as_apex()
    >>> from apex import amp
    >>> amp.__name__
    'gradscale.apex.amp'
    >>> undo()

    Returns:
        A function that undoes it.
    """
    room = importlib.import_module("gradscale.apex")
    # All of them: a module imported under a second name would be a second copy.
    for _, name, _ in pkgutil.walk_packages(room.__path__, "gradscale.apex."):
        importlib.import_module(name)
    aliases = {
        name.removeprefix("gradscale."): module
        for name, module in sys.modules.items()
        if name == room.__name__ or name.startswith(f"{room.__name__}.")
    }
    aliases["amp_C"] = sys.modules["gradscale.apex.amp_C"]
    before = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in ROOTS}

    def undo() -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] in ROOTS]:
            del sys.modules[name]
        sys.modules.update(before)

    for name in before:
        del sys.modules[name]
    sys.modules.update(aliases)
    return undo
