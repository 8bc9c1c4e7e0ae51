"""Whoever asks for a checkpoint, it is one checkpoint of all ranks, and nobody waits for ever."""

from __future__ import annotations

import signal
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast._store.folder.layout import RunLayout
from holdfast._store.memory.control import HOLD
from holdfast._store.read.merge_ranks import read_checkpoint
from holdfast._store.read.verify import find_damage, read_manifest
from tests.control_words import SharedWords
from tests.ranks.jobs import Jobs
from tests.support import checkpoint_steps, wait_until

JOIN = Path(__file__).with_name("join.py")
_TOTAL = 30


@pytest.mark.parametrize("meets", ["group", "files"])
def test_holdfast_save_makes_a_checkpoint_of_all_ranks_while_they_train(jobs, undisturbed, meets):
    job = jobs.start(meets=meets, total=_TOTAL, events=[(None, 10, "gate", str(jobs.gate))])
    for rank in (0, 1):
        job.wait_for("holding", rank)
    ranks = [SharedWords(life.pid) for life in job.lives]
    before = [rank.words[HOLD] for rank in ranks]
    holdfast.save(jobs.folder)
    wait_until(
        lambda: all(rank.words[HOLD] != old for rank, old in zip(ranks, before, strict=True)),
        what="an agreement that has reached both ranks",
    )
    jobs.open_gate()
    assert job.hashes() == undisturbed(meets=meets, total=_TOTAL)
    assert checkpoint_steps(jobs.folder) == [11, _TOTAL]
    assert jobs.events("checkpoint")[0]["reason"] == "holdfast save"
    assert [each["ranks"] for each in jobs.events("checkpoint")] == [2, 2]
    jobs.check_nothing_left()


@pytest.mark.parametrize("rank", [0, 1])
def test_run_save_on_one_rank_only_does_not_deadlock(jobs, undisturbed, rank):
    events = [(rank, 8, "save", None), (rank, 12, "wait", None)]
    job = jobs.start(total=_TOTAL, events=events, pauses=0.01)
    assert job.hashes() == undisturbed(total=_TOTAL)
    step = int(job.wait_for("saved", rank).split()[1])
    assert checkpoint_steps(jobs.folder) == [step, _TOTAL]
    assert 9 <= step <= 10
    jobs.check_nothing_left()


@pytest.mark.parametrize("rank", [0, 1])
def test_run_save_on_one_of_ranks_that_run_free_waits_for_the_step_of_the_other(
    jobs, undisturbed, rank
):
    plan = {"meets": "files", "total": 300}
    pauses = [0.001, 0.001]
    pauses[rank] = 0.004
    job = jobs.start(**plan, events=[(rank, 8, "save", None)], pauses=pauses)
    assert job.hashes() == undisturbed(**plan)
    steps = checkpoint_steps(jobs.folder)
    assert steps[-1] == 300
    assert len(steps) <= 2
    assert steps[0] > 8
    jobs.check_nothing_left()


@pytest.mark.parametrize(
    ("meets", "world"),
    [("group", 2), ("files", 2), pytest.param("group", 4, marks=pytest.mark.nightly)],
)
def test_run_save_on_all_ranks_is_one_checkpoint(jobs, undisturbed, meets, world):
    events = [(None, 8, "save", None), (None, 14, "wait", None)]
    job = jobs.start(world, meets=meets, total=_TOTAL, events=events, pauses=0.02)
    assert job.hashes() == undisturbed(world, meets=meets, total=_TOTAL)
    saved = {int(job.wait_for("saved", rank).split()[1]) for rank in range(world)}
    assert len(saved) == 1, job.outputs
    assert checkpoint_steps(jobs.folder) == [*saved, _TOTAL]


def test_checkpoints_by_the_number_of_steps_are_of_all_ranks(jobs):
    settings = {"checkpoint_every": 10, "keep_last": 10}
    job = jobs.start(meets="files", total=_TOTAL, pauses=[0.0, 0.01], settings=settings)
    job.hashes()
    assert checkpoint_steps(jobs.folder) == [10, 20, 30]
    jobs.check_nothing_left()


def test_checkpoints_by_the_clock_are_of_all_ranks(jobs):
    job = jobs.start(total=60, pauses=0.02, settings={"checkpoint_every": "0.3s", "keep_last": 50})
    job.hashes()
    steps = checkpoint_steps(jobs.folder)
    assert len(steps) >= 3
    for step in steps:
        (found,) = (jobs.folder / "checkpoints").glob(f"step-{step:012d}-*")
        assert len(list(found.glob("rank-*"))) == 2
    jobs.check_nothing_left()


@pytest.mark.nightly
def test_a_stop_while_a_checkpoint_is_asked_for(jobs, undisturbed):
    events = [(0, 8, "save", None), (1, 9, "gate", str(jobs.gate))]
    job = jobs.start(total=_TOTAL, events=events)
    job.wait_for("holding", 1)
    job.send(signal.SIGTERM, 1)
    jobs.open_gate()
    assert job.statuses() == [143, 143], job.outputs
    (step,) = set(job.steps_at_the_end())
    jobs.check_checkpoint(step, 2)
    jobs.check_nothing_left()
    assert jobs.start(total=_TOTAL, pauses=0.0).hashes() == undisturbed(total=_TOTAL)


def test_what_has_not_changed_is_linked_by_each_rank_also_after_a_resume(jobs):
    """With one that is kept: the folder that was linked from is gone each time."""
    settings = {"checkpoint_every": 8, "keep_last": 1}
    for total in (16, 24):
        job = jobs.start(total=total, settings=settings, frozen=50_000)
        job.hashes()
        (step, _, folder), *others = RunLayout(jobs.folder).checkpoint_folders()
        assert step == total
        assert others == []
        assert find_damage(folder) == []
        for rank, file in enumerate(read_manifest(folder).files):
            if total > 16:  # before, the first one may have been late, and this one the first
                assert fnmatch(file.linked[0].name, f"rank-{rank:05d}.step-*-a0001.safetensors")
                assert file.size_bytes < 0.25 * file.image_bytes
            loaded = read_checkpoint(folder, rank)
            names = [spec.name for spec in loaded.plan.specs]
            frozen = np.frombuffer(loaded.data(names.index("frozen")))
            assert set(frozen) == {rank + 0.5}
        jobs.check_nothing_left()


# With one epoch, the last save waits 20 s for ranks that never come to it. With three, which
# `make test` runs, the next boundary says it.
@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_uneven_numbers_of_batches_are_refused_with_the_count_of_each_rank(jobs, epochs):
    job = jobs.start(meets="files", loop="uneven", total=epochs)
    assert all(life.wait(60) for life in job.lives), job.outputs
    assert "in epoch 0 (rank 0: 14, rank 1: 12)" in job.outputs
    assert "ake room" not in job.outputs
    assert jobs.events("uneven-batches")[0]["batches"] == [[0, 14], [1, 12]]


def test_uneven_batches_of_ddp_under_join_are_refused_with_the_count_of_each_rank(
    fork_server, tmp_path
):
    jobs = Jobs(fork_server, tmp_path, script=JOIN)
    try:
        job = jobs.start(total=3)
        assert set(job.statuses(60)) == {1}, job.outputs
    finally:
        jobs.end()
    for rank in (0, 1):
        assert "in epoch 0 (rank 0: 14, rank 1: 12)" in job.output(rank)
        assert "DDP's Join is not supported" in job.output(rank)
    assert jobs.events("uneven-batches")[0]["batches"] == [[0, 14], [1, 12]]
