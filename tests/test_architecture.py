"""Who may import whom, held as data; and what an import may cost."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import gradscale

SOURCE = Path(gradscale.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
FRAMEWORKS = {"torch", "jax", "keras", "mxnet"}


class Allowed(NamedTuple):
    """What a room may import beside itself and the standard library."""

    rooms: set[str]
    libraries: set[str]


CORE = {"core", "errors"}
RUN = CORE | {"judge", "runfile"}
RECORDING = RUN | {"recording"}
READERS = RUN | {"diagnosis"}
EVERY_ROOM = READERS | FRAMEWORKS | {"apex", "recording", "sinks", "demo", "report"}
SCREEN = {"rich", "typer"}

# The table of rooms. The last two rows are files, not rooms.
ROOMS = {
    "errors": Allowed(set(), set()),
    "core": Allowed({"errors"}, set()),
    "judge": Allowed(CORE, set()),
    "runfile": Allowed(CORE, set()),
    "recording": Allowed(RUN, set()),
    "torch": Allowed(RECORDING, {"torch", "triton"}),
    # A drop-in for a library on torch: it stands on the torch room.
    "apex": Allowed(RECORDING | {"torch"}, {"torch"}),
    # optax and flax only where a file says so: `import gradscale.jax` loads neither.
    "jax": Allowed(RECORDING, {"flax", "jax", "numpy", "optax"}),
    # TensorFlow and tf_keras only where a file says so: Keras has other backends.
    "keras": Allowed(RECORDING, {"keras", "tensorflow", "tf_keras"}),
    "mxnet": Allowed(RECORDING, {"mxnet", "numpy"}),
    "diagnosis": Allowed(RUN, {"numpy"}),
    "sinks": Allowed(RECORDING | FRAMEWORKS, {"tensorboard", "torch", "wandb"}),
    "demo": Allowed(RECORDING | FRAMEWORKS, {"torch"}),
    "report": Allowed(READERS, {"altair", "jinja2", "rich", "vl_convert"}),
    "cli": Allowed(EVERY_ROOM | {""}, SCREEN),
    "": Allowed(CORE, set()),
    "__main__": Allowed({"cli"}, set()),
}

# Inside the torch room: files and sub-rooms, and what each may import of the others.
BASE = {"devices", "messages", "names", "scaled_loss", "tensor_list"}
READS = BASE | {"grads", "kernels"}
STEPS = READS | {"device_state", "ranks", "step"}
TORCH = {
    "devices": set(),
    "tensor_list": set(),
    "names": set(),
    "rng": set(),
    "messages": {"devices"},
    "scaled_loss": {"devices"},
    "kernels": {"devices", "tensor_list"},
    "grads": BASE | {"kernels"},
    "device_state": READS,
    "ranks": READS | {"device_state"},
    "step": READS | {"device_state", "ranks"},
    "optim": BASE | {"device_state", "kernels"},
    "precision": STEPS | {"optim"},
    "locate": BASE | {"rng"},
    "underflow": READS | {"device_state", "locate"},
    "monitor": STEPS | {"locate", "underflow"},
    "scaler": STEPS | {"checkpoint", "locate", "monitor", "precision", "underflow"},
    # Annotated only.
    "checkpoint": {"device_state", "precision", "scaler"},
    "initialization": {"monitor", "precision", "scaler"},
    "quantization": {"precision"},
    "loops": STEPS | {"precision", "rng", "scaler"},
    "compat": {"scaler"},
    "sharded": {"scaler"},
    "cuda": {"compat"},
    "cpu": {"compat"},
    "attach": STEPS
    | {"checkpoint", "compat", "cpu", "cuda", "monitor", "scaler", "sharded"}
    | {"underflow"},
    "__init__": {
        *("attach", "initialization", "loops", "monitor", "precision", "scaler"),
        "sharded",
    },
}

# Files that a reader has to take in at once.
MOST_FILES = 12
LARGER_FOLDERS = {"torch/kernels": 15}

# At 600 lines a file is split, or says why not.
LONG_FILES = {
    "judge/causes.py": "one table: the first row whose evidence is there is the cause",
    "torch/scaler.py": "all of torch's interface; torch.compile refuses to inherit",
}


def place(path):
    return path.relative_to(SOURCE).as_posix()


def room_of(path):
    """Return the room of a file; '' is the package's own __init__."""
    first = Path(place(path)).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported(tree):
    """Return the absolute names that a module imports, wherever it does so."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def forbidden(room, tree):
    """Return what a module of this room imports and may not."""
    allowed = ROOMS[room]
    wrong = set()
    for name in imported(tree):
        first, *rest = name.split(".")
        if first == "gradscale":
            # A name that is no room is one of the package's own.
            target = rest[0] if rest and rest[0] in ROOMS else ""
            if target not in allowed.rooms | {room}:
                wrong.add(name)
        elif first not in allowed.libraries | sys.stdlib_module_names:
            wrong.add(name)
    return wrong


def relative_imports(tree):
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


# --- the checks can fail --------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("core", "import torch"),
        ("core", "import numpy as np"),
        ("core", "from gradscale.torch.scaler import GradScaler"),
        ("core", "from gradscale import torch"),
        ("core", "from gradscale import DynamicScale"),
        ("errors", "from gradscale.core.state import f32"),
        ("torch", "def f():\n    import numpy"),
        ("torch", "from gradscale.jax import scaler"),
        ("torch", "import gradscale.cli"),
        ("jax", "import torch.amp"),
        ("jax", "import equinox"),
        ("keras", "import jax"),
        ("keras", "from gradscale.torch import GradScaler"),
        ("mxnet", "import gluonnlp"),
        ("mxnet", "from gradscale.keras import LossScaleOptimizer"),
        ("report", "from gradscale.torch import GradScaler"),
        ("torch", "from gradscale.apex import amp"),
        ("apex", "from gradscale.keras import LossScaleOptimizer"),
        ("demo", "from gradscale.report import figures"),
        ("", "from gradscale.torch import GradScaler"),
    ],
)
def test_an_import_that_is_not_allowed_is_found(room, line):
    assert forbidden(room, ast.parse(line))


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("core", "import math, collections.abc"),
        ("core", "from gradscale.errors import StateError"),
        ("torch", "from gradscale.core.state import Observed"),
        ("torch", "from torch import Tensor"),
        ("cli", "from gradscale import __version__"),
        ("cli", "from gradscale.report import figures"),
    ],
)
def test_an_import_that_is_allowed_is_let_through(room, line):
    assert forbidden(room, ast.parse(line)) == set()


def test_a_relative_import_is_found():
    assert relative_imports(ast.parse("from .state import Observed")) == [1]


# --- the tree -------------------------------------------------------------------------


def test_every_file_belongs_to_a_room():
    assert {place(path) for path in FILES if room_of(path) not in ROOMS} == set()


@pytest.mark.parametrize("path", FILES, ids=place)
def test_a_file_imports_only_what_its_room_may_and_by_absolute_names(path):
    tree = parsed(path)
    assert forbidden(room_of(path), tree) == set()
    assert relative_imports(tree) == []


def test_every_file_is_named_after_a_concept():
    vague = {"utils", "util", "helpers", "helper", "common", "manager"}
    # apex.fp16_utils is an import path of apex.
    names = {place(path).replace("fp16_utils", "") for path in FILES}
    assert {name for name in names if vague & set(re.split(r"[/._]", name))} == set()


def test_exactly_the_files_that_say_why_are_long():
    long = {path for path in FILES if path.read_text("utf-8").count("\n") > 600}
    assert {place(path) for path in long} == set(LONG_FILES)


def torch_imports(path):
    """Return the sub-rooms of the torch room that a file of it imports."""
    own = torch_part(path)
    names = [
        name.split(".")[2:] for name in imported(parsed(path)) if in_torch_room(name)
    ]
    return {parts[0] for parts in names if parts and parts[0] in TORCH} - {own}


def in_torch_room(name):
    return name.startswith("gradscale.torch.")


def torch_part(path):
    return Path(place(path)).parts[1].removesuffix(".py")


TORCH_FILES = [path for path in FILES if room_of(path) == "torch"]


def test_the_files_of_the_torch_room_import_only_earlier_stages():
    later = {
        place(path): torch_imports(path) - TORCH[torch_part(path)]
        for path in TORCH_FILES
    }
    assert {name: wrong for name, wrong in later.items() if wrong} == {}


def test_an_import_of_a_later_stage_is_found():
    path = SOURCE / "torch" / "scaler.py"
    assert not torch_imports(path) <= TORCH["grads"]


def test_no_stage_imports_one_that_imports_it():
    pairs = {(a, b) for a, allowed in TORCH.items() for b in allowed if a in TORCH[b]}
    # Annotated only: the checkpoint reads the scaler's private attributes.
    assert pairs == {("checkpoint", "scaler"), ("scaler", "checkpoint")}


FOLDERS = sorted(
    {
        place(path.parent)
        for path in FILES
        if room_of(path)
        in ("apex", "torch", "keras", "mxnet", "core", "judge", "recording")
    }
    - {"torch"}
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_few_files(folder):
    files = list((SOURCE / folder).glob("*.py"))
    assert len(files) <= LARGER_FOLDERS.get(folder, MOST_FILES)


# --- what an import loads and costs ---------------------------------------------------


def run_python(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=SOURCE.parent
    )
    assert done.returncode == 0, done.stderr
    return done


def loaded_by(*statements):
    """Return the packages that each statement loads after those before it.

    They run in one process: loading a framework takes seconds.
    """
    lines = ["import json, sys", "loaded = []"]
    for statement in statements:
        lines += [
            "before = set(sys.modules)",
            statement,
            "loaded.append(sorted(set(sys.modules) - before))",
        ]
    lines.append("print(json.dumps(loaded))")
    each = json.loads(run_python("-c", "\n".join(lines)).stdout)
    return [
        {module.split(".")[0] for module in modules} - sys.stdlib_module_names
        for modules in each
    ]


def test_what_an_import_loads_is_seen():
    (loaded,) = loaded_by("import gradscale.cli")
    assert "typer" in loaded


def test_importing_gradscale_loads_no_library():
    assert loaded_by("import gradscale") == [{"gradscale"}]


def test_the_core_loads_only_the_standard_library():
    modules = sorted(path.stem for path in (SOURCE / "core").glob("[!_]*.py"))
    statements = [f"import gradscale.core.{module}" for module in modules]
    each = loaded_by("import gradscale.errors", *statements)
    assert set().union(*each) == {"gradscale"}


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_room_loads_only_its_framework_and_that_of_keras_no_other(framework):
    backend = f"import os; os.environ['KERAS_BACKEND'] = {framework!r}; import keras"
    _, own, _, keras = loaded_by(
        f"import {framework}",
        f"import gradscale.{framework}",
        backend,
        "import gradscale.keras",
    )
    assert own == {"gradscale"}
    assert keras == {"gradscale"}


@pytest.mark.parametrize(
    ("module", "library", "name"),
    [
        ("gradscale.torch", "torch", "PyTorch"),
        ("gradscale.torch.optim", "torch", "PyTorch"),
        ("gradscale.jax", "jax", "JAX"),
        ("gradscale.jax.flax", "jax", "JAX"),
        ("gradscale.keras", "keras", "Keras"),
        ("gradscale.mxnet", "mxnet", "MXNet"),
    ],
)
def test_a_room_without_its_framework_names_the_extra(module, library, name):
    script = (
        f"import sys; sys.modules[{library!r}] = None\n"
        f"try: import {module}\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    assert run_python("-c", script).stdout == (
        f"gradscale.{library} needs {name}, which is not installed. "
        f"Run pip install 'gradscale[{library}]'.\n"
    )


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import warnings
warnings.simplefilter("ignore")
import torch
from gradscale.torch import GradScaler

weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
scaler = GradScaler("cpu")
scaler.scale(weight.sum()).backward()
scaler.clip_grad_norm_(optimizer, max_norm=1.0)
scaler.step(optimizer)
scaler.update()
scaler.load_state_dict(scaler.state_dict())
print(scaler.last)
"""


def test_the_torch_room_trains_without_numpy():
    assert "applied=True" in run_python("-c", WITHOUT_NUMPY).stdout


COUNT = """
import sys
before = set(sys.modules)
import gradscale
print(len(set(sys.modules) - before))
"""


def test_importing_gradscale_loads_few_modules():
    # 62 take 50 ms on a quiet machine; torch alone loads two thousand.
    assert int(run_python("-c", COUNT).stdout) < 90
