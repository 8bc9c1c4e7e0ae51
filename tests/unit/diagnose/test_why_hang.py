"""From what the processes did to one cause and one sentence, that names the line and the rank."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import Evidence, RankEvidence
from holdfast._diagnose.hangs.explain import explain, explain_strictly
from holdfast._diagnose.texts.signs import read_signs
from holdfast._diagnose.verdict import Cause, Restart, Sure
from holdfast._environment.processes import inspect, tree
from holdfast._supervise import silence
from tests.unit.diagnose.test_why_judge_any import anything
from tests.unit.hang_looks import (
    EVENT,
    GET,
    IDLE_LOADER_WORKER,
    IDLE_POOL_WORKER,
    LOADER,
    LOADER_WORKER,
    POOL_WORKER,
    alone,
    collective,
    look,
    process,
    ranks,
    thread,
)
from tests.unit.why_evidence import NOW, counters, died, raised

Record = dict[str, Any]
MAIN_AT_POOL = thread(*GET, "train.py:7")

TABLE: dict[str, tuple[Record, Cause, tuple[str, ...]]] = {
    "two locks in two orders": (
        look(
            process(100, thread("train.py:10 two"), thread("train.py:6 one", name="Thread-1 (one)"))
        ),
        Cause.HANG_LOCK,
        ("train.py:10 in two()", "thread Thread-1 (one)", "train.py:6 in one()", "same order"),
    ),
    "a lock whose holder sleeps": (
        look(
            process(
                100,
                thread("train.py:10 two"),
                thread("log.py:6 keep", name="writer", wchan="hrtimer_nanosleep"),
            )
        ),
        Cause.HANG_LOCK,
        ("while thread writer sleeps at log.py:6 in keep()",),
    ),
    "a queue that nobody fills": (
        alone(EVENT[0], "py/queue.py:171 Queue.get", "train.py:3 train"),
        Cause.HANG_LOCK,
        ("an item of a queue at train.py:3 in train()", "no other thread"),
    ),
    "a call that holds the interpreter": (
        look(process(100, thread("train.py:4 match", owns_gil=True, state="R")), pulse_age=33.0),
        Cause.HANG_GIL,
        ("train.py:4 in match()", "holds the interpreter", "SIGKILL"),
    ),
    "another thread holds the interpreter": (
        look(
            process(
                100,
                thread("train.py:4 step"),
                thread("tok.py:9 encode", name="tokenizer", owns_gil=True),
            ),
            pulse_age=33.0,
        ),
        Cause.HANG_GIL,
        ("it waits for its thread tokenizer, which is in a call that holds the interpreter",),
    ),
    "the interpreter is held, and only faulthandler could tell the stack": (
        look(process(100, thread("train.py:4 match", owns_gil=None)), pulse_age=33.0),
        Cause.HANG_GIL,
        ("train.py:4 in match()",),
    ),
    "a call of C": (
        alone("train.py:4 wait", wchan="hrtimer_nanosleep"),
        Cause.HANG_CALL,
        ("sleeps at train.py:4 in wait()",),
    ),
    "computing at one line": (
        look(process(100, thread("train.py:4 fit", state="R", cpu=1.0), state="R", cpu=1.0)),
        Cause.HANG_COMPUTING,
        ("computes at train.py:4 in fit() with 1.0 cores",),
    ),
    "a pool's worker is stuck": (
        look(
            process(100, MAIN_AT_POOL),
            process(101, thread("work.py:3 work", *POOL_WORKER)),
            process(102, thread(*IDLE_POOL_WORKER, wchan="anon_pipe_read")),
        ),
        Cause.HANG_POOL,
        ("train.py:7", "worker (pid 101) waits for a lock", "work.py:3 in work()"),
    ),
    "a pool's worker has died": (
        look(process(100, MAIN_AT_POOL), process(102, thread(*IDLE_POOL_WORKER))),
        Cause.HANG_POOL,
        ("train.py:7", "none of its 1 worker is at work", "died"),
    ),
    "a task that waits for its own pool of threads": (
        look(
            process(
                100,
                thread(EVENT[0], "py/concurrent/futures/_base.py:451 Future.result", "a.py:5"),
                thread(
                    EVENT[0],
                    "py/concurrent/futures/_base.py:451 Future.result",
                    "a.py:4 task",
                    "py/concurrent/futures/thread.py:58 _WorkItem.run",
                    "py/concurrent/futures/thread.py:83 _worker",
                    name="pool_0",
                ),
            )
        ),
        Cause.HANG_POOL,
        ("a.py:5", "its thread pool_0", "a.py:4 in task()", "takes a place itself"),
    ),
    "a deadlock in a worker of the loader": (
        look(
            process(100, thread(*LOADER, wchan="poll_schedule_timeout")),
            process(8211, thread("data.py:7 D.__getitem__", *LOADER_WORKER)),
            process(8212, thread(*IDLE_LOADER_WORKER, wchan="poll_schedule_timeout")),
        ),
        Cause.HANG_LOADER,
        ("train.py:30 in train()", "worker (pid 8211)", "data.py:7 in __getitem__()", "spawn"),
    ),
    "a worker of the loader reads from a dead server": (
        look(
            process(100, thread(*LOADER)),
            process(
                8211,
                thread("data.py:9 read", *LOADER_WORKER, wchan="nfs_wait_bit", state="D"),
                state="D",
            ),
        ),
        Cause.HANG_DISK,
        ("worker (pid 8211) waits for an NFS server at data.py:9 in read()",),
    ),
    "a slow loader": (
        look(
            process(100, thread(*LOADER)),
            process(8211, thread("data.py:9 decode", *LOADER_WORKER, moved=True), cpu=1.0),
        ),
        Cause.SLOW,
        ("data.py:9 in decode()", "More workers"),
    ),
    "a dead file system": (
        look(
            process(100, thread("a.py:2 load", wchan="request_wait_answer", state="D"), state="D")
        ),
        Cause.HANG_DISK,
        ("waits for a FUSE file system at a.py:2 in load()", "survive even SIGKILL"),
    ),
    "a file that does not come, without a word of the kernel": (
        alone("a.py:2 load", wchan=None, call="read", call_path="/mnt/a.bin"),
        Cause.HANG_DISK,
        ("/mnt/a.bin", "a.py:2 in load()"),
    ),
    "pdb": (
        {
            **alone("py/pdb.py:297 Pdb._cmdloop", "py/bdb.py:90 Bdb.trace_dispatch", "a.py:4 f"),
            "paused": "pdb",
        },
        Cause.DEBUGGER,
        ("It is held by pdb at a.py:4 in f()",),
    ),
    "gdb": (
        look(process(100, thread("a.py:4 f"), tracer=7, tracer_name="gdb", state="t")),
        Cause.DEBUGGER,
        ("traced by gdb (pid 7)",),
    ),
    "SIGSTOP": (
        look(process(100, thread("a.py:4 f"), state="T"), pulse_age=30.0),
        Cause.STOPPED,
        ("It is stopped", "kill -CONT 100"),
    ),
    "SIGSTOP of a worker": (
        look(
            process(100, thread(*LOADER)),
            process(8211, thread("d.py:1 f", *LOADER_WORKER), state="T"),
        ),
        Cause.STOPPED,
        ("its worker (pid 8211) is stopped", "kill -CONT 8211"),
    ),
    "a frozen cgroup": (
        look(process(100, thread("a.py:4 f"), state="D", frozen=True), pulse_age=30.0),
        Cause.FROZEN,
        ("frozen", "Thaw"),
    ),
    "swapping": (
        look(
            process(
                100,
                thread("a.py:4 f", state="D", wchan="folio_wait_bit_common"),
                major_faults=900,
                swap=3 * 10**9,
                state="D",
            )
        ),
        Cause.SLOW,
        ("swapping", "3.0 GB", "1800 pages a second"),
    ),
    "a process that it waits for": (
        look(
            process(
                100,
                thread("py/subprocess.py:550 run", "a.py:4 prepare", wchan="do_wait"),
            ),
            process(101, command="wget http://x"),
        ),
        Cause.HANG_CALL,
        ("a.py:4 in prepare()", "(pid 101) (wget http://x) is in state S"),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_holds_one_process(name):
    record, cause, said = TABLE[name]
    found = explain_strictly(record)
    assert found.cause is cause, found
    for each in said:
        assert each in found.sentence, found.sentence
    held = (Cause.DEBUGGER, Cause.STOPPED, Cause.FROZEN)
    assert found.sentence.startswith("No step for 34 s: ") is (cause not in held)
    assert found.sentence.endswith(".")
    assert "\n" not in found.sentence
    assert found.evidence
    assert found.advice
    assert found.rank is None


def test_the_interpreter_is_not_held_while_its_thread_beats():
    record = look(process(100, thread("train.py:4 f", owns_gil=True, state="R", cpu=1.0), cpu=1.0))
    assert explain_strictly(record).cause is Cause.HANG_COMPUTING


# -- after the end ------------------------------------------------------------------------


HANG = {
    **{"attempt": 1, "began": NOW, "found": NOW + 21, "ended": None, "patience": 20.0},
    **{"how": "learned", "looks": [TABLE["two locks in two orders"][0]], "missing": []},
    **{"cause": "hang-lock", "sentence": "It hung."},
}


def hung(evidence: Evidence, **more: Any) -> Evidence:
    evidence.hang = {**HANG, **more}
    return evidence


def test_a_run_that_was_ended_since_it_hung_is_explained_by_the_hang():
    evidence = Evidence(
        kind="run",
        ranks=[RankEvidence()],
        exit={"status": 77, "how": "hung", "step": 41, "durable_step": 40},
    )
    verdict = judge_strictly(hung(evidence))
    assert (verdict.cause, verdict.restart) == (Cause.HANG_LOCK, Restart.BACKOFF)
    assert verdict.sentence == "It hung."  # as told then: its lines may say something else now
    assert any("the limit was 20 s (learned" in line for line in verdict.evidence)
    assert any("goes on at step 40" in line for line in verdict.advice)


def test_one_that_hung_and_was_killed_by_somebody_is_too_but_not_one_of_an_oom():
    assert judge_strictly(hung(died(-9))).cause is Cause.HANG_LOCK
    oom = died(-9, counters=counters(1, hits=2))
    assert judge_strictly(hung(oom)).cause is Cause.OOM_CGROUP


def test_a_hang_that_was_over_explains_nothing():
    assert judge_strictly(hung(died(-9), ended=NOW + 60)).cause is Cause.KILLED


def test_what_ended_it_otherwise_stays_the_cause_and_the_hang_is_told():
    verdict = judge_strictly(hung(raised("ValueError", "bad")))
    assert verdict.cause is Cause.PYTHON_EXCEPTION
    assert "it hung then: It hung." in verdict.evidence


def test_a_command_without_a_run_that_its_leader_has_ended():
    told = {"ended": None, "by": "leader", "cause": "hang-call", "sentence": "No output."}
    led = {"status": -9, "hang": {**told, "evidence": ["quiet"], "advice": ["look"]}}
    verdict = judge_strictly(Evidence(kind="led", led=led))
    assert (verdict.cause, verdict.sentence) == (Cause.HANG_CALL, "No output.")
    assert "quiet" in verdict.evidence
    assert verdict.restart is Restart.BACKOFF


def test_a_thread_that_an_exception_ended_is_told_where_the_main_thread_then_waits(tmp_path):
    died = (
        "Exception in thread Thread-1 (reader):\nTraceback (most recent call last):\n"
        '  File "/home/a/train.py", line 7, in reader\n    q.put(record["x"])\nKeyError: \'x\'\n'
    )
    waits = alone(EVENT[0], "py/queue.py:171 Queue.get", "train.py:10")
    hang = {"by": "leader", "began": NOW - 20, "ended": None, "looks": [waits]}
    evidence = Evidence(
        **{"kind": "led", "led": {"status": -15}, "hang": hang},
        **{"signs": read_signs(died), "output": died},
    )
    verdict = judge_strictly(evidence)
    assert (verdict.cause, verdict.sure) == (Cause.HANG_LOCK, Sure.LIKELY)
    assert "KeyError: 'x' (in thread Thread-1 (reader)) was raised at" in verdict.sentence
    assert verdict.advice[0] == "Look at /home/a/train.py:7 in reader first."
    evidence = replace(evidence, is_live=True, led={}, look={"looks": [waits], "still_seconds": 3})
    assert "KeyError: 'x' (in thread" in judge_strictly(evidence).sentence
    (tmp_path / "output.log").write_text(died)  # what is told meanwhile
    assert explain(hang, tmp_path / "output.log").sentence == verdict.sentence


def test_a_command_that_starts_ranks_is_judged_by_them(monkeypatch):
    launcher = process(9, thread("/usr/bin/torchrun:8", wchan="hrtimer_nanosleep"))
    ranks = [
        process(10, thread(*collective("all_reduce", 3)), parent=9),
        process(11, thread("train.py:6 read", wchan="hrtimer_nanosleep"), parent=9),
        process(12, thread("py/queue.py:171 Queue.get"), parent=11, name="a worker of rank 1"),
    ]
    seen = {"pid": 9, "host": "node3", "processes": [launcher, *ranks]}
    monkeypatch.setattr(inspect, "Looker", lambda pid: Mock(look=lambda: seen))
    monkeypatch.setattr(tree, "ranks_below", lambda pid: {0: 10, 1: 11})
    with tempfile.TemporaryFile() as file:
        silence.main(json.dumps({"pid": 9, "file": file.fileno(), "output": None}))
        file.seek(0)
        found = json.load(file)
    assert found["cause"] == "hang-rank"
    assert "ank 1 on node3 sleeps at train.py:6 in read()" in found["sentence"]
    assert [(look["rank"], look["pid"]) for look in found["looks"]] == [(0, 10), (1, 11)]
    assert [each["pid"] for each in found["looks"][1]["processes"]] == [11, 12]
    assert inspect.by_rank(seen, {}) == [seen]
    assert inspect.by_rank(seen, {0: 77}) == [seen]  # which has ended


def test_whatever_a_look_holds_there_is_an_answer():
    dice = random.Random(8)

    def spoil(value: Any) -> Any:
        if dice.random() < 0.03:
            return anything(dice, 1)
        if isinstance(value, dict):
            return {key: spoil(each) for key, each in value.items() if dice.random() > 0.03}
        return [spoil(each) for each in value] if isinstance(value, list) else value

    whole = [record for record, _, _ in TABLE.values()]
    for _ in range(300):
        record = spoil(ranks(*dice.sample(whole, 2)))
        found = explain_strictly(record if isinstance(record, dict) else {"looks": [record]})
        assert found.sentence.endswith(".")


QUEUE = (
    "py/multiprocessing/connection.py:395 Connection._recv",
    "py/multiprocessing/queues.py:103 Queue.get",
)


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (9, "its process (pid 787) was killed by SIGKILL"),
        (256, "its process (pid 787) has ended with status 1"),
        (None, "its process (pid 787) has ended"),
    ],
)
def test_a_wait_for_a_process_names_the_child_that_has_died(ended, told):
    main = thread(*QUEUE, "train.py:22 step", wchan="anon_pipe_read")
    left = process(786, state="Z", ended=0)  # it had done its work
    found = explain_strictly(look(process(100, main), left, process(787, state="Z", ended=ended)))
    assert found.cause is Cause.HANG_LOCK
    assert found.sure is Sure.LIKELY
    assert f"a queue between processes at train.py:22 in step(), and {told}. See" in found.sentence
    assert "thread" not in found.sentence


def test_without_a_child_the_process_that_was_to_end_the_wait_is_missing():
    main = thread(*QUEUE, "train.py:22 step", wchan="anon_pipe_read")
    found = explain_strictly(look(process(100, main)))
    assert "The process that was to end that wait has ended or never began" in found.sentence
