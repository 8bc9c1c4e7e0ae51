"""What `holdfast run` saw of a command: whose death it was, in which order, and by which limit."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.verdict import Cause, Sure
from holdfast._environment.processes.memory_sample import mounted_rooms, read_limits
from holdfast._supervise.watch import CommandWatch
from tests.unit.why_evidence import CALM, GROWN, NOW, counters, died, printed, raised, sample

PEER = (
    "[rank0]: Traceback (most recent call last):\n"
    '[rank0]:   File "/w/a.py", line 3, in <module>\n'
    "[rank0]: RuntimeError: [/p/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[10.0.0.3]:5012\n"
)
WAITED = PEER.replace(
    "Connection closed by peer [10.0.0.3]:5012",
    "Timed out waiting 9000ms for recv operation to complete",
)


def process(rank: int, status: int, ago: float, **more):
    return {"pid": 90 + rank, "rank": rank, "status": status, "ended": NOW - ago, **more}


def test_the_counters_of_the_rank_s_own_death_tell_the_oom_killer():
    """The leader's last look before the end of torchrun came long after the kill."""
    own = {"counters": counters(1, hits=1)}
    led = printed(
        PEER, 1, counters=counters(0), memory=GROWN,
        processes=[process(1, -9, 40, **own), process(0, 1, 39)],
    )  # fmt: skip
    verdict = judge_strictly(led)
    assert (verdict.cause, verdict.rank) == (Cause.OOM_CGROUP, 1), verdict
    by_person = printed(
        PEER, 1, counters=counters(0), memory=CALM,
        processes=[process(1, -9, 40, counters=counters(0)), process(0, 1, 39)],
    )  # fmt: skip
    assert judge_strictly(by_person).cause is Cause.KILLED


def test_a_record_without_them_is_judged_by_those_of_the_whole_life():
    known = counters(1, hits=1)
    known["before"] = known["death"]  # looked at again between the kill and the end of all
    led = printed(
        PEER, 1, counters=known, memory=GROWN,
        processes=[process(1, -9, 40), process(0, 1, 39)],
    )  # fmt: skip
    assert judge_strictly(led).cause is Cause.OOM_CGROUP


def test_each_failed_descendant_has_the_counters_of_its_end():
    watch = CommandWatch(os.getpid(), os.getpid(), lambda pid: False)
    watch.poll(is_due=True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    watch.poll(is_due=True)
    child.kill()
    child.wait()
    watch.poll(is_due=True)
    seen = watch.end(1)
    (ended,) = [each for each in seen["processes"] if each["pid"] == child.pid]
    assert ended["status"] == -signal.SIGKILL
    assert {"start", "before", "death"} <= set(ended["counters"])


@pytest.mark.parametrize("status", [-15, -9])
def test_who_waited_in_vain_ended_first_and_its_launcher_then_ended_the_other(status):
    led = printed(WAITED, 1, processes=[process(0, 1, 9), process(1, status, 4)])
    verdict = judge_strictly(led)
    assert (verdict.cause, verdict.rank) == (Cause.COLLECTIVE_TIMEOUT, 1), verdict
    assert verdict.sure is Sure.LIKELY
    # The other way round somebody has ended it, and the first lost it.
    led = printed(PEER, 1, processes=[process(1, status, 9), process(0, 1, 8)])
    assert judge_strictly(led).cause in (Cause.TERMINATED, Cause.KILLED)


def test_a_rank_with_fewer_batches_is_named():
    led = printed(PEER, 1, processes=[process(1, 0, 9), process(0, 1, 8)])
    verdict = judge_strictly(led)
    assert (verdict.cause, verdict.rank) == (Cause.PEER_LOST, 1), verdict
    assert "fewer batches" in verdict.sentence


@pytest.mark.parametrize(
    ("kind", "message", "cause"),
    [
        ("SettingsError", "keep_last: No space left on device is no number", Cause.CONFIGURATION),
        ("StateMismatch", "CUDA out of memory is no name of a state", Cause.CONFIGURATION),
        ("RanksError", "MASTER_PORT is 29500, and that port is taken by x", Cause.RENDEZVOUS),
    ],
)
def test_errors_of_holdfast_are_known_by_their_type(kind, message, cause):
    of_run = raised(kind, message, qualified=f"holdfast.{kind}", is_configuration=True)
    of_script = printed(
        'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n'
        f"holdfast.{kind}: {message}\n",
        1,
    )
    for evidence in (of_run, of_script):
        verdict = judge_strictly(evidence)
        assert (verdict.cause, verdict.sure) == (cause, Sure.CERTAIN), verdict


def test_a_class_of_the_user_s_with_such_a_name_is_the_user_s():
    fault = raised("StateError", "No space left on device", qualified="lib.StateError")
    assert judge_strictly(fault).cause is Cause.DISK_FULL


def test_a_kill_at_the_hard_limit_of_processor_time_is_that():
    limited = {"cpu_limit": 30, "cpu_seconds": 29.1}
    evidence = died(-9, counters=counters(0), memory=[sample(0.5, 1e9, **limited)])
    verdict = judge_strictly(evidence)
    assert verdict.cause is Cause.TIME_LIMIT, verdict
    assert "ulimit -t" in verdict.sentence
    far = {"cpu_limit": 3000, "cpu_seconds": 29.1}
    evidence = died(-9, counters=counters(0), memory=[sample(0.5, 1e9, **far)])
    assert judge_strictly(evidence).cause is Cause.KILLED


def test_memory_that_a_limit_of_the_address_space_refused_is_told():
    evidence = raised("MemoryError", "", memory=sample(0, 1e9, space_limit=4 * 10**9))
    verdict = judge_strictly(evidence)
    assert "ulimit -v" in verdict.sentence, verdict
    assert any("ulimit -v unlimited" in each for each in verdict.advice)
    assert not any("more memory" in each for each in verdict.advice)  # of the machine


def test_limits_are_read_of_the_process_itself():
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (77, 77))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = read_limits([child.pid])
    finally:
        child.communicate()
    assert (found["cpu_limit"], found["space_limit"]) == (77, 1 << 40)
    assert 0 <= found["cpu_seconds"] < 77
    if resource.getrlimit(resource.RLIMIT_CPU)[1] == resource.RLIM_INFINITY:
        assert "cpu_limit" not in read_limits([os.getpid()])


@pytest.mark.parametrize(
    ("message", "cause", "sure"),
    [
        ("DataLoader worker (pid(s) 99) exited unexpectedly", Cause.WORKER_DIED, Sure.CERTAIN),
        (
            "DataLoader worker (pid 99) is killed by signal: Killed.",
            Cause.WORKER_DIED,
            Sure.CERTAIN,
        ),
        (
            "DataLoader worker (pid 9) is killed by signal: Terminated.",
            Cause.WORKER_DIED,
            Sure.LIKELY,
        ),
    ],
)
def test_a_worker_that_died_is_certain_unless_it_was_ended_with_the_job(message, cause, sure):
    place = '  File "a.py", line 3, in <module>'
    text = f"Traceback (most recent call last):\n{place}\nRuntimeError: {message}\n"
    verdict = judge_strictly(printed(text, 1))
    assert (verdict.cause, verdict.sure) == (cause, sure), verdict


def test_an_interrupt_is_one_by_whatever_it_was_sent():
    sent = [{"name": "SIGINT", "pid": 7, "by": "sh", "uid": 0, "time": NOW - 1}]
    for status, signals in ((-2, []), (-2, sent), (130, sent)):
        verdict = judge_strictly(printed("step 3\n", status, signals=signals))
        assert verdict.cause is Cause.ASKED, verdict
        assert "was interrupted: " in verdict.sentence
        assert ("`sh`" in verdict.sentence) == bool(signals)


def test_the_disk_that_is_full_is_named_where_the_error_does_not():
    text = (
        'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n'
        "    torch.save(model, path)\n"
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598\n"
    )
    full = {"path": "/scratch", "free": 0, "total": 8 << 20, "free_inodes": 9}
    led = printed(text, 1)
    led.disks = [{**full, "path": "/home", "free": 8 << 20}, full]
    verdict = judge_strictly(led)
    assert verdict.sentence.startswith("A disk was full (/scratch): ")
    assert any(said.startswith("on this machine, /scratch has 0 B ") for said in verdict.evidence)
    led.disks.append({**full, "path": "/tmp"})  # which of the two was written to is not known
    assert "/scratch" not in judge_strictly(led).sentence


def test_the_file_systems_of_this_machine_are_looked_at():
    found = mounted_rooms()
    assert all(os.path.isdir(each["path"]) and each["total"] for each in found)  # noqa: PTH112
    assert len({each["path"] for each in found}) == len(found) > 0
