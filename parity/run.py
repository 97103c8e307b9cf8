"""Run PyTorch's tests of the scaler: `python -m parity FOLDER [--baseline]`."""

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from parity.account import lacking
from parity.inventory import INVENTORY
from parity.swap import BASELINE, swap

# Ranks that a test starts import this file under this name before the test's own, and
# would otherwise meet torch's class.
if __name__ == "__mp_main__":
    swap()


class FolderError(Exception):
    """The folder is not the test folder of a PyTorch checkout."""


def check_folder(given: str) -> Path:
    """Return the test folder of PyTorch at `given`.

    Raises:
        FolderError: It is not one; the text says what to pass instead.
    """
    remedy = (
        "Pass the folder `test` of a PyTorch checkout, of the release that is "
        "installed: make parity PT_TEST=.../pytorch/test"
    )
    if not given:
        raise FolderError(
            "No folder was given. PyTorch's tests are not part of its wheel, so they "
            f"cannot be found without one. {remedy}"
        )
    folder = Path(given).resolve()
    if not folder.is_dir():
        raise FolderError(
            f"{folder} is not a folder. There is nothing to run in it. {remedy}"
        )
    if not (folder / "test_torch.py").is_file():
        inner = folder / "test"
        if (inner / "test_torch.py").is_file():
            remedy = f"Pass {inner}, the test folder inside it."
        raise FolderError(
            f"{folder} holds no test_torch.py. It is not the test folder of a PyTorch "
            f"checkout, where the scaler's tests are. {remedy}"
        )
    return folder


def mismatch(folder: Path) -> str:
    """Return a warning if the folder and the installed torch differ in release."""
    noted = folder.parent / "version.txt"
    theirs = noted.read_text().strip() if noted.is_file() else torch.__version__
    if theirs.split(".")[:2] == torch.__version__.split(".")[:2]:
        return ""
    return (
        f"warning: the tests are of PyTorch {theirs}, torch is {torch.__version__}. "
        "What they import from torch.testing may have changed in between. Check out "
        "the release that is installed if a file cannot be imported."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the tests and return pytest's exit code; 2 if there is nothing to run."""
    parser = argparse.ArgumentParser(prog="python -m parity", description=__doc__)
    parser.add_argument("folder", nargs="?", default="", help="PyTorch's test folder")
    parser.add_argument(
        "--baseline", action="store_true", help="leave torch's class in place"
    )
    options = parser.parse_args(argv)
    try:
        folder = check_folder(options.folder)
    except FolderError as error:
        parser.error(str(error))
    if find_spec("expecttest") is None:
        parser.error(
            "expecttest is not installed. PyTorch's test helpers import it, so no test "
            "could be read. Run pip install expecttest hypothesis numpy psutil."
        )
    if warning := mismatch(folder):
        print(warning)
    os.environ[BASELINE] = "1" if options.baseline else ""
    files = {entry.file for entry in INVENTORY if not lacking(entry.needs)}
    settings = [
        # PyTorch's and our own pytest settings and conftest files are for other runs.
        *("-c", os.devnull, "--rootdir", str(folder), "--noconftest"),
        *("--disable-plugin-autoload", "-p", "parity.plugin", "-p", "no:cacheprovider"),
        *("--continue-on-collection-errors", "--disable-warnings", "--tb=short", "-q"),
    ]
    found = [str(folder / file) for file in sorted(files) if (folder / file).is_file()]
    return int(pytest.main([*settings, *found]))
