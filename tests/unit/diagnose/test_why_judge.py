"""From evidence to a verdict: what the system and other people do to a process."""

from __future__ import annotations

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import Evidence, RunFacts
from holdfast._diagnose.texts.signs import read_signs
from holdfast._diagnose.verdict import Cause, Restart, Sure, restart_after
from tests.unit.diagnose.test_why_judge_python import TABLE as PYTHON
from tests.unit.why_evidence import (
    CALM,
    GB,
    GROWN,
    NOW,
    TRACEBACK,
    check,
    counters,
    died,
    ended,
    printed,
    sample,
)

TABLE: dict[str, tuple[Evidence, Cause, Sure]] = {
    "oom of the cgroup": (
        died(-9, counters=counters(1, hits=2, machine=1), memory=GROWN),
        Cause.OOM_CGROUP,
        Sure.CERTAIN,
    ),
    "oom of the cgroup, and nothing of memory is known": (
        died(-9, counters=counters(1, hits=2)),
        Cause.OOM_CGROUP,
        Sure.CERTAIN,
    ),
    "oom counted, but the process had hardly used anything": (
        died(-9, counters=counters(1, hits=2), memory=CALM),
        Cause.OOM_CGROUP,
        Sure.LIKELY,
    ),
    "oom of a cgroup further up": (
        died(-9, counters=counters(1), memory=GROWN),
        Cause.OOM_CGROUP,
        Sure.LIKELY,
    ),
    "oom of a limit that cannot be seen from within a container": (
        died(-9, counters=counters(1), memory=[sample(0.2, GB, None)]),
        Cause.OOM_CGROUP,
        Sure.LIKELY,
    ),
    "oom of the machine": (
        died(-9, counters=counters(1), memory=[sample(0.2, GB, None, available=GB // 9)]),
        Cause.OOM_MACHINE,
        Sure.CERTAIN,
    ),
    "oom of the machine, and only its own counter is there": (
        died(-9, counters=counters(None, machine=1), memory=[sample(1, GB, None, available=GB)]),
        Cause.OOM_MACHINE,
        Sure.LIKELY,
    ),
    "no counter at all, but memory was full": (
        died(-9, memory=GROWN),
        Cause.OOM_CGROUP,
        Sure.LIKELY,
    ),
    "kill -9": (died(-9, counters=counters(0), memory=CALM), Cause.KILLED, Sure.BY_EXCLUSION),
    "kill -9 while another job of the machine was out of memory": (
        died(-9, counters=counters(0, machine=1), memory=CALM),
        Cause.KILLED,
        Sure.BY_EXCLUSION,
    ),
    "kill -9, and nothing was recorded": (died(-9), Cause.KILLED, Sure.UNKNOWN),
    "a shell's word for it": (printed("Killed\n", 137), Cause.KILLED, Sure.UNKNOWN),
    "a child was the victim, its parent died later": (
        died(
            -9,
            counters=counters(1, hits=1),
            memory=GROWN,
            children=[{"pid": 99, "comm": "pt_data_worker", "status": -9, "ended": NOW - 5}],
        ),
        Cause.OOM_WORKER,
        Sure.LIKELY,
    ),
    "killed after it was asked to stop": (died(-9, asked="SIGTERM"), Cause.ASKED, Sure.CERTAIN),
    "segfault": (died(-11), Cause.SEGFAULT, Sure.LIKELY),
    "abort": (died(-6), Cause.ABORT, Sure.LIKELY),
    "illegal instruction": (died(-4), Cause.ILLEGAL_INSTRUCTION, Sure.LIKELY),
    "bus error": (died(-7, memory=CALM), Cause.BUS_ERROR, Sure.LIKELY),
    "bus error with a full shm": (
        died(-7, memory=[sample(0.2, GB, shm=64 << 20, shm_free=0)]),
        Cause.SHM_FULL,
        Sure.LIKELY,
    ),
    "C++": (
        printed(
            "terminate called after throwing an instance of 'std::runtime_error'\n"
            "  what():  no luck\n",
            -6,
        ),
        Cause.CXX_EXCEPTION,
        Sure.LIKELY,
    ),
    "faulthandler's dump, and no status": (
        printed(
            "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call "
            'first):\n  File "x.py", line 3 in boom\n',
            None,
        ),
        Cause.SEGFAULT,
        Sure.LIKELY,
    ),
    "SIGTERM that a script answers in its own way": (
        printed("bye\n", 3, signals=[{"time": NOW - 1, "name": "SIGTERM", "pid": 1, "uid": 0}]),
        Cause.ASKED,
        Sure.LIKELY,
    ),
    "SIGTERM that nothing answers": (died(-15), Cause.TERMINATED, Sure.CERTAIN),
    "SIGHUP": (printed("", -1), Cause.TERMINATED, Sure.CERTAIN),
    "the status of a shell for SIGTERM": (printed("", 143), Cause.TERMINATED, Sure.LIKELY),
    "bad": (ended(65, "the loss is nan"), Cause.BAD_TRAINING, Sure.CERTAIN),
    "not durable": (ended(74, "SIGTERM"), Cause.NOT_DURABLE, Sure.CERTAIN),
    "idle": (ended(76, "the job's time limit"), Cause.NO_PROGRESS, Sure.CERTAIN),
    "asked": (ended(143, "SIGTERM"), Cause.ASKED, Sure.CERTAIN),
    "asked by a person": (ended(130, "holdfast stop (by a@b)"), Cause.ASKED, Sure.CERTAIN),
    "cancelled": (ended(143, "scancel"), Cause.ASKED, Sure.CERTAIN),
    "time limit": (ended(75, "the job's time limit"), Cause.TIME_LIMIT, Sure.CERTAIN),
    "preempted": (ended(75, "preempted by SLURM"), Cause.PREEMPTED, Sure.CERTAIN),
    "warned, without SLURM": (ended(75, "SIGUSR1"), Cause.PREEMPTED, Sure.CERTAIN),
    "Ctrl-C": (ended(130, "KeyboardInterrupt"), Cause.ASKED, Sure.CERTAIN),
    "finished": (
        ended(0, "closed", journal=[{"event": "finished", "step": 5, "total": 5}]),
        Cause.FINISHED,
        Sure.CERTAIN,
    ),
    "left early": (
        ended(0, "closed", journal=[{"event": "loop", "total": 100}]),
        Cause.FINISHED,
        Sure.LIKELY,
    ),
    "failed after its training was finished": (
        Evidence(
            kind="run",
            exit={"status": 0, "how": "closed", "step": 5},
            journal=[{"event": "finished", "step": 5}],
            led={"status": 1},
            output=TRACEBACK,
            signs=read_signs(TRACEBACK),
        ),
        Cause.PYTHON_EXCEPTION,
        Sure.CERTAIN,
    ),
    "the machine was started again": (
        Evidence(
            kind="run",
            lease={"process": {}},
            beat={"time": NOW, "step": 3},
            run=RunFacts(has_rebooted=True),
        ),
        Cause.MACHINE_LOST,
        Sure.CERTAIN,
    ),
    "a copy whose heartbeat stops": (
        Evidence(kind="run", lease={"process": {}}, beat={"time": NOW, "step": 3}),
        Cause.MACHINE_LOST,
        Sure.BY_EXCLUSION,
    ),
    "trainer and keeper killed together, here": (
        Evidence(
            kind="run",
            lease={"process": {}},
            beat={"time": NOW, "step": 3},
            run=RunFacts(is_here=True),
        ),
        Cause.KILLED,
        Sure.BY_EXCLUSION,
    ),
    "an end that a full disk did not let anyone record": (
        Evidence(
            kind="run",
            lease={"process": {}},
            beat={"time": NOW, "step": 3},
            run=RunFacts(is_here=True, is_disk_full=True),
        ),
        Cause.NOT_DURABLE,
        Sure.BY_EXCLUSION,
    ),
    "trainer and keeper killed together, with memory full": (
        Evidence(
            kind="run",
            lease={"process": {}},
            beat={"time": NOW, "step": 3, "memory": sample(0, 1.99 * GB)},
        ),
        Cause.OOM_CGROUP,
        Sure.LIKELY,
    ),
    "SLURM: out of memory": (
        Evidence(kind="slurm", job={"state": "OUT_OF_MEMORY", "exit_code": "0:125"}),
        Cause.OOM_CGROUP,
        Sure.CERTAIN,
    ),
    "SLURM: timeout": (
        Evidence(kind="slurm", job={"state": "TIMEOUT", "exit_code": "0:0"}),
        Cause.TIME_LIMIT,
        Sure.CERTAIN,
    ),
    "SLURM: node fail": (
        Evidence(kind="slurm", job={"state": "NODE_FAIL"}),
        Cause.MACHINE_LOST,
        Sure.CERTAIN,
    ),
    "SLURM: cancelled": (
        Evidence(kind="slurm", job={"state": "CANCELLED by 1000"}),
        Cause.ASKED,
        Sure.CERTAIN,
    ),
    "SLURM: running": (
        Evidence(kind="slurm", job={"state": "RUNNING"}),
        Cause.RUNNING,
        Sure.CERTAIN,
    ),
    "SLURM: failed by a signal": (
        Evidence(kind="slurm", job={"state": "FAILED", "exit_code": "0:11"}),
        Cause.SEGFAULT,
        Sure.LIKELY,
    ),
    "running": (Evidence(is_live=True), Cause.RUNNING, Sure.CERTAIN),
    "nothing": (Evidence(), Cause.UNKNOWN, Sure.UNKNOWN),
    "status 3, and silence": (printed("", 3), Cause.UNKNOWN, Sure.UNKNOWN),
    "status 1, and silence": (printed("epoch 1\n", 1), Cause.UNKNOWN, Sure.UNKNOWN),
}


@pytest.mark.parametrize("name", TABLE)
def test_each_death_has_its_verdict(name):
    check(TABLE[name])


def test_every_cause_of_one_process_stands_in_the_table():
    told = {cause for _, cause, _ in (*TABLE.values(), *PYTHON.values())}
    of_many = {Cause.COLLECTIVE_TIMEOUT, Cause.PEER_LOST}  # test_why_judge_ranks.py
    of_hangs = {cause for cause in Cause if cause.name.startswith("HANG_")}  # test_why_hang.py
    of_life = {Cause.DEBUGGER, Cause.STOPPED, Cause.FROZEN, Cause.SLOW}  # test_why_live.py
    assert told | of_many | of_hangs | of_life == set(Cause)


def test_an_oom_tells_the_memory_of_its_last_minutes_and_the_limit():
    verdict = judge_strictly(TABLE["oom of the cgroup"][0])
    assert "2.0 of 2.0 GB" in verdict.sentence
    told = "\n".join(verdict.evidence)
    assert "5.0 min before: 1.2 GB" in told or "300 s before: 1.2 GB" in told or "5 min" in told
    assert "60 s before: 1.7 GB" in told
    assert "at the end: 2.0 of 2.0 GB" in told
    assert "the trainer 1.4 GB, 4 workers 400 MB, /dev/shm 100 MB" in told
    assert any("num_workers=2" in line for line in verdict.advice)
    assert (verdict.host, verdict.step, verdict.durable_step) == ("node3", 41, 40)


def test_a_signal_names_its_sender():
    sent = [{"time": NOW, "name": "SIGTERM", "pid": 1, "uid": 0, "by": "systemd"}]
    verdict = judge_strictly(printed("", -15, signals=sent))
    assert verdict.cause is Cause.TERMINATED
    assert "`systemd` (pid 1 of root)" in verdict.sentence
    crash = judge_strictly(printed("", -11, signals=[{**sent[0], "name": "SIGSEGV"}]))
    assert (crash.cause, crash.sure) == (Cause.TERMINATED, Sure.CERTAIN)


def test_a_kill_lists_what_is_excluded():
    verdict = judge_strictly(TABLE["kill -9"][0])
    told = "\n".join(verdict.evidence)
    assert "OOM kills stayed at 1" in told
    assert "500 MB of 2.0 GB" in told


def test_a_stack_is_shown_and_named():
    evidence = died(-11)
    evidence.ranks[0].stacks = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x07 (most recent call first):\n"
        '  File "/home/a/ext.py", line 9 in call\n  File "/home/a/train.py", line 3 in main\n'
    )
    verdict = judge_strictly(evidence)
    assert "ext.py" in verdict.sentence
    assert "train.py" in "\n".join(verdict.evidence)


def test_what_restarts_and_what_does_not():
    expected = {
        Restart.DONE: "RUNNING FINISHED ASKED TERMINATED TIME_LIMIT STOPPED FROZEN DEBUGGER SLOW",
        Restart.FREE: "PREEMPTED KILLED MACHINE_LOST",
        Restart.ONCE: "OOM_CGROUP OOM_MACHINE OOM_WORKER CUDA_OOM SHM_FULL",
        Restart.NEVER: "CONFIGURATION ENVIRONMENT BAD_TRAINING NO_PROGRESS NOT_DURABLE "
        "LYING_STATUS",
    }
    for restart, names in expected.items():
        assert {c.name for c in Cause if restart_after(c) is restart} == set(names.split())
