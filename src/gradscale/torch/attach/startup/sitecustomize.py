"""Reaches every Python process of `gradscale run`, by its name and its folder.

Python imports the first `sitecustomize` on its path when it starts, in every process;
`gradscale run` puts this folder first. Nothing but the standard library is imported
before a scaler is made: a process that makes none pays for nothing, and one whose
Python knows no gradscale goes on as it would.
"""

import json
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

HERE = os.path.dirname(os.path.abspath(__file__))


class AfterTorch:
    """Calls `put_in_place` once torch is imported. The first finder Python asks."""

    def find_spec(self, name, path=None, target=None):
        """Return the spec that the other finders have for torch, with our call in it.

        Others only ask whether torch is there: all is as it was until it is imported.
        """
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader):
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            vars(loader).pop("exec_module", None)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                put_in_place()

        loader.exec_module = exec_module


def put_in_place():
    """Let the first scaler that is made bring ours; until then nothing is loaded."""
    # Not above: torch has loaded it, others need not.
    from inspect import signature

    try:
        base = sys.modules["torch"].amp.GradScaler
        arguments = signature(base.__init__)
    except AttributeError as error:
        note(error)
        return

    def new(cls, *args, **kwargs):
        base.__new__ = plain_new
        try:
            from gradscale.torch.attach.patch import install

            install()
        except Exception as error:
            # Whatever it is, the script must run as it does without us.
            note(error)
        return base.__new__(cls, *args, **kwargs)

    # What tells people and programs the arguments of a class.
    new.__signature__ = arguments
    base.__new__ = new


def plain_new(cls, *args, **kwargs):
    """Make an object as a class without `__new__` does."""
    return object.__new__(cls)


def note(error):
    """Tell `gradscale run` why this process is not recorded."""
    why = {"unreached": f"{type(error).__name__}: {error}", "by": sys.executable}
    try:
        with open(os.environ["GRADSCALE_RUN_NOTES"], "a") as notes:
            notes.write(json.dumps(why) + "\n")
    except OSError:
        # The command has ended before a process that it started.
        pass


def run_hidden():
    """Run the `sitecustomize` that this one has hidden, as if it were not there."""
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "GRADSCALE_RUN_NOTES" in os.environ:
    if "torch" in sys.modules:
        put_in_place()
    else:
        sys.meta_path.insert(0, AfterTorch())
run_hidden()
