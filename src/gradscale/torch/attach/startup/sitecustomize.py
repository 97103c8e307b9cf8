"""Patches torch's scalers in every Python process of `gradscale run`.

Python imports the first `sitecustomize` on its path at startup, in every process;
`gradscale run` puts this folder first. Only the standard library is imported before a
scaler is created: a process without a scaler pays nothing, and one whose Python has no
gradscale runs unchanged.
"""

import json
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec

HERE = os.path.dirname(os.path.abspath(__file__))


class TorchFinder:
    """Calls `patch` once torch is imported. The first finder on `sys.meta_path`."""

    def find_spec(self, name, path=None, target=None):
        """Return torch's spec from the other finders, with a loader that patches.

        Code that only requests the spec sees no difference.
        """
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._patch_after(spec.loader)
        return spec

    def _patch_after(self, loader):
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            vars(loader).pop("exec_module", None)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                patch()

        loader.exec_module = exec_module


class ApexFinder:
    """Lets the first `import apex` find gradscale's apex, before any installed one.

    Finder and loader in one: the modules that it returns are already loaded.
    """

    def find_spec(self, name, path=None, target=None):
        """Return the spec of apex; None for all others."""
        if name.partition(".")[0] not in ("apex", "amp_C", "apex_C"):
            return None
        sys.meta_path.remove(self)
        # Imported here, as it loads torch. Errors are raised by the script's import.
        import_module(os.environ["GRADSCALE_AS_APEX"]).install_as_apex()
        return ModuleSpec(name, self, loader_state=sys.modules[name].__spec__)

    def create_module(self, spec):
        """Return the module."""
        return sys.modules[spec.name]

    def exec_module(self, module):
        """Restore the module's own spec, which the import has replaced."""
        module.__spec__ = module.__spec__.loader_state


def patch():
    """Make the first construction of a scaler import gradscale and install it."""
    # Imported here: torch has imported them by now, other processes need not.
    from inspect import signature
    from threading import Lock

    try:
        base = sys.modules["torch"].amp.GradScaler
        arguments = signature(base.__init__)
    except AttributeError as error:
        note(error)
        return

    lock = Lock()

    def new(cls, *args, **kwargs):
        with lock:
            # Another thread may have installed it meanwhile.
            if base.__new__ is new:
                try:
                    from gradscale.torch.attach.patch import install

                    install()
                except Exception as error:
                    # Whatever is raised, the script runs as without gradscale.
                    base.__new__ = plain_new
                    note(error)
        return base.__new__(cls, *args, **kwargs)

    # inspect.signature(GradScaler) shows torch's arguments.
    new.__signature__ = arguments
    base.__new__ = new


def plain_new(cls, *args, **kwargs):
    """Create an object as a class without `__new__` does."""
    return object.__new__(cls)


def note(error):
    """Report to `gradscale run` why this process is not recorded."""
    fields = {"unreached": f"{type(error).__name__}: {error}", "by": sys.executable}
    try:
        with open(os.environ["GRADSCALE_RUN_NOTES"], "a") as notes:
            notes.write(json.dumps(fields) + "\n")
    except OSError:
        # `gradscale run` has ended before this process and removed the file.
        pass


def run_hidden():
    """Run the `sitecustomize` that this one hides, if there is one."""
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "GRADSCALE_RUN_NOTES" in os.environ:
    if "torch" in sys.modules:
        patch()
    else:
        sys.meta_path.insert(0, TorchFinder())
    if "GRADSCALE_AS_APEX" in os.environ:
        sys.meta_path.insert(0, ApexFinder())
run_hidden()
