"""Logs whose cause stands far from their last error, or in other words than it."""

from __future__ import annotations

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.texts.signs import read_signs
from holdfast._diagnose.verdict import Cause, Sure, Verdict


def judged(text: str) -> Verdict:
    return judge_strictly(Evidence(kind="log", signs=read_signs(text), output=text))


def raised(error: str, *frames: tuple[str, int, str], lead: str = "") -> str:
    """A traceback, as Python prints it."""
    places = frames or (("/home/ada/train.py", 7, "step"),)
    lines = ["Traceback (most recent call last):"]
    for file, line, function in places:
        lines += [f'  File "{file}", line {line}, in {function}', "    call()"]
    return "".join(f"{lead}{each}\n" for each in (*lines, *error.split("\n")))


def steps(ranks: range, first: int, last: int) -> str:
    lines = (f"[rank {r}] step {n} loss 0.5\n" for n in range(first, last) for r in ranks)
    return "".join(lines)


def timed_out(rank: int) -> str:
    return (
        f"[rank {rank}] [E ProcessGroupNCCL.cpp:475] [Rank {rank}] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=600000) ran for "
        "600005 milliseconds before timing out.\n"
    )


def test_a_rank_that_fell_silent_after_its_error_did_not_get_over_it():
    error = raised("OSError: [Errno 5] Input/output error", lead="[rank 3] ")
    said = "[rank 3] rank 3 exits with status 1\n"
    end = "".join(map(timed_out, range(3))) + (
        "srun: error: n1: tasks 0-2: Aborted (core dumped)\n"
        "srun: error: n1: task 3: Exited with exit code 1\n"
    )
    text = steps(range(4), 0, 100) + error + said + steps(range(3), 100, 300) + end
    verdict = judged(text)
    assert (verdict.rank, verdict.cause) == (3, Cause.PYTHON_EXCEPTION), verdict
    assert "Input/output error" in verdict.sentence
    assert not any("told to leave" in line for line in verdict.others), verdict
    # It goes on, or it never printed much.
    for before, after in ((range(4), range(4)), (range(1), range(1))):
        text = steps(before, 0, 100) + error + steps(after, 100, 500)
        assert judged(text + timed_out(0)).cause is not Cause.PYTHON_EXCEPTION


def test_an_error_that_a_restart_of_the_workers_got_over_is_not_the_cause():
    failed = "torch.distributed.elastic: [ERROR] failed (exitcode: 1) local_rank: {} (pid: 9) of "
    again = "Worker group FAILED. {}/3 attempts left; will restart worker group\n"
    early = raised("urllib3.exceptions.ReadTimeoutError: read timed out", lead="[rank1]: ")
    late = raised("RuntimeError: shape '[3]' is invalid for input of size 4")
    fields = "  time      : 1\n  host      : n1\n  rank      : {0}\n  exitcode  : 1 (pid: 7{0})\n"
    summary = (
        f"Failures:\n[1]:\n{fields.format(1)}Root Cause (first observed failure):\n[0]:\n"
        f"{fields.format(0)}=====\n"
    )
    ends = failed.format(1) + "binary: python\n", failed.format(0) + "binary: python\n"
    text = (
        f"step 100\n{early}{ends[0]}{again.format(3)}resumed from a.pt\nstep 200\nstep 300\n"
        f"{late}{ends[1]}{again.format(2)}resumed from b.pt\n{late}{ends[1]}{summary}"
    )
    verdict = judged(text)
    assert "RuntimeError: shape '[3]' is invalid" in verdict.sentence, verdict
    assert not any("ReadTimeout" in line for line in (*verdict.evidence, *verdict.others))
