"""Among several ranks: the culprit, and not its first victim."""

from __future__ import annotations

from typing import Any

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import Evidence, RankEvidence, RunFacts
from holdfast._diagnose.texts.signs import read_signs
from holdfast._diagnose.verdict import Cause, Sure, Verdict
from tests.unit.why_evidence import NOW, counters

CLOSED = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
TIMED_OUT = (
    "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to "
    "complete"
)
Told = tuple[str, Any]


def death(after: float, status: int, **more: Any) -> Told:
    return "death", {"time": NOW + after, "status": status, **more}


def error(after: float, message: str, kind: str = "RuntimeError") -> Told:
    return "error", {"time": NOW + after, "type": kind, "message": message, "ranks": 3}


def verdict_on(
    *ranks: Told | None, journal: tuple[dict[str, Any], ...] = (), **more: Any
) -> Verdict:
    """Of a run whose ranks have left these records; None: nothing."""
    found = []
    for number, told in enumerate(ranks):
        each = RankEvidence(
            rank=number, host=f"node{number}", step=more.get("steps", {}).get(number)
        )
        if told is not None:
            setattr(each, told[0], {"rank": number, "host": f"node{number}", **told[1]})
        found.append(each)
    how = {"status": 75, "how": "rank 1 on node1 was killed by SIGKILL"}
    return judge_strictly(
        Evidence(
            kind="run",
            ranks=found,
            run=RunFacts(ranks_planned=len(ranks)),
            journal=list(journal),
            exit=more.get("exit", how),
            led=more.get("led"),
            beat={"time": NOW},
        )
    )


def test_the_rank_that_was_killed_is_named_though_another_spoke_first():
    found = verdict_on(error(-0.05, CLOSED), death(0, -9, counters=counters(0)), error(0.1, CLOSED))
    assert (found.cause, found.rank, found.host) == (Cause.KILLED, 1, "node1")
    assert "rank 1 on node1" in found.sentence
    assert len(found.others) == 2
    assert "rank 0 on node0 then saw: RuntimeError:" in found.others[0]
    assert "Connection closed by peer" in found.others[0]


def test_the_rank_that_raised_is_named_though_others_were_then_ended():
    found = verdict_on(
        death(0.3, -15), error(0, "bad batch", "ValueError"), death(30.0, -9), exit={}
    )
    assert (found.cause, found.rank) == (Cause.PYTHON_EXCEPTION, 1)
    assert "rank 0 on node0 then ended by SIGTERM" in found.others[0]
    assert "rank 2 on node2 then ended by SIGKILL" in found.others[1]


def test_of_several_that_died_by_themselves_the_first_is_named():
    found = verdict_on(death(3, -11), death(0.4, -9, counters=counters(1, hits=1)), None)
    assert (found.cause, found.rank) == (Cause.OOM_CGROUP, 1)
    assert "rank 0 on node0 then ended by SIGSEGV" in found.others[0]


def test_a_death_that_is_noted_a_moment_after_an_exception_was_its_cause():
    found = verdict_on(error(0, "went wrong"), death(0.2, -11), None)
    assert (found.cause, found.rank) == (Cause.SEGFAULT, 1)


def test_after_a_timeout_the_rank_that_did_not_raise_is_named():
    found = verdict_on(
        error(0, TIMED_OUT),
        error(0.1, TIMED_OUT),
        death(6, -9, left_status=75),
        steps={0: 11, 1: 11, 2: 10},
    )
    assert (found.cause, found.rank) == (Cause.COLLECTIVE_TIMEOUT, 2)
    assert "at step 10 while others waited at step 11" in found.sentence
    assert len(found.others) == 2


def test_a_rank_of_which_nothing_is_left_is_the_one_that_the_others_waited_for():
    found = verdict_on(error(0, TIMED_OUT), None, error(0.1, TIMED_OUT))
    assert (found.cause, found.rank) == (Cause.COLLECTIVE_TIMEOUT, 1)


def test_where_all_timed_out_nobody_is_called_guilty():
    found = verdict_on(error(0.1, TIMED_OUT), error(0, TIMED_OUT), error(0.2, TIMED_OUT))
    assert found.cause is Cause.COLLECTIVE_TIMEOUT
    assert "does not make it the cause" in found.sentence


def test_where_all_lost_a_peer_nobody_is_called_guilty():
    found = verdict_on(error(0, CLOSED), error(0.1, CLOSED))
    assert (found.cause, found.sure) == (Cause.PEER_LOST, Sure.LIKELY)
    assert any("no rank is known" in line for line in found.evidence)


def test_a_host_that_cannot_be_reached_is_named():
    event = {"event": "rank-died", "rank": 1, "how": "cannot be reached any more", "host": "node1"}
    found = verdict_on(error(-60, CLOSED), None, journal=({**event, "time": NOW},))
    assert (found.cause, found.rank, found.host) == (Cause.MACHINE_LOST, 1, "node1")


def test_the_journal_alone_tells_who_died():
    event = {"event": "rank-died", "rank": 1, "how": "was killed by SIGSEGV", "time": NOW}
    found = verdict_on(None, None, journal=(event,))
    assert (found.cause, found.rank) == (Cause.SEGFAULT, 1)


def test_a_stop_that_was_asked_for_is_nobodys_fault():
    found = verdict_on(None, death(0, -15), exit={"status": 143, "how": "SIGTERM"})
    assert (found.cause, found.sure) == (Cause.ASKED, Sure.CERTAIN)


def test_the_status_of_torchrun_is_looked_through():
    processes = [
        {"pid": 12, "ppid": 10, "rank": 1, "comm": "python", "status": -9, "ended": NOW},
        {"pid": 11, "ppid": 10, "rank": 0, "comm": "python", "status": 1, "ended": NOW + 0.2},
        {"pid": 13, "ppid": 10, "rank": 2, "comm": "python", "status": -15, "ended": NOW + 0.3},
    ]
    led = {"status": 1, "processes": processes, "counters": counters(1, hits=1), "ended": NOW + 1}
    found = judge_strictly(Evidence(kind="led", led=led))
    assert (found.cause, found.rank) == (Cause.OOM_CGROUP, 1)
    assert len(found.others) == 2


def test_a_rank_that_a_script_has_forked_is_named_by_its_pid():
    text = f'Traceback (most recent call last):\n  File "t.py", line 1\nRuntimeError: {CLOSED}\n'
    processes = [
        {"pid": 12, "ppid": 10, "comm": "python", "status": -9, "ended": NOW},
        {"pid": 10, "ppid": 1, "comm": "python", "status": 1, "ended": NOW + 0.2},
    ]
    led = {"status": 1, "child_pid": 10, "processes": processes, "counters": counters(0)}
    found = judge_strictly(Evidence(kind="led", led=led, signs=read_signs(text), output=text))
    assert (found.cause, found.sure) == (Cause.KILLED, Sure.BY_EXCLUSION)
    assert "pid 12" in found.sentence
    assert "Connection closed by peer" in found.others[0]


SUMMARY = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/a/train.py", line 30, in <module>
[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:7
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_00:00:01
  host      : node3
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 8)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 8
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : node3
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 7)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def test_torchruns_root_cause_is_not_believed():
    found = judge_strictly(Evidence(kind="log", output=SUMMARY, signs=read_signs(SUMMARY)))
    assert (found.cause, found.rank, found.host) == (Cause.KILLED, 1, "node3")
    assert found.sure is Sure.UNKNOWN  # a log cannot tell a kill from an OOM kill
    assert "rank 0 on node3 then saw: RuntimeError" in found.others[0]


def raised_by(rank: int, name: str, message: str) -> str:
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/a/train.py", line 30, in <module>',
        f"{name}: {message}",
    ]
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


def steps(start: int) -> str:
    return "".join(f"step {number} | loss 0.5\n" for number in range(start, start + 30))


def test_an_exception_before_more_steps_and_another_exception_of_its_rank_was_caught():
    caught = raised_by(0, "ZeroDivisionError", "of a metric")
    text = steps(0) + caught + steps(30) + raised_by(1, "KeyError", "'a'")
    text += raised_by(0, "RuntimeError", CLOSED)
    found = judge_strictly(Evidence(kind="log", output=text, signs=read_signs(text)))
    assert (found.cause, found.rank, found.sure) == (Cause.PYTHON_EXCEPTION, 1, Sure.CERTAIN)
    assert "KeyError" in found.sentence


def test_two_exceptions_of_two_ranks_in_no_known_order_are_not_certain():
    text = raised_by(1, "KeyError", "'a'") + raised_by(0, "ZeroDivisionError", "of a metric")
    found = judge_strictly(Evidence(kind="log", output=text, signs=read_signs(text)))
    assert (found.cause, found.sure) == (Cause.PYTHON_EXCEPTION, Sure.LIKELY)
    assert "in no known order" in "\n".join(found.evidence)
    assert "ended first" not in "\n".join(found.evidence)


FAILED = "\n".join(
    [
        "============================================================",
        "train.py FAILED",
        "------------------------------------------------------------",
        "Failures:",
        "[1]:",
        "  time      : 2026-01-01_00:00:01",
        "  host      : node3",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : 1 (pid: 8)",
        "  error_file: <N/A>",
        "  traceback : To enable traceback see: https://pytorch.org/docs",
        "------------------------------------------------------------",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-01-01_00:00:00",
        "  host      : node3",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : CODE (pid: 7)",
        "  error_file: <N/A>",
        "  traceback : To enable traceback see: https://pytorch.org/docs",
        "============================================================\n",
    ]
)


def test_an_exception_without_a_label_is_that_of_one_of_the_ranks_that_failed():
    raised = raised_by(0, "KeyError", "'a'") + raised_by(0, "RuntimeError", CLOSED)
    text = raised.replace("[rank0]: ", "") + FAILED.replace("CODE", "1")
    found = judge_strictly(Evidence(kind="log", output=text, signs=read_signs(text)))
    assert (found.cause, found.rank) == (Cause.PYTHON_EXCEPTION, None)
    assert found.sure is Sure.CERTAIN
    assert found.sentence.startswith("A rank on node3 raised KeyError")
    assert "its lines name no rank: the ranks 0, 1 left with status 1" in "\n".join(found.evidence)

    another = raised_by(1, "ValueError", "x").replace("[rank1]: ", "") + text
    found = judge_strictly(Evidence(kind="log", output=another, signs=read_signs(another)))
    assert found.sure is Sure.LIKELY


def test_what_a_rank_printed_counts_though_the_others_printed_much_below_it():
    cuda = "[rank0]:[E ProcessGroupNCCL.cpp:1895] terminated with exception: CUDA error: misaligned"
    lost = "".join(raised_by(1, "RuntimeError", CLOSED) + "frame\n" * 25 for _ in range(3))
    text = f"{steps(0)}{cuda} address\n{lost}{FAILED.replace('CODE', '-6')}"
    found = judge_strictly(Evidence(kind="log", output=text, signs=read_signs(text)))
    assert (found.cause, found.rank) == (Cause.CUDA_ERROR, 0)
    assert "misaligned address" in found.sentence
