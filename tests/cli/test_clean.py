"""`holdfast clean`: what nobody needs goes, and what might be needed never does."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

from holdfast._store.folder.layout import RunLayout
from holdfast._store.memory.arena import Arena
from holdfast._store.memory.backing import open_leftover
from tests.cli.command import TRAIN_NUMPY, holdfast, status_of, succeed
from tests.cli.test_verify import flip
from tests.crash.stages import has_snapshot
from tests.support import SCRIPTS, arena_files, kill_both, wait_until

LIGHT = SCRIPTS / "light.py"
LONG_AGO = time.time() - 7200
NO_PID = 4_000_000_000  # more than any system gives out


@pytest.fixture
def run(folder, start):
    """A finished run with two checkpoints."""
    settings = json.dumps({"checkpoint_every": 5, "keep_last": 2})
    arguments = ("--total", 10, "--patience", 2, "--settings", settings)
    assert start(folder, *arguments, script=TRAIN_NUMPY).wait() == 0
    return folder


@pytest.fixture
def memory():
    """Forget what a test has left in shared memory."""
    left = []
    yield left.extend
    for path in left:
        path.unlink(missing_ok=True)


def plant(path, *, age=7200.0, size=2000):
    """A folder that something was left in, some time ago."""
    path.mkdir(parents=True)
    (path / "rank-00000.safetensors").write_bytes(b"x" * size)
    os.utime(path, (time.time() - age,) * 2)
    return path


def listed(*arguments, **options):
    return json.loads(succeed("clean", *arguments, "--json", **options))


def going(found):
    return {item["path"]: item for item in found["items"] if item["goes"]}


def files(folder):
    return sorted(path for path in folder.rglob("*"))


def test_a_tidy_run_has_nothing_to_clean(run):
    assert succeed("clean", run) == "There is nothing to clean.\n"
    before = files(run)
    assert succeed("clean", run, "--yes") == "There is nothing to clean.\n"
    assert files(run) == before


def test_everything_that_was_cut_short_is_shown_first_and_removed_when_asked(run):
    layout = RunLayout(run)
    before = files(run)
    planted = [
        plant(layout.set_aside / "step-000000000003-a0001"),
        plant(layout.set_aside / "partial-step-000000000003-a0001-7"),
        plant(layout.partial(layout.checkpoint(12, 1), NO_PID)),
        plant(layout.checkpoints / ".removing-step-000000000001-a0001"),
        plant(layout.attempts / f".claim-{NO_PID}-0badcafe"),
    ]
    for name in (f".run.json.{NO_PID}.new", f"attempts/0001/.lease.json.{NO_PID}.part"):
        (run / name).touch()
        os.utime(run / name, (LONG_AGO, LONG_AGO))
        planted.append(run / name)
    dirty = files(run)
    shown = succeed("clean", run)
    for path in planted:
        assert f"2.0 kB  {path}\n" in shown or f"0 B  {path}\n" in shown
    assert "damaged, never loaded; step 10 is whole" in shown
    assert (
        f"7 things, 10 kB. Nothing was removed yet. To do it: holdfast clean {run} --yes" in shown
    )
    assert files(run) == dirty
    found = listed(run)
    assert set(going(found)) == set(map(str, planted))
    assert found["size_bytes"] == 10_000
    shown = succeed("clean", run, "--yes")
    assert shown.endswith("7 things, 10 kB removed.\n")
    assert files(run) == before


@pytest.mark.parametrize("name", ["set-aside", "checkpoints", "attempts"])
def test_what_is_behind_a_symbolic_link_is_never_touched(run, tmp_path, name):
    home = tmp_path / "home"
    for inner in (".ssh", "step-000000000003-a0001", ".partial-step-000000000003-a0001.7"):
        plant(home / inner)
    if (run / name).exists():
        (run / name).rename(home / "moved")
    (run / name).symlink_to(home)
    before = files(home)
    shown = succeed("clean", run, "--yes")
    assert f"{run / name}\n" in shown
    assert "a symbolic link: holdfast touches nothing outside a run folder" in shown
    assert files(home) == before
    assert (run / name).is_symlink()


def test_a_run_with_a_linked_folder_hides_no_other_run(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "set-aside").symlink_to(tmp_path)
    planted = plant(RunLayout(run).set_aside / "step-000000000003-a0001")
    assert set(going(listed(run.parent))) == {str(planted)}


def test_what_holdfast_did_not_make_stays_in_set_aside(run, tmp_path):
    aside = RunLayout(run).set_aside
    planted = plant(aside / "void-step-000000000004-a0001.2")
    (plant(aside / "step-000000000003-a0001") / "thesis.tex").touch()
    plant(aside / "results")
    (aside / "notes.txt").touch()
    (aside / "step-000000000002-a0001").symlink_to(plant(tmp_path / "elsewhere"))
    before = [path for path in files(aside) if not path.is_relative_to(planted)]
    found = listed(run)
    assert set(going(found)) == {str(planted)}
    assert "holds thesis.tex, which holdfast did not make" in str(found)
    succeed("clean", run, "--yes")
    assert files(aside) == before
    assert files(tmp_path / "elsewhere")


def test_what_may_still_be_written_stays(run):
    layout = RunLayout(run)
    plant(layout.partial(layout.checkpoint(12, 1), os.getpid()))
    plant(layout.attempts / f".claim-{NO_PID}-0badcafe", age=0)
    (run / f".journal.jsonl.{os.getpid()}.part").touch()
    os.utime(run / f".journal.jsonl.{os.getpid()}.part", (LONG_AGO, LONG_AGO))
    before = files(run)
    shown = succeed("clean", run, "--yes")
    assert f"process {os.getpid()} may be writing it" in shown
    assert "just written" in shown
    assert files(run) == before


def test_a_start_that_is_under_way_makes_the_run_busy(run):
    plant(RunLayout(run).attempts / f".claim-{os.getpid()}-0badcafe")
    plant(RunLayout(run).set_aside / "step-000000000003-a0001")
    before = files(run)
    assert "is live: untouched" in succeed("clean", run, "--yes")
    assert files(run) == before


def test_damaged_checkpoints_stay_if_the_run_has_no_whole_one(run, start):
    layout = RunLayout(run)
    for _, _, path in layout.checkpoint_folders():
        flip(next(path.glob("*.safetensors")), 5000)
    assert start(run, script=TRAIN_NUMPY).wait() == 1  # sets both aside and refuses
    shown = succeed("clean", run, "--yes")
    assert "it is all that is left" in shown
    assert "There is nothing else to clean." in shown
    assert len(list(layout.set_aside.glob("step-*"))) == 2
    assert start(run, script=TRAIN_NUMPY).wait() == 1  # and never begins anew by itself


def test_a_live_run_is_never_touched(folder, start):
    trainer = start(folder, "--sleep", 0.01, script=TRAIN_NUMPY)
    trainer.ready()
    wait_until(lambda: status_of(folder)["memory_step"])
    layout = RunLayout(folder)
    planted = [
        plant(layout.set_aside / "step-000000000003-a0001"),
        plant(layout.partial(layout.checkpoint(12, 1), NO_PID)),
    ]
    shown = succeed("clean", folder, "--yes", "--drop-memory")
    assert shown == f"1 run; {folder} is live: untouched.\nThere is nothing to clean.\n"
    assert all(path.exists() for path in planted)
    assert arena_files(folder)
    assert listed(folder)["busy"] == [str(folder)]
    # And not for somebody who looks at all memory from another place either.
    (folder.parent / "elsewhere").mkdir()
    succeed("clean", "--yes", "--drop-memory", cwd=folder.parent / "elsewhere")
    assert arena_files(folder)


def test_memory_that_is_the_newest_state_goes_only_if_it_is_dropped(folder, start, memory):
    arena = left_in_memory(folder, start, memory)
    step = status_of(folder)["memory_step"]
    shown = succeed("clean", folder, "--yes")
    assert f"step {step} is the newest state of this run (nothing is on disk)" in shown
    assert "--drop-memory would remove it" in shown
    assert arena.exists()
    second = start(folder, "--sleep", 0.01, script=TRAIN_NUMPY)
    assert second.ready() == step
    wait_until(lambda: status_of(folder)["disk_step"] == step)
    wait_until(lambda: not arena.exists() and has_snapshot(folder, hashed=True))
    kill_both(folder, second)
    memory(arena_files(folder))
    shown = succeed("clean", folder, "--drop-memory")
    assert f"(on disk is step {step}); --drop-memory was given" in shown
    assert f"holdfast clean --drop-memory {folder} --yes" in shown
    assert arena_files(folder)
    succeed("clean", folder, "--drop-memory", "--yes")
    assert arena_files(folder) == []
    assert start(folder, "--total", 1, script=TRAIN_NUMPY).ready() == step


def test_memory_that_is_on_disk_too_goes(folder, start, tmp_path, memory):
    arguments = ("--hold-at", 5, "--gate", tmp_path / "gate", "--settings")
    trainer = start(folder, *arguments, json.dumps({"checkpoint_every": 5}), script=LIGHT)
    trainer.wait_for("holding 5")
    wait_until(lambda: status_of(folder)["disk_step"] == 5)
    kill_both(folder, trainer)
    memory(arena_files(folder))
    (checkpoint,) = RunLayout(folder).checkpoint_folders()
    data = next(checkpoint[2].glob("*.safetensors"))
    flip(data, 5000)
    assert "nothing is on disk" in succeed("clean", folder)  # a damaged one is none
    flip(data, 5000)
    (item,) = listed(folder)["items"]
    assert (item["kind"], item["goes"]) == ("memory", True)
    assert item["why"] == "its step 5 is on disk, or a later one"
    assert "94 kB removed" in succeed("clean", folder, "--yes")
    assert arena_files(folder) == []
    assert checkpoint[2].exists()


def test_memory_of_a_run_that_is_not_here_needs_time_and_a_word(folder, start, memory):
    arena = left_in_memory(folder, start, memory)
    shutil.rmtree(folder)
    here = folder.parent

    def about(*options):
        found = listed(*options, cwd=here)
        return next((item for item in found["items"] if item["path"] == str(arena)), None)

    assert "perhaps by a run in another container" in about("--drop-memory", "--yes")["why"]
    make_old(arena)
    assert about()["why"].endswith("--drop-memory would remove it")
    assert not about("--yes")["is_removed"]
    assert about("--drop-memory", "--yes")["is_removed"]
    assert not arena.exists()


def test_all_memory_is_looked_at_only_when_asked_or_without_folders(run, start, memory):
    stranger = run.parent / "stranger"
    arena = left_in_memory(stranger, start, memory)
    assert str(arena) not in succeed("clean", run)
    assert str(arena) in succeed("clean", run, "--all-memory")
    assert "is the newest state" in succeed("clean", run, stranger)


def test_an_arena_that_was_never_filled_goes(folder, start, memory):
    arena = left_in_memory(folder, start, memory)
    arena.write_bytes(bytes(20_000))
    (item,) = listed(folder, "--yes")["items"]
    assert item["is_removed"]
    assert item["why"] == "holds no snapshot that a start would use"


def left_in_memory(folder, start, memory):
    """The arena of a run that was killed with its keeper, before anything was on disk."""
    trainer = start(folder, "--sleep", 0.01, script=TRAIN_NUMPY)
    trainer.ready()
    wait_until(lambda: has_snapshot(folder, hashed=True))
    kill_both(folder, trainer)
    (arena,) = arena_files(folder)
    memory([arena])
    return arena


def make_old(path):
    """As if it had been written hours ago."""
    descriptor = open_leftover(path)
    with Arena(descriptor) as arena:
        for record in arena.whole():
            arena._set(record.slot, 3, int(LONG_AGO * 1e9))
    os.utime(path, (LONG_AGO, LONG_AGO))


def test_folders_of_runs_and_wrong_ones(run, start):
    other = run.parent / "other"
    assert start(other, "--total", 2, script=TRAIN_NUMPY).wait() == 0
    for folder in (run, other):
        plant(RunLayout(folder).set_aside / "step-000000000003-a0001")
    assert len(going(listed(run.parent))) == 2
    assert len(going(listed(run, other, run))) == 2
    done = holdfast("clean", run / "attempts")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove everything")
def test_what_cannot_be_removed_is_said_and_is_status_1(run):
    plant(RunLayout(run).set_aside / "step-000000000003-a0001")
    RunLayout(run).set_aside.chmod(0o500)
    done = holdfast("clean", run, "--yes")
    RunLayout(run).set_aside.chmod(0o700)
    assert done.returncode == 1
    assert "COULD NOT BE REMOVED" in done.stdout
