"""Flipped bits and cut files: a damaged state is never loaded and never hides a good one.

Two hundred random damages to manifests, data files and arenas. Whatever is found
afterwards has exactly the values that were saved at its step.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast._keeper.storage import HeldArena
from holdfast._run.saving.snapshots import Snapshots
from holdfast._state.capture import capture, capture_generators
from holdfast._state.restore import restore_state
from holdfast._store.folder.layout import MANIFEST, RunLayout, rank_file
from holdfast._store.format.image import PAGE
from holdfast._store.memory.arena import _MARK, _RECORD_WORDS
from holdfast._store.read.find import find_newest, open_leftovers
from holdfast._store.read.merge_ranks import read_checkpoint
from tests.support import (
    SCRIPTS,
    checkpoint_steps,
    journal_events,
    run_id,
    train_to_the_end,
    wait_for_keeper_gone,
    wait_until,
)

LIGHT = SCRIPTS / "light.py"
DISK_CASES = 140
ARENA_CASES = 60
LINE: dict[int, int | None] = {1: None}
IN_MEMORY = (1050, 1051, 1052)


@dataclass
class Saved:
    """A run with four checkpoints and an arena of three snapshots, and what is in each."""

    folder: Path
    known: dict[int, np.ndarray]
    arena_name: str = ""
    arena: bytes = b""
    places: list[int] = field(default_factory=list)  # the slot of each of IN_MEMORY


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved") / "run"
    rng = np.random.default_rng(3)
    weights, known = np.zeros(700), {}
    settings = holdfast.Settings(checkpoint_every="1h", keep_last=4)
    with holdfast.Run(folder, settings=settings, weights=weights, name="a") as run:
        for wanted in range(4):
            handle = run.save()
            while handle.step is None:
                weights += rng.standard_normal(700)
                known[run.step + 1] = weights.copy()
                run.boundary()
            handle.wait(60)
            assert len(checkpoint_steps(folder)) == wanted + 1
    made = Saved(folder, known)
    _fill_arena(made, weights, rng)
    return made


def _fill_arena(made: Saved, weights: np.ndarray, rng: np.random.Generator) -> None:
    announced = []
    snapshots = Snapshots(
        run_id=run_id(made.folder),
        attempt=1,
        announce=lambda arena, backing: announced.append((arena, backing)),
        say=print,
    )
    for step in IN_MEMORY:
        weights += rng.standard_normal(700)
        made.known[step] = weights.copy()
        captured = capture({"weights": weights, "name": "a"}, {"generators": capture_generators()})
        taken = snapshots.take(captured, {"attempt": 1, "metrics": {}}, 2 * step)
        assert taken is not None
        made.places.append(taken.slot)
    arena, backing = announced[0]
    for record in arena.whole():
        HeldArena(arena, None).digests(record)
    assert backing.path is not None
    made.arena_name, made.arena = backing.path.name, backing.path.read_bytes()
    backing.remove()
    announced.clear()
    snapshots.close()


def flip_or_cut(data: bytes, rng: random.Random, where: range | None = None) -> bytes:
    """The same bytes with one to three bits flipped, or cut short."""
    if rng.random() < 0.3:
        return data[: rng.randrange(len(data))]
    found = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.choice(where or range(len(found)))
        found[at] ^= 1 << rng.randrange(8)
    return bytes(found) if bytes(found) != data else flip_or_cut(data, rng, where)


def check_values(found, saved: Saved) -> None:
    """What was found is what was saved at that step, and goes into live objects so."""
    state = {"weights": np.zeros(700), "name": ""}
    assert restore_state(state, found.loaded) == []
    assert found.attempt == 1
    assert found.loaded.head["step"] == found.step
    assert np.array_equal(state["weights"], saved.known[found.step])
    assert state["name"] == "a"


def check_set_aside(folder: Path, damaged: dict[str, Path], said: list[str], copy: Path) -> None:
    """Each damaged checkpoint was moved as it is, with one line and one journal entry."""
    aside = {e["name"]: Path(e["where"]) for e in journal_events(folder, "set-aside")}
    assert set(aside) == set(damaged)
    for name, where in aside.items():
        assert where.parent == RunLayout(folder).set_aside
        for file in (MANIFEST, rank_file(0)):
            assert (where / file).read_bytes() == (copy / name / file).read_bytes()
        assert sum(str(where) in line for line in said) == 1
    assert len(said) == len(damaged)


@pytest.mark.parametrize("seed", range(DISK_CASES // 20))
def test_damaged_checkpoints_are_never_loaded_and_hide_no_good_one(seed, saved, tmp_path):
    rng = random.Random(seed)
    noticed = 0
    for case in range(20):
        folder, copy = tmp_path / f"run-{case}", tmp_path / f"copy-{case}"
        shutil.copytree(saved.folder, folder)
        layout = RunLayout(folder)
        folders = [path for _, _, path in layout.checkpoint_folders()]
        # The newest always, older ones sometimes, now and then all of them.
        count = rng.choice([1, 1, 1, 2, 3, 4])
        damaged = {path.name: path for path in folders[-count:]}
        for path in damaged.values():
            target = path / rng.choice([MANIFEST, rank_file(0)])
            target.write_bytes(flip_or_cut(target.read_bytes(), rng))
        shutil.copytree(layout.checkpoints, copy)
        good = [step for step, _, path in layout.checkpoint_folders() if path.name not in damaged]

        said: list[str] = []
        if not good:
            with pytest.raises(holdfast.NoGoodCheckpoint):
                find_newest(layout, LINE, [], said.append)
            check_set_aside(folder, damaged, said, copy)
            # Nothing is begun anew behind the user's back, the second time neither.
            with pytest.raises(holdfast.NoGoodCheckpoint):
                find_newest(layout, LINE, [], said.append)
            noticed += count
            continue
        found = find_newest(layout, LINE, [], said.append)
        assert found is not None
        check_values(found, saved)
        assert found.step == max(good), f"seed {seed}, case {case}"
        check_set_aside(folder, damaged, said, copy)
        noticed += count
        for step, _, path in layout.checkpoint_folders():
            assert read_checkpoint(path).head["step"] == step
        assert [step for step, _, _ in layout.checkpoint_folders()] == good
    assert noticed >= 20


@contextlib.contextmanager
def leftovers(saved: Saved, data: bytes):
    """What `open_leftovers` makes of these bytes in the arena's place."""
    path = Path("/dev/shm") / saved.arena_name
    path.touch(0o600)
    path.write_bytes(data)
    found = open_leftovers(run_id(saved.folder))
    try:
        yield found
    finally:
        path.unlink()
        for leftover in found:
            leftover.arena.close()


def find_in(saved: Saved, folder: Path, data: bytes) -> tuple[int, list[str]]:
    """The step that is found beside an arena of these bytes; its values are right."""
    said: list[str] = []
    with leftovers(saved, data) as found_arenas:
        found = find_newest(RunLayout(folder), LINE, found_arenas, said.append)
        assert found is not None
        check_values(found, saved)
        step = found.step
        del found
    return step, said


@pytest.mark.parametrize("seed", range(ARENA_CASES // 20))
def test_a_damaged_arena_never_gives_a_wrong_value(seed, saved, tmp_path):
    rng = random.Random(1000 + seed)
    folder = tmp_path / "run"
    shutil.copytree(saved.folder, folder)
    on_disk = checkpoint_steps(folder)
    steps = []
    # Anywhere, in what comes before the slots, and in the newest slot, which is the last.
    size = len(saved.arena)
    assert saved.places[-1] == 2
    places = [range(size), range(5 * PAGE), range(size - (size - 5 * PAGE) // 3, size)]
    for case in range(20):
        data = flip_or_cut(saved.arena, rng, places[case % 3])
        step, said = find_in(saved, folder, data)
        assert step in (*IN_MEMORY, on_disk[-1])
        assert all("in memory" in line and "is not used" in line for line in said)
        steps.append(step)
        assert checkpoint_steps(folder) == on_disk
    assert len(set(steps)) > 1, "no damage made a difference"
    told = {event["step"] for event in journal_events(folder, "damaged")}
    assert told <= set(IN_MEMORY)


def test_a_whole_arena_is_used_and_a_damaged_tensor_in_it_is_told(saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved.folder, folder)
    assert find_in(saved, folder, saved.arena) == (IN_MEMORY[-1], [])
    data = bytearray(saved.arena)
    at = data.index(saved.known[IN_MEMORY[-1]].tobytes())
    data[at + 100] ^= 4
    step, said = find_in(saved, folder, bytes(data))
    assert step == IN_MEMORY[-2]
    assert len(said) == 1
    assert f"the snapshot of step {IN_MEMORY[-1]} in memory: tensor weights has checksum" in said[0]
    assert [e["step"] for e in journal_events(folder, "damaged")] == [IN_MEMORY[-1]]


@pytest.mark.parametrize("bit", range(0, 24, 3))
def test_a_flipped_bit_in_the_step_of_a_slot_does_not_move_the_run(bit, saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved.folder, folder)
    data = bytearray(saved.arena)
    place = PAGE + 8 * (saved.places[-1] * _RECORD_WORDS + _MARK)
    (mark,) = struct.unpack_from("<Q", data, place)
    assert mark == 2 * IN_MEMORY[-1]
    struct.pack_into("<Q", data, place, mark ^ (1 << bit))
    found, said = find_in(saved, folder, bytes(data))
    assert found == IN_MEMORY[-2]
    # If it now looks older than what is used, nobody need look at it.
    assert len(said) == ((mark ^ (1 << bit)) // 2 > IN_MEMORY[-2])


def flip_manifest(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_data(checkpoint: Path) -> None:
    path = checkpoint / rank_file(0)
    data = bytearray(path.read_bytes())
    data[PAGE + 1234] ^= 16
    path.write_bytes(data)


def cut_data(checkpoint: Path) -> None:
    path = checkpoint / rank_file(0)
    path.write_bytes(path.read_bytes()[:-PAGE])


@pytest.fixture
def killed(folder, start, tmp_path):
    """A run with three checkpoints and nobody in it."""
    settings = json.dumps({"checkpoint_every": 10, "max_overhead": 0})
    arguments = (folder, "--total", 100, "--patience", 2, "--settings", settings)
    trainer = start(*arguments, "--hold-at", 35, "--gate", tmp_path / "never", script=LIGHT)
    trainer.wait_for("holding")
    wait_until(lambda: checkpoint_steps(folder) == [10, 20, 30], what="three checkpoints")
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) == [10, 20, 30]
    return arguments


@pytest.mark.parametrize("damage", [flip_manifest, flip_data, cut_data])
def test_a_training_goes_on_from_the_checkpoint_before_a_damaged_one(
    damage, killed, folder, start, tmp_path
):
    newest = RunLayout(folder).checkpoint(30, 1)
    damage(newest)
    again = start(*killed, script=LIGHT)
    assert again.ready() == 20
    assert "It was set aside" in again.output
    assert "resumed at step 20 from disk" in again.output
    aside = journal_events(folder, "set-aside")
    assert [event["name"] for event in aside] == [newest.name]
    assert Path(aside[0]["where"]).is_dir()
    expected = train_to_the_end(tmp_path / "undisturbed", "--total", 100, script=LIGHT)
    assert again.state_hash() == expected
    assert "Traceback" not in again.output


def test_a_training_is_refused_each_time_when_no_checkpoint_is_whole(killed, folder, start):
    for _, _, path in RunLayout(folder).checkpoint_folders():
        flip_data(path)
    for _ in range(2):
        refused = start(*killed, script=LIGHT)
        assert refused.wait() == 1
        assert "no checkpoint of this run is whole" in refused.output
        assert "Traceback" not in refused.output
        assert "ready " not in refused.output
    assert len(journal_events(folder, "set-aside")) == 3
