"""Whatever the records hold, there is a verdict."""

from __future__ import annotations

import json
import math
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import Evidence, RankEvidence, RunFacts
from holdfast._diagnose.texts.signs import Sign, read_signs
from holdfast._diagnose.verdict import Verdict
from tests.unit.why_evidence import CUDA, GB, NOW, TRACEBACK, WORKER_KILLED

KEYS = (
    *("status", "time", "step", "rank", "ranks", "host", "pid", "type", "message", "chain", "how"),
    *("frames", "counters", "start", "before", "death", "cgroup", "oom", "oom_kill", "max", "gpu"),
    *("memory", "children", "workers", "disks", "shm", "free", "total", "t", "rss", "limit"),
    *("signals", "name", "processes", "ended", "exitcode", "asked", "left_status", "largest"),
    *("event", "state", "exit_code", "graphs", "count", "comm", "path", "bytes", "shape", "said"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 65, 75, 130, 137, -6, -7, -9, -11, -15, 2**80, -1, 1e300),
    *(math.nan, math.inf, -math.inf, 0.5, NOW, NOW - 5, 2 * GB, "", "x\ny", "\ud800", "\x1b[31m"),
    *(
        "RuntimeError",
        "SystemExit",
        "OSError",
        "256",
        "SIGTERM",
        "rank-died",
        "finished",
        "request",
    ),
    *(
        WORKER_KILLED,
        CUDA,
        "No space left on device",
        "OUT_OF_MEMORY",
        "rank 1 died",
        "0:9",
        "died",
    ),
    *("was killed by SIGKILL", "was killed by SIGCLD", "ended with status 7", "pt_data_worker"),
)
TEXTS = ("", TRACEBACK, "Killed\n", f"RuntimeError: {WORKER_KILLED}\n", "usage: x\n", "\x00\n")


def anything(dice: random.Random, depth: int = 4) -> Any:
    shape = dice.random()
    if depth == 0 or shape < 0.4:
        return dice.choice(VALUES)
    if shape < 0.6:
        return [anything(dice, depth - 1) for _ in range(dice.randrange(4))]
    return {dice.choice(KEYS): anything(dice, depth - 1) for _ in range(dice.randrange(12))}


def record(dice: random.Random) -> dict[str, Any]:
    found = anything(dice)
    return found if isinstance(found, dict) else {}


def rank(dice: random.Random) -> RankEvidence:
    records = {n: record(dice) for n in ("error", "death", "exit", "process", "led")}
    text, step = dice.choice(TEXTS), dice.choice([None, 0, 7])
    return RankEvidence(rank=dice.randrange(4), stacks=text, step=step, **records)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_the_records_hold_there_is_a_verdict(seed):
    dice = random.Random(seed)
    text = dice.choice(TEXTS)
    evidence = Evidence(
        ranks=[rank(dice) for _ in range(dice.randrange(4))],
        led=dice.choice([None, record(dice)]),
        job=dice.choice([None, record(dice)]),
        beat=record(dice),
        lease=record(dice),
        exit=record(dice),
        journal=[record(dice) for _ in range(dice.randrange(4))],
        output=text,
        signs=[
            *read_signs(text),
            Sign("torchrun_summary", "x", details={"exitcodes": anything(dice), **record(dice)}),
            Sign(dice.choice(["faulthandler", "cuda_oom", "slurm_oom"]), "x", details=record(dice)),
        ],
        kind=dice.choice(["run", "led", "log", "pid", "slurm"]),
        run=RunFacts(ranks_planned=dice.choice([None, 1, 3]), requeue=record(dice)),
    )
    verdict = judge_strictly(evidence)
    assert isinstance(verdict, Verdict)
    json.dumps(verdict.to_json())
    for line in (verdict.sentence, *verdict.evidence, *verdict.advice, *verdict.others):
        assert line.isprintable()
