"""What is asked about, and how sure an answer can be by what could be read of it."""

from __future__ import annotations

import os
import socket

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.hangs.process import what_holds
from holdfast._diagnose.verdict import Cause, Restart, Sure
from holdfast._environment.processes.activity import Activity, activity_of
from holdfast._errors import SettingsError
from holdfast._tools.cli import why
from holdfast._tools.doctor.environment import judge_environment
from tests.cli.command import holdfast
from tests.unit.hang_looks import alone, look, process, thread
from tests.unit.why_evidence import counters, died, ended, printed

LOCK = "py/threading.py:327 acquire"


def test_a_process_that_did_nothing_for_seconds_gets_a_verdict():
    stuck = alone(LOCK, "train.py:10 two")
    seen = {key: value for key, value in stuck.items() if key not in ("boundary_age", "step")}
    for kind in ("pid", "led"):
        asked = {"looks": [seen], "missing": [], "still_seconds": 3.0}
        verdict = judge_strictly(Evidence(kind=kind, is_live=True, look=asked))
        assert (verdict.cause, verdict.sure) == (Cause.HANG_LOCK, Sure.LIKELY), verdict
        assert "train.py:10" in verdict.sentence


def test_a_command_that_is_led_is_looked_at_too(monkeypatch):
    monkeypatch.setattr(why, "_look_at_pid", lambda pid: {"looks": [{"pid": pid}]})
    evidence = Evidence(kind="led", is_live=True, led={"child_pid": 4711})
    why._look_at(evidence)
    assert evidence.look == {"looks": [{"pid": 4711}]}


def test_without_a_stack_nothing_is_certain():
    asleep = thread(call="futex", wchan="futex_wait_queue", state="S")
    held = what_holds(look(process(100, asleep), unread=None))
    assert held.sure is not Sure.CERTAIN
    unread = thread(unread=[1])
    assert what_holds(look(process(100, unread))).sure is Sure.LIKELY


def test_a_shell_that_waits_for_its_next_command_is_no_debugger():
    reads = thread(call="read", call_path="/dev/pts/3")
    shell = look(process(100, reads, name="bash", command="-bash"))
    assert activity_of(shell) is not Activity.PAUSED
    python = look(process(100, reads, name="python3", command="python3 train.py"))
    assert activity_of(python) is Activity.PAUSED


def test_a_script_is_no_log(tmp_path):
    script = tmp_path / "train.py"
    script.write_text('raise RuntimeError("CUDA out of memory")\n')
    ended = holdfast("why", script)
    assert ended.returncode == 2
    assert "is a script" in ended.stderr
    assert "holdfast run -- python" in ended.stderr


def test_a_number_of_a_process_and_of_a_job_is_asked_about(monkeypatch):
    job = Evidence(kind="slurm", job={"state": "FAILED"})
    monkeypatch.setattr(why, "can_ask", lambda: True)
    monkeypatch.setattr(why, "gather_slurm", lambda what: job)
    with pytest.raises(SettingsError, match=r"Say which: holdfast why --pid \d+"):
        why._of_number(str(os.getpid()), False, False)
    assert why._of_number(str(os.getpid()), True, False).is_live
    assert why._of_number("999999999", False, False) is job


def test_a_function_that_calls_itself_without_end_is_named():
    stack = '  File "/w/tree.py", line 30 in grow\n' * 20
    text = f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n{stack}"
    verdict = judge_strictly(printed(text, -11))
    assert verdict.cause is Cause.SEGFAULT
    assert "calls itself without end" in verdict.sentence


def test_doctor_knows_that_nobody_says_where_the_ranks_meet():
    known = {"RANK": "1", "WORLD_SIZE": "4"}
    (check,) = judge_environment(known)
    assert check.state == "fail"
    assert "MASTER_ADDR" in check.found
    assert not [c for c in judge_environment({**known, "MASTER_ADDR": "n1"}) if c.state == "fail"]


def test_doctor_names_who_has_the_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        known = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": port}
        (check,) = judge_environment(known)
        assert f"pid {os.getpid()}" in check.found
        agent = {**known, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        assert "in use" not in str(judge_environment(agent))


def exited(step: int, total: int | None, where: str = "loop", how: str = "SystemExit"):
    evidence = ended(0, how)
    if where == "loop":
        evidence.exit["left_at"] = [["/w/train.py", 11, "patience"]]
    evidence.exit["step"] = step
    evidence.journal = [] if total is None else [{"event": "start", "total": total}]
    return judge_strictly(evidence)


@pytest.mark.parametrize("total", [1000, None])
@pytest.mark.parametrize("how", ["SystemExit", "SystemExit: 0"])
def test_sys_exit_in_the_loop_is_no_end_of_the_training(total, how):
    verdict = exited(60, total, how=how)
    assert (verdict.cause, verdict.sure) == (Cause.LYING_STATUS, Sure.LIKELY), verdict
    assert "at step 60" in verdict.sentence
    assert "at /w/train.py:11 in patience, with status 0" in verdict.sentence
    assert verdict.restart is Restart.NEVER


def test_sys_exit_after_the_loop_is_an_end_of_the_training():
    assert exited(60, 60).cause is Cause.FINISHED
    assert exited(60, None, where="outside").cause is Cause.FINISHED


def test_a_crash_in_a_library_is_told_with_the_line_of_the_script_that_called_it():
    stack = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
        '  File "/w/native.py", line 11 in peek\n  File "/w/train.py", line 9 in <module>\n'
    )
    evidence = died(-11, counters=counters(0))
    evidence.ranks[0].stacks = stack
    verdict = judge_strictly(evidence)
    assert verdict.sentence.endswith('in "/w/native.py", line 11 in peek.'), verdict
    assert any("ctypes/__init__.py" in line for line in verdict.evidence)
