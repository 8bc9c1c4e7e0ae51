"""How many slots have memory: one first, two usually, a third during a write, within the bound."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from holdfast._run.saving import arena_builder, slot_memory
from holdfast._run.saving import snapshots as module
from holdfast._run.saving.snapshots import Snapshots
from holdfast._state.capture import capture
from holdfast._store.memory import backing
from holdfast._store.memory.arena import Arena, used_bytes
from tests.support import wait_until

COUNT = 500_000
STATE_BYTES = 8 * COUNT


@pytest.fixture
def make(monkeypatch):
    """Snapshots of a state that counts as a large one."""
    monkeypatch.setattr(arena_builder, "_SMALL_BYTES", 0)
    monkeypatch.setattr(module, "_LINGER_SECONDS", 0.0)
    monkeypatch.setattr(slot_memory, "_ASK_SECONDS", 0.0)
    made = []

    def make(**chosen) -> Snapshots:
        announced: list[tuple[Arena, object]] = []
        said: list[str] = []
        found = Snapshots(
            run_id=os.urandom(16).hex(),
            attempt=len(made) + 1,
            announce=lambda *both: announced.append(both),
            say=said.append,
            **chosen,
        )
        found.announced, found.said = announced, said
        made.append(found)
        return found

    yield make
    for each in made:
        each.close()
        for _, found in each.announced:
            found.remove()


def take(snapshots, value: float, step: int, patience: float = 0.0):
    state = {"weights": np.full(COUNT, value)}
    return snapshots.take(capture(state), {}, 2 * step, patience_seconds=patience)


def arena_of(snapshots) -> Arena:
    return snapshots.announced[-1][0]


def hash_newest(snapshots) -> None:
    """As the keeper does."""
    arena = arena_of(snapshots)
    newest = arena.newest()
    arena.set_digests(newest.slot, newest.sequence, [b"d" * 16] * arena.ranges)


def value_in(snapshots) -> float:
    """What the newest whole slot holds: one value, or it is torn."""
    arena = arena_of(snapshots)
    newest = arena.newest()
    (offset,) = (
        at for spec, at in zip(*vars_of(arena.plan(newest.slot)), strict=True) if spec.shape
    )
    data = np.frombuffer(arena.image(newest.slot)[offset : offset + STATE_BYTES])
    (value,) = set(data.tolist())
    return value


def vars_of(plan):
    return plan.specs, plan.offsets


def present(snapshots) -> int:
    return len(arena_of(snapshots).present())


def two_slots(snapshots) -> None:
    assert take(snapshots, 1.0, 1, patience=20)
    wait_until(lambda: present(snapshots) == 2)
    hash_newest(snapshots)


def test_the_first_snapshot_needs_one_slot_only(make, monkeypatch):
    may_go_on = threading.Event()
    build = slot_memory.SlotMemory.build

    def build_slowly(self, slot: int) -> bool:
        assert slot == 0 or may_go_on.wait(20)
        return build(self, slot)

    monkeypatch.setattr(slot_memory.SlotMemory, "build", build_slowly)
    snapshots = make()
    assert take(snapshots, 1.0, 1, patience=20)
    assert present(snapshots) == 1
    assert used_bytes(arena_of(snapshots).descriptor) < 1.1 * STATE_BYTES
    # The only slot is what a kill leaves: it is not written over.
    assert not snapshots.can_take()
    assert take(snapshots, 2.0, 2) is None
    assert value_in(snapshots) == 1.0
    may_go_on.set()
    wait_until(snapshots.can_take)
    assert take(snapshots, 3.0, 3)
    assert (present(snapshots), value_in(snapshots)) == (2, 3.0)


def test_two_slots_take_twice_the_state_and_stay_two(make):
    snapshots = make()
    two_slots(snapshots)
    for step in range(2, 12):
        assert take(snapshots, float(step), step)
        hash_newest(snapshots)
        assert value_in(snapshots) == step
    assert present(snapshots) == 2
    assert used_bytes(arena_of(snapshots).descriptor) <= 2.1 * STATE_BYTES


def test_of_two_slots_the_hashed_one_stays_until_the_other_is_hashed(make, monkeypatch):
    snapshots = make()
    two_slots(snapshots)
    assert take(snapshots, 2.0, 2)
    assert not snapshots.can_take()
    assert take(snapshots, 3.0, 3) is None
    assert [r.step for r in arena_of(snapshots).whole() if r.is_hashed] == [1]
    hash_newest(snapshots)
    assert take(snapshots, 3.0, 3)
    # One that was asked for does not wait, and a keeper without a processor is not waited for.
    assert take(snapshots, 4.0, 4, patience=20)
    monkeypatch.setattr(module, "_HASHING_SECONDS", 0.0)
    assert take(snapshots, 5.0, 5)
    assert value_in(snapshots) == 5.0


def test_of_three_slots_the_hashed_one_stays_while_another_is_written(make, monkeypatch):
    monkeypatch.setattr(arena_builder, "_SMALL_BYTES", 1 << 30)
    snapshots = make()
    assert take(snapshots, 1.0, 1, patience=20)
    assert present(snapshots) == 3
    hash_newest(snapshots)
    written = take(snapshots, 2.0, 2)
    snapshots.promise(written)
    assert take(snapshots, 3.0, 3)
    assert not snapshots.can_take()
    assert take(snapshots, 4.0, 4) is None
    assert [r.step for r in arena_of(snapshots).whole() if r.is_hashed] == [1]
    snapshots.release_slot(written.sequence)
    assert take(snapshots, 4.0, 4)


def test_a_checkpoint_that_is_due_by_count_does_not_wait_for_checksums(make):
    snapshots = make()
    two_slots(snapshots)
    assert take(snapshots, 2.0, 2)
    assert not snapshots.can_take()
    assert snapshots.can_take(is_counted=True)
    state = capture({"weights": np.full(COUNT, 3.0)})
    assert snapshots.take(state, {}, 6, is_counted=True)
    assert value_in(snapshots) == 3.0


def test_during_a_write_there_is_a_third_slot_and_its_memory_is_given_back(make):
    snapshots = make()
    two_slots(snapshots)
    written = take(snapshots, 2.0, 2)
    hash_newest(snapshots)
    snapshots.promise(written)
    assert take(snapshots, 3.0, 3)
    hash_newest(snapshots)
    assert take(snapshots, 4.0, 4) is None  # one is being written, the other is the newest
    wait_until(lambda: present(snapshots) == 3)
    for step in range(5, 9):
        assert take(snapshots, float(step), step)
        hash_newest(snapshots)
        assert value_in(snapshots) == step
    assert used_bytes(arena_of(snapshots).descriptor) > 2.9 * STATE_BYTES
    assert {2} < {record.step for record in arena_of(snapshots).whole()}
    snapshots.release_slot(written.sequence)
    assert take(snapshots, 9.0, 9)
    wait_until(lambda: used_bytes(arena_of(snapshots).descriptor) < 2.1 * STATE_BYTES)
    assert (present(snapshots), value_in(snapshots)) == (2, 9.0)
    hash_newest(snapshots)
    for step in (10, 11):
        assert take(snapshots, float(step), step)
        hash_newest(snapshots)
        assert value_in(snapshots) == step


def test_without_plenty_of_memory_a_snapshot_during_a_write_is_skipped(make, monkeypatch):
    snapshots = make()
    two_slots(snapshots)
    monkeypatch.setattr(backing, "available_bytes", lambda: STATE_BYTES)
    snapshots.promise(take(snapshots, 2.0, 2))
    hash_newest(snapshots)
    assert take(snapshots, 3.0, 3)
    for step in range(4, 9):
        assert take(snapshots, float(step), step) is None
    assert (present(snapshots), value_in(snapshots)) == (2, 3.0)


@pytest.mark.parametrize(("slots", "most"), [(1, 1.5), (2, 2.5)])
def test_a_bound_is_kept(make, slots, most):
    snapshots = make(most_bytes=int(most * STATE_BYTES))
    taken = take(snapshots, 1.0, 1, patience=20)
    wait_until(lambda: present(snapshots) == slots)
    hash_newest(snapshots)
    snapshots.promise(taken)
    for step in range(2, 9):
        take(snapshots, float(step), step)
    snapshots.release_slot(taken.sequence)
    assert used_bytes(arena_of(snapshots).descriptor) <= most * STATE_BYTES
    said = "costs the work since the last checkpoint" in "".join(snapshots.said)
    assert said == (slots == 1)


def test_one_slot_is_written_over_but_not_while_it_is_being_written_to_disk(make):
    snapshots = make(most_bytes=int(1.5 * STATE_BYTES))
    taken = take(snapshots, 1.0, 1, patience=20)
    snapshots.promise(taken)
    assert take(snapshots, 2.0, 2) is None
    snapshots.release_slot(taken.sequence)
    assert take(snapshots, 2.0, 2)
    assert value_in(snapshots) == 2.0
    assert snapshots.said == [
        "memory=6.0 MB allows one snapshot in memory, not two: a kill while it is being replaced "
        "costs the work since the last checkpoint."
    ]


def test_a_bound_below_one_slot_leaves_checkpoints_only(make):
    snapshots = make(most_bytes=STATE_BYTES // 2)
    assert take(snapshots, 1.0, 1, patience=20) is None
    assert snapshots.impossible
    assert snapshots.said[0].startswith("no snapshots in memory: memory=2.0 MB is too little (one")


@pytest.mark.parametrize("trouble", ["no room", "an error", "little memory"])
def test_if_the_second_slot_cannot_be_made_one_is_used_and_that_is_said(make, monkeypatch, trouble):
    give = slot_memory.give_memory
    calls = []

    def refuse(*arguments) -> bool:
        calls.append(arguments)
        if len(calls) > 1 and trouble == "an error":
            raise ValueError("the driver")
        return len(calls) == 1 and give(*arguments)

    monkeypatch.setattr(slot_memory, "give_memory", refuse)
    if trouble == "little memory":
        monkeypatch.setattr(slot_memory, "has_memory", lambda _: False)
    snapshots = make()
    assert take(snapshots, 1.0, 1, patience=20)
    wait_until(lambda: snapshots.said)
    why = (
        "a slot cannot be made (the driver), which leaves"
        if trouble == "an error"
        else "memory allows"
    )
    assert snapshots.said[0].startswith(f"{why} one snapshot in memory, not two")
    assert take(snapshots, 2.0, 2)
    assert (present(snapshots), value_in(snapshots)) == (1, 2.0)
    assert len(calls) == (1 if trouble == "little memory" else 2)


def test_without_more_threads_the_trainer_builds_the_slots(make, monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    snapshots = make()
    monkeypatch.setattr(
        arena_builder.ArenaBuilder,
        "_start_building",
        lambda self, specs, size: self._build(specs, size, 1),
    )
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert take(snapshots, 1.0, 1)
    assert present(snapshots) == 2


def test_ranks_have_three_slots_from_the_start(make):
    snapshots = make(has_peers=True)
    assert take(snapshots, 1.0, 1, patience=20)
    wait_until(lambda: present(snapshots) == 3)
    snapshots = make(has_peers=True, most_bytes=int(1.5 * STATE_BYTES))
    assert take(snapshots, 1.0, 1, patience=20) is None
    assert "too little (two slots of" in snapshots.said[0]


def test_an_arena_is_closed_while_a_slot_is_being_built(make, monkeypatch):
    begun = threading.Event()

    def register(self, slot, start, size_bytes) -> None:
        if slot == 1:
            begun.set()
            while not self._is_closed:
                time.sleep(0.001)
            raise slot_memory._Closed

    monkeypatch.setattr(slot_memory.SlotMemory, "_register", register)
    snapshots = make()
    assert take(snapshots, 1.0, 1, patience=20)
    assert begun.wait(20)
    snapshots.close()
    assert snapshots.said == []


def test_an_arena_of_an_earlier_attempt_is_taken_over_with_its_slots(make):
    former = make()
    two_slots(former)
    assert take(former, 2.0, 2)
    hash_newest(former)
    arena, place = former.announced[0]
    again = Arena(os.dup(arena.descriptor))
    snapshots = make()
    snapshots._sequence = 2
    snapshots._builder.built = snapshots._builder._take_over(
        again, backing.Backing(again.descriptor, place.path), again.plan(0)
    )
    assert [record.step for record in again.whole()] == [2, 1]
    assert take(snapshots, 3.0, 3).generation == 1
    assert [record.step for record in again.whole()] == [3, 2]
    assert value_in(snapshots) == 3.0
