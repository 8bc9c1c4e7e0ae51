"""An exception that ended a thread, and the wait of the main thread that then failed."""

from __future__ import annotations

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.hangs.explain import HangFinding, name_dead_thread
from holdfast._diagnose.verdict import Cause, Sure
from tests.unit.why_evidence import NOW, raised

GET = ["/usr/lib/python3.11/queue.py", 179, "get"]
MAIN = ["/w/train.py", 25, "<module>"]
THREAD = {
    **{"thread": "producer", "time": NOW - 6, "type": "ValueError", "chain": []},
    "message": "could not convert string to float: '0,5'",
    "frames": [["/usr/lib/python3.11/threading.py", 982, "run"], ["/w/train.py", 11, "decode"]],
}


@pytest.mark.parametrize(
    ("kind", "message", "frames"),
    [
        ("Empty", "", [MAIN, GET]),
        ("Full", "", [MAIN, GET]),
        ("BrokenBarrierError", "", [MAIN, ["/usr/lib/python3.11/threading.py", 700, "wait"]]),
        ("TimeoutError", "", [MAIN, ["/usr/lib/python3.11/concurrent/futures/_base.py", 4, "get"]]),
        ("TimeoutError", "no batch for 60 s", [MAIN]),
        ("EOFError", "", [MAIN, ["/usr/lib/python3.11/multiprocessing/connection.py", 3, "_recv"]]),
    ],
)
def test_the_exception_of_a_thread_is_told_where_the_main_thread_waited_in_vain(
    kind, message, frames
):
    verdict = judge_strictly(raised(kind, message, frames=frames, threads=[THREAD]))
    assert (verdict.cause, verdict.sure) == (Cause.PYTHON_EXCEPTION, Sure.LIKELY), verdict
    assert "ValueError: could not convert" in verdict.sentence
    assert "(in thread producer)" in verdict.sentence
    assert "(in step 42)" in verdict.sentence
    assert "at /w/train.py:11 in decode" in verdict.evidence
    assert any(f"then its main thread raised {kind}" in line for line in verdict.evidence)
    assert any("train.py:25" in line for line in verdict.evidence)


@pytest.mark.parametrize(
    ("kind", "message", "frames"),
    [
        ("KeyError", "'loss'", [MAIN]),
        ("TimeoutError", "timed out", [MAIN, ["/usr/lib/python3.11/socket.py", 700, "recv_into"]]),
        ("TimeoutError", "[Errno 110] Connection timed out", [MAIN]),
        ("BrokenPipeError", "[Errno 32] Broken pipe", [MAIN]),
        ("EOFError", "Ran out of input", [MAIN]),
    ],
)
def test_an_exception_of_its_own_is_not_laid_to_a_thread(kind, message, frames):
    verdict = judge_strictly(raised(kind, message, frames=frames, threads=[THREAD]))
    assert kind in verdict.sentence, verdict
    assert "ValueError" not in verdict.sentence


def test_the_thread_that_died_last_is_the_one_that_was_waited_for():
    logger = {**THREAD, "thread": "logger", "message": "no such metric", "time": NOW - 900}
    verdict = judge_strictly(raised("Empty", "", frames=[MAIN, GET], threads=[logger, THREAD]))
    assert "thread producer" in verdict.sentence


def test_what_a_thread_ran_out_of_is_the_cause():
    full = {**THREAD, "type": "OSError", "message": "[Errno 28] No space left on device"}
    verdict = judge_strictly(raised("Empty", "", frames=[MAIN, GET], threads=[full]))
    assert (verdict.cause, verdict.sure) == (Cause.DISK_FULL, Sure.LIKELY), verdict


def test_a_child_that_was_killed_is_to_blame_for_an_empty_queue():
    workers = [{"pid": 99, "alive": False, "exitcode": -11}]
    verdict = judge_strictly(
        raised("Empty", "", frames=[MAIN, GET], threads=[THREAD], workers=workers)
    )
    assert verdict.cause is Cause.SEGFAULT, verdict
    assert "99" in verdict.sentence


def test_a_child_that_left_with_an_error_is_told_with_an_empty_queue():
    workers = [{"pid": 99, "alive": False, "exitcode": 1}, {"pid": 98, "alive": True}]
    verdict = judge_strictly(raised("Empty", "", frames=[MAIN, GET], workers=workers))
    assert (verdict.cause, verdict.sure) == (Cause.PYTHON_EXCEPTION, Sure.LIKELY), verdict
    assert "a child process of it had failed before (pid 99: status 1)" in verdict.sentence


def test_a_wait_for_a_thread_that_is_in_the_journal_names_what_ended_it():
    found = HangFinding(Cause.HANG_LOCK, "It waits for room in a queue.", Sure.CERTAIN)
    event = {**THREAD, "event": "thread-died"}
    name_dead_thread(found, [], [{"event": "start"}, event])
    assert found.sure is Sure.LIKELY
    assert "ValueError: could not convert" in found.sentence
    assert found.advice[0].startswith("Look at /w/train.py:11 in decode")
    computing = HangFinding(Cause.HANG_COMPUTING, "It computes.", Sure.LIKELY)
    name_dead_thread(computing, [], [event])
    assert "ValueError" not in computing.sentence
