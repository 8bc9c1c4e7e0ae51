"""Errors of holdfast itself, as they are printed, and whether a start may succeed later."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.verdict import Cause, Restart, Sure, Verdict
from holdfast._supervise.restart import may_become_free
from tests.unit.why_evidence import printed

READ_ONLY = "runs/a: this run folder cannot be written (Read-only file system)."
LIVE = "runs/a: another process trains here, pid {} on {}.\nStop it first (holdfast stop runs/a)."


def shown(message: str, kind: str, place: str = "at /w/train.py:7 ") -> str:
    return f"step 3\nholdfast: {message}\n  {place}(holdfast.{kind})\n"


def judged(message: str, kind: str, **more: str) -> Verdict:
    return judge_strictly(printed(shown(message, kind, **more), 1))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("FolderError", f"{READ_ONLY}\nChoose a folder that you may write to."),
        ("SettingsError", "keep_last=0 is less than 1."),
        ("StateMismatch", "runs/a: the checkpoint has no w.\nUse another folder."),
        ("RunIsLive", LIVE.format(4711, "node3")),
    ],
)
def test_an_error_of_ours_is_told_by_its_type_and_is_not_repeated(kind, message):
    verdict = judged(message, kind)
    assert (verdict.cause, verdict.sure) == (Cause.CONFIGURATION, Sure.CERTAIN), verdict
    assert verdict.restart is Restart.NEVER
    assert f"{kind}: {message.splitlines()[0]}" in verdict.sentence
    assert "at /w/train.py:7" in verdict.evidence
    assert set(message.splitlines()[1:]) <= set(verdict.advice)


@pytest.mark.parametrize("place", ["", "at line 2 of the cell: with Run() as run: "])
def test_its_place_may_be_missing(place):
    assert "FolderError: runs/a" in judged(READ_ONLY, "FolderError", place=place).sentence


def test_the_rank_in_front_of_it_is_no_part_of_it():
    assert "FolderError: runs/a" in judged(f"rank 1: {READ_ONLY}", "FolderError").sentence


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        ("Input/output error", Cause.PYTHON_EXCEPTION),
        ("Stale file handle", Cause.PYTHON_EXCEPTION),
        ("No space left on device", Cause.DISK_FULL),
        ("Disk quota exceeded", Cause.DISK_FULL),
    ],
)
def test_a_folder_that_may_be_written_later_is_tried_again(why, cause):
    verdict = judged(READ_ONLY.replace("Read-only file system", why), "FolderError")
    assert (verdict.cause, verdict.restart) == (cause, Restart.BACKOFF), verdict


def test_a_refusal_by_another_trainer_is_tried_again_only_if_that_one_is_leaving():
    host = os.uname().nodename
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    live = judged(LIVE.format(os.getpid(), host), "RunIsLive")
    assert not may_become_free(live, has_run=False)
    assert may_become_free(live, has_run=True)  # of an earlier attempt of this command
    assert may_become_free(judged(LIVE.format(gone.pid, host), "RunIsLive"), has_run=False)
    assert not may_become_free(judged(LIVE.format(gone.pid, "b"), "RunIsLive"), has_run=False)
    assert not may_become_free(judged(READ_ONLY, "FolderError"), has_run=True)
