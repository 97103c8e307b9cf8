"""Five scripts in the style of apex's examples converge as their FP32 runs.

Each runs with one changed import in this process, and unmodified under
`gradscale run --as-apex`, all in one process, for the time that loading torch takes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradscale.runfile import open_run
from tests.apex.conftest import reset

SCRIPTS = Path(__file__).parents[2] / "examples" / "apex"
# For each script the levels, what the first number of its last line may differ by from
# FP32, and the bounds within which training has worked.
CASES = {
    "imagenet": (["O1", "O2"], 0.05, (0.0, 0.3)),
    "dcgan": (["O1"], 0.3, (1.5, 2.5)),
    "clipping": (["O2"], 0.05, (0.0, 0.3)),
    "accumulation": (["O2"], 0.02, (0.0, 0.05)),
    "resume": (["O2"], 0.05, (0.0, 0.6)),
}
RUNS = [(name, level) for name, case in CASES.items() for level in case[0]]


def result_of(line):
    """Return the numbers of a line such as 'loss 0.1 accuracy 0.9'."""
    return [float(word) for word in line.split()[1::2]]


def run_changed(name, level, capsys, monkeypatch):
    """Run a script with one changed import; return its numbers."""
    reset()
    source = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    changed = source.replace("from apex", "from gradscale.apex")
    assert changed != source
    argv = [name, "--opt-level", level, "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", argv)
    exec(compile(changed, name, "exec"), {"__name__": "__main__"})
    reset()
    return result_of(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def unmodified(tmp_path_factory):
    """Return the numbers of each run of the unmodified scripts, and the run file."""
    folder = tmp_path_factory.mktemp("scripts")
    # The unrelated package of the index, which has no amp.
    (folder / "apex").mkdir()
    (folder / "apex" / "__init__.py").write_text("")
    driver = folder / "driver.py"
    driver.write_text(
        "import contextlib, io, json, runpy, sys\n"
        "results = {}\n"
        f"for name, level in {RUNS!r}:\n"
        f"    path = {str(SCRIPTS)!r} + '/' + name + '.py'\n"
        "    sys.argv = [path, '--opt-level', level, '--device', 'cpu']\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out):\n"
        "        runpy.run_path(path, run_name='__main__')\n"
        "    results[f'{name} {level}'] = out.getvalue().splitlines()[-1]\n"
        "    from apex.amp import _amp_state\n"
        "    if _amp_state.handle: _amp_state.handle._deactivate()\n"
        "print(json.dumps(results))\n"
    )
    command = ["-m", "gradscale", "run", "--as-apex", "-o", "run.gs", str(driver)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout.splitlines()[-1])
    return {key: result_of(line) for key, line in lines.items()}, folder / "run.gs"


@pytest.mark.parametrize(("name", "level"), RUNS)
def test_a_script_converges_as_its_fp32_run(
    name, level, unmodified, capsys, monkeypatch
):
    _, tolerance, (low, high) = CASES[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        single = run_changed(name, "O0", capsys, monkeypatch)
        mixed = run_changed(name, level, capsys, monkeypatch)
    finally:
        torch.set_num_threads(threads)
    assert low < single[0] < high
    assert abs(mixed[0] - single[0]) < tolerance
    assert unmodified[0][f"{name} {level}"] == mixed


def test_a_resumed_script_has_the_same_loss(unmodified):
    straight, resumed = unmodified[0]["resume O2"]
    assert straight == resumed


def test_the_unmodified_scripts_are_recorded(unmodified):
    with open_run(unmodified[1]) as run:
        rows = list(run.steps())
        # Steps of imagenet twice, three losses of the GAN, clipping, accumulation, and
        # the three halves of resume.
        assert len(rows) == 2 * 60 + 3 * 250 + 80 + 60 + 90
        # Each dynamic scale starts at 2^16.
        assert rows[0].scale == 2.0**16
