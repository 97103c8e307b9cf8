"""`import apex` in an unmodified script finds this room."""

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# `amp_C` is apex's compiled extension, a module of its own.
ROOTS = {"apex": "gradscale.apex", "amp_C": "gradscale.apex.amp_C"}


class ApexFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `apex` and its modules in this room. The first on `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of apex; None for all others."""
        root, _, rest = fullname.partition(".")
        if root not in ROOTS:
            return None
        ours = ".".join(filter(None, (ROOTS[root], rest)))
        try:
            found = importlib.util.find_spec(ours)
        except ModuleNotFoundError:
            return None
        if found is None:
            return None
        return ModuleSpec(fullname, self, origin=ours, is_package=_is_package(found))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of this room itself: there is one state of amp."""
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import has replaced."""
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


def install_as_apex() -> Callable[[], None]:
    """Let `import apex` find this room, whatever package of that name is installed.

    >>> undo = install_as_apex()
    >>> from apex import amp
    >>> amp.__name__
    'gradscale.apex.amp'
    >>> undo()

    Returns:
        A function that undoes it.
    """
    before = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] in ROOTS
    }
    for name in before:
        del sys.modules[name]
    finder = ApexFinder()
    sys.meta_path.insert(0, finder)

    def undo() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        for name in list(sys.modules):
            if name.partition(".")[0] in ROOTS:
                del sys.modules[name]
        sys.modules.update(before)

    return undo


def _is_package(spec: ModuleSpec) -> bool:
    return spec.submodule_search_locations is not None
