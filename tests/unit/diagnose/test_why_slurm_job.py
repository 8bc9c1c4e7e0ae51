"""What SLURM's commands print of a job, as they print it; real jobs are in tests/slurm."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.gather import gather_slurm, is_job, parse_accounting, parse_job
from holdfast._diagnose.verdict import Cause

LINE = (
    "JobId=12 ArrayJobId=11 ArrayTaskId=3 JobName=a JobState=fake b UserId=u(1000) "
    "GroupId=u(1000) MCS_label=N/A Priority=1 Nice=0 Account=(null) QOS=(null) "
    "JobState=OUT_OF_MEMORY Reason=OutOfMemory Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 "
    "Reboot=0 ExitCode=0:125 DerivedExitCode=0:9 RunTime=00:01:00 EndTime=1763261063 "
    "NodeList=n[1-2] Comment=two words MinMemoryNode=60M "
    "Command=/home/u/my job.sh --lr 3 WorkDir=/home/u StdErr={log} StdIn=/dev/null StdOut={log}"
)


@pytest.mark.parametrize("word", ["12", "12_3", "12+1", "12.0", "12.batch", "12_[1-4,7%2]"])
def test_names_of_jobs(word: str) -> None:
    assert is_job(word)


@pytest.mark.parametrize("word", ["", "a", "-1", "12 ", "12_", "../12", "12;rm"])
def test_other_words_are_no_jobs(word: str) -> None:
    assert not is_job(word)
    assert "is not a job" in gather_slurm(word).notes[0]


def test_a_line_of_scontrol_is_read_whatever_the_job_is_called() -> None:
    found = parse_job(LINE.format(log="/home/u/a b.out"))
    assert found["JobId"] == "12"
    assert found["JobState"] == "OUT_OF_MEMORY"
    assert found["Comment"] == "two words"
    assert found["StdErr"] == found["StdOut"] == "/home/u/a b.out"


@given(st.text(max_size=200))
def test_no_line_is_too_much(line: str) -> None:
    parse_job(line)
    parse_accounting(line)


def commands(place: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Stand-ins for SLURM's commands, which answer as a cluster with accounting does."""
    for name, text in scripts.items():
        path = place / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")


def test_controller_accounting_and_output_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "slurm-12.out"
    log.write_text("step 1\nslurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some\n")
    commands(
        tmp_path,
        monkeypatch,
        scontrol=f"echo '{LINE.format(log=log)}'",
        sacct="echo '12|a|b|OUT_OF_MEMORY|0:125|0:0|None|n1||60M|1763261063|'\n"
        "echo '12.0|python|OUT_OF_MEMORY|0:9||None|n1|61440K||1763261063|'",
    )
    evidence = gather_slurm("12")
    assert evidence.kind == "slurm"
    assert evidence.job is not None
    assert evidence.job["state"] == "OUT_OF_MEMORY"
    assert evidence.job["exit_code"] == "0:125"
    assert evidence.job["derived"] == "0:9"
    assert evidence.job["node"] == "n[1-2]"
    assert [sign.kind for sign in evidence.signs] == ["slurm_oom"]
    assert evidence.files == [log]
    assert not evidence.is_live


def test_what_the_controller_has_forgotten_accounting_may_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(
        tmp_path,
        monkeypatch,
        scontrol="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        sacct="echo '12|a|CANCELLED by 1000|0:15|0:0|None|n1||60M|2026-11-16T02:44:23|'",
    )
    evidence = gather_slurm("12")
    assert evidence.job is not None
    assert evidence.job["state"] == "CANCELLED by 1000"
    assert "has forgotten the job" in evidence.notes[0]


def test_where_nobody_knows_the_job_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(tmp_path, monkeypatch, scontrol="exit 1", sacct="exit 1")
    evidence = gather_slurm("12")
    assert evidence.job is None
    assert "SLURM does not know job 12" in evidence.notes[0]


def test_output_that_cannot_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = LINE.format(log=tmp_path / "gone.out")
    commands(tmp_path, monkeypatch, scontrol=f"echo '{line}'", sacct="exit 1")
    evidence = gather_slurm("12")
    assert evidence.job is not None
    assert "gone.out cannot be read" in evidence.notes[0]


_ERROR = """step 10
Traceback (most recent call last):
  File "train.py", line 12, in <module>
    rate = settings["lr"]
KeyError: 'lr'
"""
_CANCELLED = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-17T10:00:00 {} ***\n"


@pytest.mark.parametrize(
    ("state", "log", "cause"),
    [
        ("COMPLETED ", f"{_ERROR}done\n", Cause.PYTHON_EXCEPTION),
        ("COMPLETED ", "step 10\ntrained\n", Cause.FINISHED),
        ("CANCELLED ", _ERROR + _CANCELLED.format(""), Cause.PYTHON_EXCEPTION),
        ("CANCELLED ", _CANCELLED.format("DUE TO TIME LIMIT"), Cause.TIME_LIMIT),
        ("CANCELLED ", _CANCELLED.format("DUE TO PREEMPTION"), Cause.PREEMPTED),
        ("CANCELLED ", "step 10\n", Cause.ASKED),
        ("TIMEOUT ", "step 10\n", Cause.TIME_LIMIT),
    ],
)
def test_what_the_log_of_a_job_says_counts_before_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, log: str, cause: Cause
) -> None:
    """A script that ends with `echo done` is COMPLETED, however its training ended."""
    path = tmp_path / "slurm-12.out"
    path.write_text(log)
    line = LINE.format(log=path).replace("OUT_OF_MEMORY Reason=OutOfMemory ", state)
    line = line.replace("0:125", "0:0").replace("0:9", "0:0")
    commands(tmp_path, monkeypatch, scontrol=f"cat <<'END'\n{line}\nEND", sacct="exit 1")
    found = judge_strictly(gather_slurm("12"))
    assert found.cause is cause, found
