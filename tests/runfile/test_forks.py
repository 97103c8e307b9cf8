"""A forked process never touches the file; one that is spawned neither."""

import multiprocessing
import os
import sqlite3
import sys
import threading
import time
import warnings

import pytest

from gradscale import GradscaleWarning
from gradscale.runfile import RunWriter, open_run
from tests.runfile.test_writer import python, steps_of

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="there is no fork"),
    # Python 3.12 says it of every fork in a process with threads.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def in_child(work):
    """Return what a forked child returns, as text; it leaves without clean-up."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sending, repr(work()).encode())
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as stream:
        said = stream.read().decode()
    os.waitpid(child, 0)
    return said


def test_a_forked_child_records_nothing_and_says_so_once(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:

        def record():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(1, 10):
                    writer.step(step, 65536.0, True, "GS000")
                writer.event("GS201")
                writer.flush()
                writer.close()
            return [warning.message.code for warning in caught], writer.recording

        assert in_child(record) == "(['GS308'], False)"
        writer.step(100, 65536.0, True, "GS000")
    assert steps_of(tmp_path / "run.gs") == [100]


def test_a_child_that_does_not_record_says_nothing(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:

        def leave():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                writer.close()
                writer._close_at_exit()
            return len(caught)

        assert in_child(leave) == "0"


@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_a_worker_that_is_given_the_writer_does_not_write(tmp_path, way):
    with RunWriter(tmp_path / "run.gs") as writer:
        with multiprocessing.get_context(way).Pool(1) as pool:
            assert pool.apply(record_in_worker, (writer,)) is False
        writer.step(100, 65536.0, True, "GS000")
    assert steps_of(tmp_path / "run.gs") == [100]


def record_in_worker(writer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradscaleWarning)
        writer.step(1, 65536.0, True, "GS000")
        writer.flush()
        writer.close()
    return writer.recording


FORKING = """
    import os, sys
    from gradscale.runfile import RunWriter
    from gradscale.runfile import committer as thread
    thread.COMMIT_EVERY = 0.0
    writer = RunWriter(sys.argv[1], journal=sys.argv[2])
    step = 0
    for _ in range(20):
        for _ in range(500):
            step += 1
            writer.step(step, 65536.0, True, "GS000")
        child = os.fork()
        if child == 0:
            # With all the clean-up of an ordinary exit.
            sys.exit(0)
        os.waitpid(child, 0)
"""


@pytest.mark.parametrize("journal", ["wal", "truncate"])
def test_forks_during_commits_leave_the_file_whole(tmp_path, journal):
    done = python(FORKING, tmp_path / "run.gs", journal)
    assert (done.returncode, done.stderr) == (0, "")
    with open_run(tmp_path / "run.gs") as run:
        run.check()
        assert [row.step for row in run.steps()] == list(range(1, 10_001))


def test_a_fork_waits_for_the_end_of_a_transaction(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.flush()
        seen, begun = [], threading.Event()
        commit = writer._committer._commit

        def slow_commit(connection, *rest):
            begun.set()
            done = commit(connection, *rest)
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(0.3)
            seen.append("ended")
            connection.execute("COMMIT")
            return done

        writer._committer._commit = slow_commit
        writer.step(1, 65536.0, True, "GS000")
        writer._committer.wake()
        # The lock alone may still be that of the transaction before.
        assert begun.wait(60.0)
        assert in_child(lambda: seen) == "['ended']"


def test_a_child_may_record_to_a_file_of_its_own(tmp_path):
    with RunWriter(tmp_path / "run.gs"):
        context = multiprocessing.get_context("fork")
        worker = context.Process(target=leave_open, args=(tmp_path / "child.gs",))
        worker.start()
        worker.join(30)
    assert worker.exitcode == 0
    # Its last rows are there although multiprocessing leaves without atexit.
    assert steps_of(tmp_path / "child.gs") == [7]
    with open_run(tmp_path / "child.gs") as run:
        assert run.meta["end"]["state"] == "exit"


def leave_open(path):
    writer = RunWriter(path)
    writer.step(7, 65536.0, True, "GS000")


def test_a_reader_of_the_parent_still_works_after_a_fork(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer, open_run(writer.path) as run:
        writer.step(1, 65536.0, True, "GS000")
        writer.flush()
        assert in_child(lambda: sqlite3.sqlite_version) != ""
        assert run.last_step == 1
