"""Hangs that need torch: a worker of a loader, two ranks, a storm of compilations."""

from __future__ import annotations

import os
import re
import signal

import pytest

from holdfast._diagnose.verdict import Cause
from tests.cli.command import PROGRAM, succeed
from tests.hangs.stage import check
from tests.hangs.table import LOADER, RANKS, SCRIPTS, Hang, cases
from tests.small_shm import needs_namespace, small_shm
from tests.support import wait_until

pytest.importorskip("torch")


# Over 5 s: a hang is called one after its time and two looks.
@pytest.mark.nightly
def test_the_line_of_a_worker_is_named(stage, keep_evidence):
    stage.start_hang(LOADER)
    stage.found()
    check(stage.why(), LOADER)
    keep_evidence("hangs", LOADER.name, "live", stage.home, SCRIPTS / LOADER.script)


# By records in tests/unit/diagnose/test_why_live.py.
@needs_namespace
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("leader", "cause"),
    [((), Cause.HANG_LOADER), ((str(PROGRAM), "run", "--"), Cause.SHM_FULL)],
    ids=["alone", "led"],
)
def test_a_full_shm_in_a_worker_is_told_and_its_own_words_make_it_the_cause(stage, leader, cause):
    hang = Hang(
        name="full /dev/shm in a worker",
        script="hanging_torch.py",
        how="shm-full",
        cause=cause,
        at=("lost batch",),
        says=("full /dev/shm, which has only 34 MB",),
    )
    stage.prefix = (*small_shm("32m"), *leader)
    stage.start_hang(hang)
    stage.found()
    check(stage.why(), hang)


# Over 5 s: a hang is called one after its time and two looks.
@pytest.mark.parametrize("hang", cases(RANKS))
def test_the_ranks_are_compared(hang, stage, keep_evidence):
    stage.start_hang(hang)
    record = stage.found()
    assert [look["rank"] for look in record["looks"]] == [0, 1]
    assert record["missing"] == []
    check(stage.why(), hang)
    keep_evidence("hangs", hang.name, "live", stage.home, SCRIPTS / hang.script)
    shown = succeed("stacks", stage.folder)
    for rank, place in zip((1, 0), hang.places(), strict=True):
        (line,) = (line for line in shown.splitlines() if place in line)
        assert line.startswith(f"rank {rank} in ")


# That it is no hang is shown in tests/ranks/test_hangs.py, and who is named in
# tests/unit/diagnose/test_why_hang_ranks.py.
@pytest.mark.nightly
def test_a_rank_waits_for_one_that_somebody_has_stopped(stage):
    """Neither is called a hang, and the one that is stopped is named."""
    hang = Hang(name="stopped", script="hanging_ranks.py", how="fine", cause=Cause.STOPPED, rank=1)
    trainer = stage.start_hang(hang)
    wait_until(lambda: stage.pace.get("usual"), 60, f"steps in {trainer.output}")
    (pid,) = re.findall(r"ready (\d+) rank 1", trainer.output)
    os.kill(int(pid), signal.SIGSTOP)
    wait_until(lambda: stage.beat.get("paused"), 30, "a heartbeat that says so")
    assert stage.beat["paused"]["rank"] == 1
    check(stage.why(), hang)
    os.kill(int(pid), signal.SIGCONT)
    step = stage.beat["step"]
    wait_until(lambda: stage.beat["step"] > step, 30, "another step")
    assert not stage.layout.hang(1).exists()


def _slow(how: str) -> Hang:
    return Hang(name=how, script="hanging_torch.py", how=how, cause=Cause.SLOW)


@pytest.mark.nightly  # by its figures: tests/unit/diagnose/test_why_live.py
def test_a_storm_of_recompilations_is_slow_and_no_hang(stage):
    stage.start_hang(_slow("compile"))
    wait_until(lambda: (stage.pace.get("compiles_lately") or 0) > 20, 60, "a storm")
    verdict = stage.why()
    assert verdict["cause"] == Cause.SLOW.value, verdict
    assert "torch.compile" in verdict["sentence"]
    assert any("TORCH_LOGS=recompiles" in line for line in verdict["advice"])
    assert not stage.layout.hang(1).exists()


@pytest.mark.nightly  # by its figures: tests/unit/diagnose/test_why_live.py
def test_a_profiler_that_keeps_everything_is_told_by_the_memory_that_it_takes(stage):
    """Against what the run itself took before."""
    stage.start_hang(_slow("profiler"))

    def memory(when: str) -> int:
        return int(stage.pace.get("memory", {}).get(when) or 0)

    wait_until(lambda: memory("now") > 1.4 * memory("usual") > 0, 60, "more memory")
    verdict = stage.why()
    assert verdict["cause"] in (Cause.RUNNING.value, Cause.SLOW.value), verdict
    text = "\n".join([verdict["sentence"], *verdict["evidence"]])
    assert "because of torch.profiler" in text, text
    assert any("schedule" in line for line in verdict["advice"]), verdict
    assert not stage.layout.hang(1).exists()
