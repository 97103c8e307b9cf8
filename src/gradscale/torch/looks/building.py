"""Building looks.cpp, out of everybody's way.

The library lies in the folder of PyTorch's extensions, under a name of its own for each
version of the source, of PyTorch and of Python. It is built in a folder of one's own
and then moved there in one go: whoever finds it finds it whole, and a process that dies
on the way leaves nothing that another would wait for.
"""

import hashlib
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from gradscale.errors import ConfigError

NAME = "gradscale_looks"
SOURCE = Path(__file__).with_name("looks.cpp")
HEADER = Path(__file__).with_name("crew.h")

_log = logging.getLogger("gradscale")
_lock = threading.Lock()
_asked = False
# The module, once it is there.
native: Any = None


def build() -> None:
    """Build the looks in C++, or take those that were built before; wait for them.

    Nobody needs to call this: with a GPU and many tensors it happens by itself, in the
    background. A benchmark calls it to measure the same from the first step on.

    Raises:
        ConfigError: They cannot be built here.
    """
    global native
    with _lock:
        if native is None:
            reason = _why_not()
            if reason is not None:
                raise _impossible(reason)
            try:
                native = _load(_built())
            except Exception as error:
                # Whatever the compiler says: there is a way without it.
                raise _impossible(f"{type(error).__name__}: {error}") from error


def build_soon() -> None:
    """Build in the background, once in a process; a failure goes to the log."""
    global _asked
    if not _asked:
        _asked = True
        # A daemon: the end of the process does not wait for it.
        thread = threading.Thread(target=_try, name="gradscale looks", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.info("%s", _impossible(f"RuntimeError: {error}"))


def _try() -> None:
    try:
        build()
    except ConfigError as error:
        _log.info("%s", str(error).splitlines()[0])


def _why_not() -> str | None:
    if sys.platform != "linux" or sys.implementation.name != "cpython":
        return "they are made for CPython on Linux"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "they need the global interpreter lock"
    return None


def _impossible(reason: str) -> ConfigError:
    return ConfigError(
        "The looks at many tensors could not be built in C++, so Python does them: "
        "the same answers, some milliseconds later for thousands of tensors. "
        f"Install a C++ compiler and ninja if that matters. {reason}",
        code="GS101",
    )


def _folder() -> Path:
    """Return where the library of this source, PyTorch and Python lies."""
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    facts = (
        SOURCE.read_text(encoding="utf-8"),
        HEADER.read_text(encoding="utf-8"),
        torch.__version__,
        torch.version.git_version,
        sys.implementation.cache_tag,
        getattr(sys, "abiflags", ""),
        os.uname().machine,
    )
    digest = hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()
    return Path(root) / f"{NAME}_{digest[:16]}"


def _built() -> Path:
    """Return the library, built if it was not there."""
    folder = _folder()
    library = folder / f"{NAME}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not library.exists():
                _compile(library)
    return library


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let other processes wait here: they will find what this one builds."""
    import fcntl

    with open(folder / "lock", "w") as file:
        try:
            # Given back by the system if the process dies.
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            # A file system without locks: each builds for itself.
            pass
        else:
            for left in folder.glob("build-*"):
                shutil.rmtree(left, ignore_errors=True)
        yield


@contextmanager
def _linked_from(work: str) -> Iterator[None]:
    """Let a PyTorch be linked with that lies in a folder with a space.

    Its flags for the linker have no quotes, so nothing at all can be built there.
    """
    from torch.utils import cpp_extension

    libraries = cpp_extension.TORCH_LIB_PATH
    if " " not in libraries:
        yield
        return
    os.symlink(libraries, Path(work) / "lib")
    cpp_extension.TORCH_LIB_PATH = "lib"
    try:
        yield
    finally:
        cpp_extension.TORCH_LIB_PATH = libraries


def _compile(library: Path) -> None:
    from torch.utils.cpp_extension import load

    work = tempfile.mkdtemp(prefix="build-", dir=library.parent)
    try:
        # Copies: ninja then sees no path but this one.
        source, _ = (shutil.copy(file, work) for file in (SOURCE, HEADER))
        with _linked_from(work):
            load(
                NAME,
                source,
                extra_cflags=["-O3"],
                build_directory=work,
                with_cuda=False,
                is_python_module=False,
            )
        made = next(Path(work).glob("*.so"))
        os.replace(made, library)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _load(library: Path) -> Any:
    loader = ExtensionFileLoader(NAME, str(library))
    spec = spec_from_file_location(NAME, library, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
