"""Tensors that do not change are held once, and a slot stays whole when they change after all."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from holdfast._run.saving import arena_builder, slot_memory
from holdfast._run.saving import snapshots as module
from holdfast._run.saving.arena_builder import shareable
from holdfast._run.saving.snapshots import Snapshots
from holdfast._state.capture_cache import CaptureCache
from holdfast._store.format.image import PAGE, plan_image
from holdfast._store.memory.arena import Arena, used_bytes
from holdfast._store.memory.pages import split
from tests.support import wait_until

torch = pytest.importorskip("torch")

FROZEN, TRAINED = 3_000_000, 20_000  # numbers of 4 bytes


class Taker:
    """A model with a frozen part, and its snapshots."""

    def __init__(self, frozen_kind: str = "frozen", **chosen) -> None:
        self.announced: list = []
        self.said: list[str] = []
        self.model = torch.nn.ParameterDict(
            {
                "base": torch.nn.Parameter(torch.randn(FROZEN), requires_grad=False),
                "adapter": torch.nn.Parameter(torch.zeros(TRAINED)),
                "head": torch.nn.Parameter(
                    torch.randn(FROZEN // 3), requires_grad=frozen_kind == "half"
                ),
            }
        )
        self.cache = CaptureCache()
        self.snapshots = Snapshots(
            run_id=os.urandom(16).hex(),
            attempt=1,
            announce=lambda *both: self.announced.append(both),
            say=self.said.append,
            **chosen,
        )
        self.state_bytes = sum(p.nbytes for p in self.model.values())

    @property
    def arena(self) -> Arena:
        return self.announced[-1][0]

    def take(self, step: int, patience: float = 20.0):
        with torch.no_grad():
            self.model["adapter"].fill_(step)
        captured = self.cache.capture({"model": self.model}, {})
        taken = self.snapshots.take(captured, {}, 2 * step, patience_seconds=patience)
        if taken is not None:
            self.arena.set_digests(taken.slot, taken.sequence, [b"d" * 16] * self.arena.ranges)
        return taken

    def take_all(self, *steps: int) -> None:
        for step in steps:
            assert self.take(step)
            wait_until(lambda: not self.snapshots.is_building)

    def tensors(self, arena: Arena | None = None, slot: int | None = None) -> dict:
        arena = arena or self.arena
        slot = arena.newest().slot if slot is None else slot
        plan, image = arena.plan(slot), arena.image(slot)
        return {
            spec.name: torch.frombuffer(image[at : at + spec.size_bytes], dtype=torch.float32)
            for spec, at in zip(plan.specs, plan.offsets, strict=True)
            if spec.size_bytes
        }

    def is_as_live(self, arena: Arena | None = None) -> bool:
        found = self.tensors(arena)
        return all(torch.equal(value, found[f"model.{name}"]) for name, value in self.model.items())


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(arena_builder, "_SMALL_BYTES", 0)
    monkeypatch.setattr(module, "_LINGER_SECONDS", 0.0)
    monkeypatch.setattr(slot_memory, "_ASK_SECONDS", 0.0)
    made = []

    def make(*arguments, **chosen) -> Taker:
        made.append(Taker(*arguments, **chosen))
        return made[-1]

    yield make
    for each in made:
        each.snapshots.close()
        for _, backing in each.announced:
            backing.remove()


def test_what_is_frozen_takes_memory_once(make):
    taker = make()
    taker.take_all(*range(1, 7))
    assert taker.arena.present() == [0, 1]
    assert len(taker.arena.shared) >= 1
    assert used_bytes(taker.arena.descriptor) < 1.1 * taker.state_bytes
    assert taker.is_as_live()
    assert {record.step for record in taker.arena.whole()} == {5, 6}
    for record in taker.arena.whole():
        adapter = taker.tensors(slot=record.slot)["model.adapter"]
        assert set(adapter.tolist()) == {record.step}


def test_another_process_finds_the_same_bytes_in_every_slot(make):
    taker = make()
    taker.take_all(1, 2, 3)
    with Arena(os.dup(taker.arena.descriptor)) as other:
        assert other.shared == taker.arena.shared
        for slot in (0, 1):
            assert bytes(other.image(slot)) == bytes(taker.arena.image(slot))
        assert taker.is_as_live(other)


@pytest.mark.parametrize("newest", [0, 1])
@pytest.mark.parametrize("patience", [0.0, 20.0])
def test_a_frozen_tensor_that_changes_gets_memory_in_each_slot(make, newest, patience):
    taker = make()
    taker.take_all(1, 2, 3, *([4] if newest else []))
    assert taker.arena.newest().slot == newest
    reader = Arena(os.dup(taker.arena.descriptor))
    before = {name: value.clone() for name, value in taker.tensors().items()}
    with torch.no_grad():
        taker.model["base"].view(-1)[FROZEN // 2] += 1
    step = 5
    while taker.take(step, patience) is None:
        # The previous snapshot keeps its bytes, in every process that maps it.
        reader.sync_shared()
        for arena in (taker.arena, reader):
            found = taker.tensors(arena)
            assert all(torch.equal(found[name], value) for name, value in before.items())
        step += 1
        time.sleep(0.001)
    assert (taker.arena.shared, taker.said) == ([], [])
    reader.sync_shared()
    old = next(record for record in taker.arena.whole() if record.step != step)
    for arena in (taker.arena, reader):
        assert taker.is_as_live(arena)
        if old.slot == newest:
            found = taker.tensors(arena, old.slot)
            assert all(torch.equal(found[name], value) for name, value in before.items())
    taker.take_all(step + 1, step + 2)
    assert taker.is_as_live()
    assert used_bytes(taker.arena.descriptor) > 1.9 * taker.state_bytes
    reader.close()


def test_while_the_keeper_reads_a_slot_nothing_is_unshared(make):
    taker = make()
    taker.take_all(1, 2)  # the newest one is in slot 1
    # A lock belongs to a process.
    code = "import fcntl; fcntl.lockf(0, fcntl.LOCK_EX, 1, 1); print('has it', flush=True)"
    keeper = subprocess.Popen(
        [sys.executable, "-c", f"{code}; import time; time.sleep(60)"],
        stdin=taker.arena.descriptor,
        stdout=subprocess.PIPE,
    )
    try:
        assert keeper.stdout.readline() == b"has it\n"
        with torch.no_grad():
            taker.model["base"].add_(1)
        shared = taker.arena.shared
        assert taker.take(3, 0.3) is None
        assert taker.arena.shared == shared
        assert taker.arena.newest().step == 2
    finally:
        keeper.kill()
        keeper.communicate()
    taker.take_all(4)
    assert (taker.arena.shared, taker.is_as_live()) == ([], True)


def test_without_memory_for_it_one_slot_is_left_and_that_is_said(make, monkeypatch):
    taker = make()
    taker.take_all(1, 2, 3)
    monkeypatch.setattr(slot_memory, "has_memory", lambda _: False)
    with torch.no_grad():
        taker.model["head"].add_(1)
    taker.take_all(4, 5)
    assert (taker.arena.present(), taker.is_as_live()) == ([0], True)
    assert used_bytes(taker.arena.descriptor) < 1.1 * taker.state_bytes
    assert "costs the work since the last checkpoint" in taker.said[0]


def test_a_third_slot_shares_too_and_the_one_with_the_memory_stays(make):
    taker = make()
    taker.take_all(1, 2)
    taker.snapshots.promise(taker.take(3))
    while len(taker.arena.present()) < 3:
        taker.take(4, 0.0)
    taker.take_all(5, 6, 7)
    assert used_bytes(taker.arena.descriptor) < 1.1 * taker.state_bytes
    taker.snapshots.release_slots()
    while len(taker.arena.present()) > 2:
        taker.take(8, 0.0)
    wait_until(lambda: not taker.snapshots.is_building)
    assert 0 in taker.arena.present()
    taker.take_all(9, 10)
    assert taker.is_as_live()


def test_a_tensor_that_moves_counts_as_changed(make):
    taker = make()
    taker.take_all(1, 2)
    taker.model["base"] = torch.nn.Parameter(taker.model["base"] + 1, requires_grad=False)
    taker.take_all(3, 4)
    assert taker.is_as_live()


def test_the_next_attempt_fills_what_is_shared_again(make):
    taker = make()
    taker.take_all(1, 2, 3)
    arena = Arena(os.dup(taker.arena.descriptor))
    arena.take_over(2, first=1)
    assert arena.begin() == 0
    arena.abandon(0)
    arena.close()


def test_only_whole_pages_of_frozen_tensors_are_shared(make):
    taker = make("half")
    captured = taker.cache.capture({"model": taker.model}, {})
    plan = plan_image(captured.specs, 100)
    names = [spec.name for spec in plan.specs]
    ranges = shareable(plan, [names.index("model.base")])
    at = plan.offsets[names.index("model.base")]
    ((start, size),) = ranges
    assert start % PAGE == size % PAGE == 0
    assert at <= start <= at + PAGE
    assert at + 4 * FROZEN - PAGE <= start + size <= at + 4 * FROZEN
    assert shareable(plan, []) == []


@pytest.mark.parametrize("ranges", [[], [(0, 5)], [(3, 4), (7, 2), (20, 9)], [(8, 100)]])
def test_the_parts_of_a_range_are_all_of_it(ranges):
    inside = {at for start, size in ranges for at in range(start, start + size)}
    for start in range(12):
        for size in range(20):
            parts = list(split(start, size, ranges))
            places = [(at, is_in) for first, n, is_in in parts for at in range(first, first + n)]
            assert places == [(at, at in inside) for at in range(start, start + size)]
