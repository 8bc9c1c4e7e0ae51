"""The arena of a killed attempt waits for the next one, which goes on from it and keeps it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast._store.memory.arena import Arena
from holdfast._store.memory.backing import open_leftover
from tests import cgroups
from tests.cgroups import limited_memory
from tests.cli.command import PROGRAM, holdfast, succeed
from tests.crash.stages import has_snapshot
from tests.often import few
from tests.support import (
    SCRIPTS,
    Trainer,
    arena_files,
    checkpoint_steps,
    environment,
    run_id,
    wait_for_keeper_gone,
    wait_until,
    words_of,
)

LIGHT = SCRIPTS / "light.py"
KEPT = ("--settings", json.dumps({"keep_memory": "5min", "max_overhead": 0.5}))
LONG = ("--total", 100_000, "--sleep", 0.002, *KEPT)


@pytest.fixture(autouse=True)
def _no_memory_stays(folder: Path) -> Iterator[None]:
    yield
    wait_for_keeper_gone(folder)
    for path in arena_files(folder):
        path.unlink()
    wait_until(lambda: not guards(folder), 10, "the guard's end")


def guards(folder: Path) -> list[psutil.Process]:
    """The processes that guard a waiting arena of this run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if "holdfast._store.memory.waiting" in words and run_id(folder) in words:
                found.append(process)
    return found


def waiting_arena(folder: Path) -> Arena:
    """The one arena of the run, which waits."""
    (path,) = arena_files(folder)
    descriptor = open_leftover(path)
    assert descriptor is not None
    arena = Arena(descriptor)
    assert arena.waits_until is not None
    return arena


def train_and_kill(folder: Path, start, *more, number: int = signal.SIGKILL, **options) -> Trainer:
    """Train until there is a snapshot of this attempt, and end it."""
    trainer = start(folder, *LONG, *more, script=LIGHT, **options)
    trainer.ready()
    attempt = int(trainer.wait_for("ready ").split()[3])
    wait_until(
        lambda: (
            has_snapshot(folder) and all(f"-a{attempt}-" in p.name for p in arena_files(folder))
        ),
        what="a snapshot of this attempt",
    )
    trainer.send(number)
    trainer.wait()
    wait_for_keeper_gone(folder)
    return trainer


def test_a_killed_run_goes_on_from_memory_to_the_same_bits_twice_in_a_row(folder, start):
    undisturbed = start(folder.with_name("undisturbed"), "--total", 3000, script=LIGHT)
    expected = undisturbed.state_hash()
    inodes = []
    for attempt in (1, 2):
        train_and_kill(folder, start)
        (path,) = arena_files(folder)
        assert f"-a{attempt}-" in path.name
        inodes.append(path.stat().st_ino)
        with waiting_arena(folder) as arena:
            newest = arena.newest()
            assert newest is not None
            assert newest.is_hashed
            assert newest.step == max(checkpoint_steps(folder)) < 3000
    assert inodes[0] == inodes[1]  # the second attempt has used the slots of the first
    last = start(folder, "--total", 3000, *KEPT, script=LIGHT)
    assert last.state_hash() == expected
    assert "from memory" in last.output
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    wait_until(lambda: not guards(folder), what="the guards' end")


@pytest.mark.nightly
def test_a_large_state_is_taken_over_while_the_training_goes_on(folder, start, light_reference):
    size = ("--size", 2_000_000)  # three slots of 16 MB are prepared by a thread
    train_and_kill(folder, start, *size)
    (path,) = arena_files(folder)
    inode = path.stat().st_ino
    total = max(checkpoint_steps(folder)) + 40
    again = start(folder, "--total", total, "--sleep", 0.02, *KEPT, *size, script=LIGHT)
    again.ready()
    taken = path.with_name(path.name.replace("-a1-", "-a2-"))
    wait_until(taken.exists, what="the takeover")
    assert arena_files(folder) == [taken]
    assert taken.stat().st_ino == inode
    assert again.state_hash() == light_reference(total, 2_000_000)
    assert "from memory" in again.output


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGUSR1, 75), (signal.SIGSEGV, -signal.SIGSEGV)]
)
def test_an_end_that_asks_for_a_restart_and_a_crash_leave_the_memory(number, status, folder, start):
    trainer = train_and_kill(folder, start, number=number)
    assert trainer.process.returncode == status
    with waiting_arena(folder) as arena:
        newest = arena.newest()
        assert newest is not None
        assert newest.step == max(checkpoint_steps(folder))
    again = start(folder, *LONG, script=LIGHT)
    again.wait_for(f"resumed at step {newest.step} from memory")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_that_is_wanted_leaves_nothing(number, folder, start):
    train_and_kill(folder, start, number=number)
    assert arena_files(folder) == []
    assert guards(folder) == []


def test_a_stop_after_a_takeover_leaves_nothing(folder, start):
    train_and_kill(folder, start)
    train_and_kill(folder, start, number=signal.SIGTERM)
    assert arena_files(folder) == []


def test_an_end_before_the_first_snapshot_of_the_next_attempt_leaves_it_nothing(folder, start):
    train_and_kill(folder, start)
    step = max(checkpoint_steps(folder))
    short = start(folder, "--total", step, *KEPT, script=LIGHT)  # it has no step to make
    short.state_hash()
    assert f"resumed at step {step} from memory" in short.output
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []


def test_a_kill_before_the_first_snapshot_leaves_it_to_the_attempt_after(folder, start, tmp_path):
    train_and_kill(folder, start)
    (path,) = arena_files(folder)
    step = max(checkpoint_steps(folder))
    gate = ("--hold-at", step, "--gate", tmp_path / "never")
    second = start(folder, *LONG, *gate, script=LIGHT)
    second.wait_for("holding")
    assert arena_files(folder) == [path]  # it is taken at the first snapshot, not before
    second.kill()
    second.wait()
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == [path]
    third = start(folder, *LONG, script=LIGHT)
    third.wait_for(f"resumed at step {step} from memory")


def test_nothing_is_left_when_its_time_is_over(folder, start):
    train_and_kill(folder, start, "--settings", json.dumps({"keep_memory": 1}))
    wait_until(lambda: not arena_files(folder) and not guards(folder), 20, "the end of its time")


def test_a_guard_that_is_asked_to_end_removes_it_first(folder, start):
    train_and_kill(folder, start)
    (guard,) = wait_until(lambda: guards(folder), what="the guard")
    guard.terminate()  # also while it starts
    wait_until(lambda: not guards(folder), 10, "the guard's end")
    assert arena_files(folder) == []


def test_a_guard_is_small_and_at_rest(folder, start):
    train_and_kill(folder, start)
    (guard,) = wait_until(lambda: guards(folder), what="the guard")
    wait_until(lambda: guard.status() == psutil.STATUS_SLEEPING, what="its first wait")
    assert guard.num_threads() == 1
    assert guard.memory_info().rss < 40 << 20
    assert not [f for f in guard.open_files() if "/dev/shm" in f.path or str(folder) in f.path]


def test_a_damaged_slot_is_noticed_and_the_disk_is_used(folder, start):
    train_and_kill(folder, start)
    with waiting_arena(folder) as arena:
        newest = arena.newest()
        assert newest is not None
        image = arena.image(newest.slot)
        image[arena.plan(newest.slot).offsets[0] + 8] ^= 1
        del image
    again = start(folder, *LONG, script=LIGHT)
    again.wait_for(f"the snapshot of step {newest.step} in memory: ")
    again.wait_for(f"resumed at step {newest.step} from disk")
    wait_until(
        lambda: [p for p in arena_files(folder) if "-a2-" in p.name] == arena_files(folder) != [],
        what="an arena of its own",
    )


_GROWING = """
    weights, more = make_weights(), []
    settings = holdfast.Settings(keep_memory="5min", max_overhead=0.5)
    with holdfast.Run(folder, settings=settings, weights=weights, more=more) as run:
        print("ready", run.step)
        for step in run.steps(100_000):
            if run.attempt == 2 and not more:
                more.append(weights.copy())  # the model is another one from now on
            train_one(weights)
            time.sleep(0.002)
"""


def test_a_changed_model_is_noticed_and_a_new_arena_is_made(folder, script):
    first = script(folder, _GROWING)
    first.ready()
    wait_until(lambda: has_snapshot(folder), what="a snapshot")
    first.kill()
    first.wait()
    wait_for_keeper_gone(folder)
    (path,) = arena_files(folder)
    inode = path.stat().st_ino
    again = script(folder, _GROWING)
    again.wait_for("from memory")
    wait_until(lambda: not path.exists() and has_snapshot(folder), what="a snapshot")
    (fresh,) = arena_files(folder)
    assert fresh.name.endswith("-a2-g2")
    assert fresh.stat().st_ino != inode
    wait_until(lambda: not guards(folder), 10, "the guard's end")


_DIES_IN_A_SNAPSHOT = """
    from holdfast._store.memory.arena import Arena

    weights = make_weights()
    settings = holdfast.Settings(keep_memory="5min", max_overhead=0.5)
    with holdfast.Run(folder, settings=settings, weights=weights) as run:
        print("ready", run.step)
        if run.attempt == 2:
            Arena.finish = lambda *_, **__: os.kill(os.getpid(), 9)
        for step in run.steps(100_000):
            train_one(weights)
            time.sleep(0.002)
"""


def test_a_kill_during_the_first_snapshot_leaves_the_slots_to_the_attempt_after(folder, script):
    first = script(folder, _DIES_IN_A_SNAPSHOT)
    first.ready()
    wait_until(lambda: has_snapshot(folder), what="a snapshot")
    first.kill()
    first.wait()
    wait_for_keeper_gone(folder)
    (path,) = arena_files(folder)
    inode, step = path.stat().st_ino, max(checkpoint_steps(folder))
    second = script(folder, _DIES_IN_A_SNAPSHOT)
    second.wait_for(f"resumed at step {step} from memory")
    assert second.wait() == -signal.SIGKILL
    wait_for_keeper_gone(folder)
    with waiting_arena(folder) as arena:
        assert arena.whole() == []
    third = script(folder, _DIES_IN_A_SNAPSHOT)
    third.wait_for(f"resumed at step {step} from disk")
    wait_until(lambda: has_snapshot(folder), what="a snapshot in the same slots")
    (taken,) = arena_files(folder)
    assert "-a3-" in taken.name
    assert taken.stat().st_ino == inode


_LIMIT = 400 << 20
_HOG = "import sys, time; b = b'x' * int(sys.argv[1]); print('full', flush=True); time.sleep(60)"


@pytest.mark.skipif(cgroups.why_not() is not None, reason=cgroups.why_not() or "")
def test_in_a_full_cgroup_it_goes_first(folder, start):
    with limited_memory(_LIMIT) as group:
        train_and_kill(folder, start, "--size", 4_000_000, prefix=group.prefix)  # 3 * 32 MB
        wait_until(lambda: guards(folder), what="the guard")
        assert arena_files(folder) != []
        wanted = int(0.95 * _LIMIT) - group.used_bytes()
        hog = subprocess.Popen(
            [*group.prefix, sys.executable, "-c", _HOG, str(wanted)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert hog.stdout is not None
            assert hog.stdout.readline() == "full\n"
            wait_until(lambda: not arena_files(folder), 20, "its end")
            assert hog.poll() is None
            assert group.oom_kills() == 0
        finally:
            hog.kill()
            hog.communicate()
        wait_until(lambda: not guards(folder), 10, "the guard's end")


def test_status_doctor_and_clean_name_it(folder, start):
    train_and_kill(folder, start)
    step = max(checkpoint_steps(folder))
    told = succeed("status", folder)
    assert f"step {step} waits for the next attempt: " in told
    assert "for another " in told
    (summary,) = json.loads(succeed("status", "--json", folder))
    assert summary["waiting"]["step"] == step
    assert 0 < summary["waiting"]["seconds_left"] <= 300
    assert f"step {step} waits for the next attempt" in holdfast("doctor", "--quick", folder).stdout
    (path,) = arena_files(folder)
    told = succeed("clean", folder)
    assert "kept for the next attempt, for " in told
    assert path.exists()
    succeed("clean", "--yes", folder)
    assert not path.exists()
    wait_until(lambda: not guards(folder), 10, "the guard's end")


def stage_of_a_takeover(folder: Path, stage: str) -> None:
    """What a kill leaves of a takeover by attempt 2, which had begun and made no snapshot."""
    (path,) = arena_files(folder)
    with waiting_arena(folder) as arena:
        if stage == "slots are empty":
            arena.void_from(0)
        elif stage != "before":
            arena.take_over(2)
    if stage == "renamed":
        path.rename(path.with_name(path.name.replace("-a1-", "-a2-")))


@pytest.mark.parametrize("stage", ["before", "slots are empty", "of attempt 2", "renamed"])
def test_a_kill_at_any_stage_of_the_takeover_loses_nothing(
    stage, folder, start, tmp_path, light_reference
):
    train_and_kill(folder, start)
    step = max(checkpoint_steps(folder))
    assert step < 3000
    second = start(folder, *LONG, "--hold-at", step, "--gate", tmp_path / "never", script=LIGHT)
    second.wait_for("holding")
    second.kill()
    second.wait()
    wait_for_keeper_gone(folder)
    stage_of_a_takeover(folder, stage)
    third = start(folder, "--total", 3000, *KEPT, script=LIGHT)
    assert third.ready() == step
    assert third.state_hash() == light_reference(3000)
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []


@pytest.mark.parametrize("in_job", few([False, True], [False]))
def test_under_holdfast_run_the_next_life_goes_on_from_memory(in_job, folder, start, tmp_path):
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"} if in_job else {}
    env = environment(
        HOLDFAST_STATE=str(tmp_path / "state"),
        HOLDFAST_PAUSE_SECONDS="0.01",
        HOLDFAST_KEEP_MEMORY="5min",
        **job,
    )
    lead = (str(PROGRAM), "run", "--")
    leader = start(folder, *LONG[:4], script=LIGHT, prefix=lead, env=env)
    leader.ready()
    wait_until(lambda: has_snapshot(folder), what="a snapshot")
    trainers = [p for p in psutil.Process(leader.pid).children() if str(LIGHT) in words_of(p)]
    trainers[0].kill()
    leader.wait_for("from memory")
    wait_until(lambda: leader.output.count("\nready ") + leader.output.startswith("ready ") == 2)
    leader.send(signal.SIGTERM)
    assert leader.wait() == 143, leader.output
    assert arena_files(folder) == []
    wait_until(lambda: not guards(folder), 10, "the end of the guard")  # it looks once a second


def test_in_a_job_nothing_waits_longer_than_holdfast_run(folder, start, tmp_path):
    env = environment(
        HOLDFAST_STATE=str(tmp_path / "state"),
        HOLDFAST_KEEP_MEMORY="5min",
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
    )
    lead = (str(PROGRAM), "run", "--max-restarts", "0", "--")
    leader = start(folder, *LONG[:4], script=LIGHT, prefix=lead, env=env)
    leader.ready()
    wait_until(lambda: has_snapshot(folder), what="a snapshot")
    trainers = [p for p in psutil.Process(leader.pid).children() if str(LIGHT) in words_of(p)]
    trainers[0].kill()
    assert leader.wait() == 137, leader.output
    assert arena_files(folder) == []
    assert guards(folder) == []


def test_in_a_job_without_holdfast_run_nothing_waits(folder, start):
    env = environment(HOLDFAST_KEEP_MEMORY="5min", SLURM_JOB_ID="7")
    train_and_kill(folder, start, "--settings", "{}", env=env)
    assert arena_files(folder) == []
