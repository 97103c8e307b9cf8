"""A rank that is killed: the others stop with an error, and the run can be resumed."""

import json
import signal
import time

import pytest

from tests.torch.parallel.killed_run import FATAL, PATIENCE, STEPS
from tests.torch.parallel.launch import exit_codes


def run(folder, moment):
    """Run both ranks; return their exit codes, what rank 0 said, and the seconds."""
    began = time.monotonic()
    codes = exit_codes("tests.torch.parallel.killed_run.main", 2, folder, moment)
    seconds = time.monotonic() - began
    return codes, (folder / f"{moment}-0.txt").read_text(), seconds


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run it three times: killed twice, in different moments, and then to the end."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "checkpoints").mkdir()
    seen = {}
    for moment in ("step", "save", "never"):
        ended = run(folder, moment)
        names = sorted(one.name for one in (folder / "checkpoints").iterdir())
        seen[moment] = (*ended, names)
    return folder, seen


@pytest.mark.parametrize("moment", ["step", "save"])
def test_the_rank_that_is_left_fails_with_the_error_of_the_collective(runs, moment):
    codes, said, seconds, _ = runs[1][moment]
    # Gloo's threads may abort a process that ends, as in test_examples.
    assert codes[0] in (1, -signal.SIGABRT)
    assert codes[1] == -signal.SIGKILL
    assert "Connection closed by peer" in said or "Connection reset by peer" in said
    # The four steps before it take most of it where other tests run too.
    assert seconds < 60 + PATIENCE.total_seconds()


@pytest.mark.parametrize("moment", ["step", "save"])
def test_no_checkpoint_has_its_name_before_it_is_whole(runs, moment):
    *_, names = runs[1][moment]
    whole = [name for name in names if not name.endswith(".part")]
    assert whole == [str(step) for step in range(1, FATAL + 1)]


def test_a_fresh_run_resumes_and_ends_as_one_that_was_not_stopped(runs):
    folder, _ = runs
    for rank in range(2):
        facts = json.loads((folder / f"{rank}.json").read_text())
        assert facts["begun"] == FATAL
        resumed, whole = facts["scales"]
        assert len(resumed) == STEPS - FATAL
        assert resumed == whole
        assert facts["weights"][0] == facts["weights"][1]
