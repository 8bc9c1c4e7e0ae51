"""Copies that a device makes by itself: a slot counts from the moment at which all of it is there.

The device is a thread that copies when it is told to: what is tested is who may call a slot whole.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from holdfast._adapters.numpy import ADAPTER
from holdfast._run.saving.arena_builder import RawCopies
from holdfast._run.saving.snapshots import Snapshots, Taken
from holdfast._state.capture import capture
from holdfast._store.memory.arena import Arena
from holdfast._store.memory.backing import Backing


class SlowDevice:
    """Copies at once, as a device does into its spare buffer, and lets go when told."""

    cost_seconds = 0.25
    is_ahead = found_change = False

    def __init__(self, mapped, places, slots) -> None:
        self._mapped, self._places, self._slots = mapped, places, slots
        self.may_land = threading.Event()
        self.goes_well = True
        self.fails = False
        self.careful: list[bool] = []

    def begin(self, slot, values, *, careful, shared):
        assert not shared
        self.careful.append(careful)
        self._held = [np.array(value) for value in values]
        self._slot = self._slots[slot]
        return self

    def wait(self) -> bool:
        assert self.may_land.wait(20)
        if self.fails:
            raise RuntimeError("the device is gone")
        for (spec, offset), value in zip(self._places, self._held, strict=True):
            start = self._slot + offset
            self._mapped[start : start + spec.size_bytes] = value.tobytes()
        return self.goes_well

    def register(self, slot, start, size_bytes) -> None:
        pass

    def can_compare(self) -> bool:
        return False

    def forget(self, slot) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch):
    made: list[SlowDevice] = []

    def make(*arguments):
        made.append(SlowDevice(*arguments))
        return made[-1]

    monkeypatch.setattr(ADAPTER, "copies_by_itself", lambda spec: True)
    monkeypatch.setattr(ADAPTER, "device_copies", make)
    return made


@pytest.fixture
def arena_of():
    return []


@pytest.fixture
def snapshots(device, arena_of):
    told: list[tuple[int, bool]] = []
    lines: list[str] = []

    def announce(arena: Arena, backing: Backing) -> None:
        arena_of.append((arena, backing))

    def landed(taken: Taken, good: bool) -> None:
        told.append((taken.step, good))

    found = Snapshots(
        run_id="f" * 32, attempt=1, announce=announce, say=lines.append, landed=landed
    )
    found.told, found.lines = told, lines
    yield found
    for each in device:
        each.may_land.set()
    found.close()
    for _, backing in arena_of:
        backing.remove()


def take(snapshots, value: float, step: int, patience: float = 0.0):
    state = {"weights": np.full(1000, value)}
    return snapshots.take(capture(state), {}, 2 * step, patience_seconds=patience)


def landed(snapshots) -> bool:
    return snapshots.wait_for_copies(20)


def test_a_slot_is_whole_only_when_the_last_byte_has_come(snapshots, device, arena_of):
    taken = take(snapshots, 1.0, 1)
    arena = arena_of[0][0]
    assert (snapshots.in_flight, snapshots.newest, arena.newest()) == (taken, None, None)
    assert taken.device_seconds == SlowDevice.cost_seconds  # what it is known to lose counts
    assert not taken.is_hidden
    device[0].may_land.set()
    assert landed(snapshots)
    assert (snapshots.in_flight, snapshots.newest) == (None, taken)
    assert arena.newest().step == 1
    assert snapshots.told == [(1, True)]


def test_while_one_is_in_the_air_there_is_no_other_and_the_one_before_stays(
    snapshots, device, arena_of
):
    take(snapshots, 1.0, 1)
    device[0].may_land.set()
    assert landed(snapshots)
    device[0].may_land.clear()
    second = take(snapshots, 2.0, 2)
    assert snapshots.is_busy
    assert take(snapshots, 3.0, 3) is None
    assert arena_of[0][0].newest().step == 1
    threading.Timer(0.1, device[0].may_land.set).start()
    third = take(snapshots, 3.0, 3, patience=20)
    assert third is not None
    assert device[0].careful == [False, False, True]
    assert landed(snapshots)
    assert snapshots.newest == third
    assert second.slot != third.slot
    image = arena_of[0][0].image(third.slot)
    assert image[-9000:].tobytes().count(np.float64(3.0).tobytes()) > 0


@pytest.mark.parametrize("trouble", ["not right", "an error", "void"])
def test_what_does_not_land_well_leaves_the_one_before(snapshots, device, arena_of, trouble):
    take(snapshots, 1.0, 1)
    device[0].may_land.set()
    assert landed(snapshots)
    device[0].may_land.clear()
    take(snapshots, 2.0, 2)
    if trouble == "void":
        snapshots.void_from(2)
    device[0].goes_well = trouble != "not right"
    device[0].fails = trouble == "an error"
    device[0].may_land.set()
    assert landed(snapshots)
    assert arena_of[0][0].newest().step == 1
    assert snapshots.newest.step == 1
    assert snapshots.told == [(1, True), (2, False)]
    said = "the device is gone" in "".join(snapshots.lines)
    assert said == (trouble == "an error")
    device[0].goes_well, device[0].fails = True, False
    assert take(snapshots, 3.0, 3) is not None
    assert landed(snapshots)
    assert snapshots.newest.step == 3


def test_a_device_that_never_answers_does_not_hold_up_the_end(snapshots, device, monkeypatch):
    monkeypatch.setattr("holdfast._run.saving.snapshots._CLOSING_SECONDS", 0.1)
    take(snapshots, 1.0, 1)
    began = time.monotonic()
    snapshots.close()
    assert time.monotonic() - began < 5


def test_whoever_waits_for_a_slot_looks_after_those_who_read_them(snapshots, device):
    for step in (1, 2, 3):
        taken = take(snapshots, 1.0, step, patience=20)
        device[0].may_land.set()
        assert landed(snapshots)
        snapshots.promise(taken)
    looks = []

    def attend() -> None:
        looks.append(time.monotonic())
        snapshots.release_slot(
            1
        )  # as when another keeper has written what was promised to the first

    snapshots._attend = attend
    assert take(snapshots, 2.0, 4, patience=20).slot == 0
    assert len(looks) == 1


def test_an_interrupt_beside_the_device_keeps_the_slot_until_it_has_landed(
    snapshots, device, arena_of, monkeypatch
):
    def interrupt(_: RawCopies) -> None:
        raise KeyboardInterrupt

    take(snapshots, 1.0, 1)
    device[0].may_land.set()
    assert landed(snapshots)
    device[0].may_land.clear()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RawCopies, "run", interrupt)
        take(snapshots, 2.0, 2)
    assert take(snapshots, 3.0, 3) is None  # the device would write over it
    assert snapshots.in_flight is None
    device[0].may_land.set()
    assert landed(snapshots)
    assert [record.step for record in arena_of[0][0].whole()] == [1]
    assert snapshots.told == [(1, True)]
    fourth = take(snapshots, 4.0, 4)
    assert landed(snapshots)
    assert snapshots.newest == fourth


def test_where_no_thread_is_to_be_had_the_trainer_waits_for_the_device(
    snapshots, device, monkeypatch
):
    def refuse(_thread) -> None:
        raise RuntimeError("can't start new thread")

    take(snapshots, 1.0, 1)  # there is an arena, and a device, from here on
    device[0].may_land.set()
    assert landed(snapshots)
    snapshots._copies_in_flight._thread = None
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert take(snapshots, 2.0, 2).step == 2
    assert (snapshots.newest.step, snapshots.is_busy) == (2, False)
