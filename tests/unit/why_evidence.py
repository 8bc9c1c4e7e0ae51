"""Evidence of deaths as their witnesses leave it, for the tests of the judge."""

from __future__ import annotations

import json
from typing import Any

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import Evidence, RankEvidence
from holdfast._diagnose.texts.signs import read_signs
from holdfast._diagnose.verdict import Cause, Sure, restart_after

GB = 10**9
NOW = 1_700_000_000.0


def counters(kills: int | None, *, hits: int = 0, machine: int = 0) -> dict[str, Any]:
    """What a keeper reads before and after, if so many were killed in between."""

    def read(add: bool) -> dict[str, Any]:
        group = {"version": 2, "path": "/job", "limit": 2 * GB, "oom": 3, "oom_kill": 1, "max": 7}
        if kills is None:
            return {"cgroup": None, "vmstat_oom_kill": 5 + machine * add}
        group |= {"oom": 3 + hits * add, "oom_kill": 1 + kills * add, "max": 7 + hits * add}
        return {"cgroup": group, "vmstat_oom_kill": 5 + machine * add}

    return {"start": read(False), "before": read(False), "death": read(True)}


def sample(ago: float, used: float, limit: float | None = 2 * GB, **more: Any) -> dict[str, Any]:
    return {
        "t": NOW - ago,
        "rss": int(used * 0.7),
        "workers": int(used * 0.2),
        "worker_count": 4,
        "shm": int(used * 0.05),
        "shm_free": 4 * GB,
        "cgroup": int(used),
        "cache": 1000,
        "limit": limit,
        "available": 30 * GB,
        "total": 64 * GB,
        **more,
    }


GROWN = [sample(300, 1.2 * GB), sample(60, 1.7 * GB), sample(10, 1.9 * GB), sample(0.2, 2 * GB)]
CALM = [sample(60, 0.5 * GB), sample(0.2, 0.5 * GB)]


def died(status: int | None, **death: Any) -> Evidence:
    """A run whose keeper saw its trainer die."""
    record = {"time": NOW, "host": "node3", "pid": 4711, "status": status, "step": 41, **death}
    return Evidence(
        kind="run",
        ranks=[RankEvidence(death=record)],
        exit={"status": None, "how": "died", "step": 41, "durable_step": 40},
        lease={"process": {"host": "node3"}},
    )


def raised(kind: str, message: str, **error: Any) -> Evidence:
    """A run that an exception left."""
    record = {
        **{"time": NOW, "host": "node3", "pid": 4711, "step": 41, "type": kind},
        **{"message": message, "is_configuration": False, **error},
    }
    return Evidence(
        kind="run",
        ranks=[RankEvidence(error=record)],
        exit={"status": 1, "how": f"{kind}: {message}", "step": 41, "durable_step": 40},
    )


def printed(text: str, status: int | None, **led: Any) -> Evidence:
    """What `holdfast run` saw of a script that does not know holdfast."""
    record = {"status": status, "host": "node3", "child_pid": 4711, "ended": NOW, **led}
    return Evidence(kind="led", led=record, output=text, signs=read_signs(text))


def ended(status: int | None, how: str, **more: Any) -> Evidence:
    return Evidence(
        kind="run", exit={"status": status, "how": how, "step": 5, "durable_step": 5}, **more
    )


TRACEBACK = """Traceback (most recent call last):
  File "/home/a/train.py", line 7, in <module>
    main()
ValueError: bad news
"""
WORKER_KILLED = "DataLoader worker (pid 99) is killed by signal: Killed. "
DISK = {"path": "/data", "free": 4096, "total": 10 * GB, "free_inodes": 100}
ROOMY = {**DISK, "free": 5 * GB}
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 10.00 GiB of "
    "which 1.00 GiB is free. Of the allocated memory 5.00 GiB is allocated by PyTorch, and "
    "3.00 GiB is reserved by PyTorch but unallocated."
)


def check(found: tuple[Evidence, Cause, Sure]) -> None:
    """Judge, and see that the verdict is this one and has all that a verdict has."""
    evidence, cause, sure = found
    verdict = judge_strictly(evidence)
    assert (verdict.cause, verdict.sure) == (cause, sure), verdict
    assert verdict.sentence.endswith(".")
    assert "\n" not in verdict.sentence
    assert verdict.restart is restart_after(cause)
    if cause not in (Cause.UNKNOWN, Cause.RUNNING, Cause.FINISHED):
        assert verdict.evidence
    json.dumps(verdict.to_json())
