"""Makes `import apex` in an unmodified script resolve to gradscale.apex."""

import importlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

# Apex's compiled extensions are modules of their own.
EXTENSIONS = ("amp_C", "apex_C")
ROOTS = ("apex", *EXTENSIONS)
# What torch has in place of modules of apex that are not provided.
INSTEAD = {
    "RNN": "torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN",
    "contrib": "the modules of torch.nn, and scaled_dot_product_attention of "
    "torch.nn.functional",
    "fused_dense": "torch.nn.Linear",
    "mlp": "torch.nn.Sequential of torch.nn.Linear and torch.nn.ReLU",
    "parallel.multiproc": "torchrun",
    "reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "transformer": "torch.distributed.tensor.parallel",
}


class NotProvided:
    """A finder of modules that explains why a module of apex is missing."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Raise for a module of apex; asked after all other finders."""
        inner = name.removeprefix("gradscale.")
        if not inner.startswith("apex."):
            return
        inner = inner.removeprefix("apex.")
        found = [known for known in INSTEAD if f"{inner}.".startswith(f"{known}.")]
        advice = f" Use {INSTEAD[found[0]]}." if found else " See docs/apex.md."
        # Without `name=`, which would make `from apex import mlp` drop the text.
        raise ModuleNotFoundError(
            f"No module named {name!r}: gradscale runs this script in place of apex "
            f"and does not provide apex.{inner}.{advice}"
        )


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
    aliases |= {name: sys.modules[f"gradscale.apex.{name}"] for name in EXTENSIONS}
    finder: Any = NotProvided()
    before = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in ROOTS}

    def undo() -> None:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] in ROOTS]:
            del sys.modules[name]
        sys.modules.update(before)

    for name in before:
        del sys.modules[name]
    sys.modules.update(aliases)
    sys.meta_path.append(finder)
    return undo
