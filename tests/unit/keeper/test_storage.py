"""What the keeper does with slots: it hashes them, and lets one go that the trainer waits for."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from holdfast._keeper import storage
from holdfast._keeper.storage import HeldArena
from holdfast._store.commit.chunks import BackgroundPriority
from holdfast._store.format.checksum import digest
from holdfast._store.format.image import plan_image
from holdfast._store.memory.arena import Arena, arena_bytes
from holdfast.torch.adapter import ADAPTER as adapter

PLAN = plan_image([adapter.spec(name, torch.zeros(5 << 20)) for name in "abc"], 100)  # many chunks


@pytest.fixture
def arena():
    descriptor = os.memfd_create("test-arena")
    os.fchmod(descriptor, 0o600)
    os.posix_fallocate(descriptor, 0, arena_bytes(PLAN.size_bytes, len(PLAN.specs) + 2, 2))
    made = Arena.create(descriptor, run_id="0" * 32, attempt=1, generation=1, slots=2, plan=PLAN)
    for sequence in (1, 2):
        slot = made.begin()
        made.image(slot)[len(PLAN.header) :] = bytes([sequence]) * (
            PLAN.size_bytes - len(PLAN.header)
        )
        made.finish(slot, sequence=sequence, mark=2 * sequence)
    yield made
    made.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_a_slot_that_the_trainer_waits_for_is_let_go_and_the_newest_is_not(
    arena, monkeypatch, threads
):
    monkeypatch.setattr(storage, "_MOST_HASHERS", threads)
    held = HeldArena(arena, None)
    newest, older = arena.whole()
    arena.want()
    for record in (newest, older):
        assert held.pin(record)
        held.hash_until_wanted(record)
        held.unpin(record.slot)
    newest, older = arena.whole()
    assert (newest.is_hashed, older.is_hashed) == (True, False)
    image = arena.image(newest.slot)
    assert arena.digests(newest.slot) == [digest(image[a : a + n]) for _, a, n in PLAN.extents()]
    assert arena.begin() == older.slot  # and from now on nothing is wanted
    assert not any(arena.wanted(slot) for slot in range(2))


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_a_snapshot_that_waits_for_checksums_gets_them_at_full_priority(
    arena, monkeypatch, is_asked_for
):
    """A thread at the lowest priority gets no CPU time for seconds on a busy machine."""
    is_held, may_go_on = threading.Event(), threading.Event()

    class StarvedPriority(BackgroundPriority):
        @contextlib.contextmanager
        def background(self):
            is_held.set()
            assert may_go_on.wait(60)
            yield

    monkeypatch.setattr(storage, "PRIORITY", StarvedPriority())
    held, newest = HeldArena(arena, None), arena.whole()[0]
    assert held.pin(newest)
    hashing = threading.Thread(target=held.hash_until_wanted, args=(newest,))
    hashing.start()
    assert is_held.wait(60)
    if is_asked_for:
        arena.want_hashed()
    deadline = time.monotonic() + (60 if is_asked_for else 0.1)
    while not arena.whole()[0].is_hashed and time.monotonic() < deadline:
        time.sleep(0.005)
    assert arena.whole()[0].is_hashed == is_asked_for
    may_go_on.set()
    hashing.join()
    held.unpin(newest.slot)
    assert arena.whole()[0].is_hashed
    arena.begin()
    assert not any(arena.wanted(slot) for slot in range(2))


def test_a_hashing_that_was_left_goes_on_later_to_the_same_checksums(arena):
    held = HeldArena(arena, None)
    older = arena.whole()[1]
    assert held.pin(older)
    hashing = held.source(older).hashing
    looks = iter([False, True])
    hashing.work(until=lambda: next(looks))  # one chunk
    assert not hashing.is_done
    held.hash_until_wanted(older)
    assert arena.whole()[1].is_hashed
    image = arena.image(older.slot)
    expected = [digest(image[at : at + size]) for _, at, size in PLAN.extents()]
    assert arena.digests(older.slot) == expected
    assert arena.hashed_at(older.slot, older.sequence) is not None
    assert arena.hashed_at(older.slot, older.sequence + 1) is None
    held.unpin(older.slot)


_LOCK = """
import fcntl, sys, time
descriptor, slot, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, slot)
print("locked", flush=True)
time.sleep(seconds)
"""


@pytest.mark.parametrize(("seconds", "is_free"), [(0.3, True), (60, False)])
def test_a_slot_that_a_dying_process_still_locks_is_waited_for(
    arena, monkeypatch, capfd, seconds, is_free
):
    monkeypatch.setattr(storage, "_DYING_SECONDS", 30.0 if is_free else 0.05)
    held, newest = HeldArena(arena, None), arena.whole()[0]
    words = [sys.executable, "-c", _LOCK, *map(str, (arena.descriptor, newest.slot, seconds))]
    pipes = {"stdout": subprocess.PIPE, "pass_fds": [arena.descriptor]}
    with subprocess.Popen(words, **pipes) as other:
        assert other.stdout.readline() == b"locked\n"
        assert not held.pin(newest)
        held.wait_until_free(newest.slot)
        assert held.pin(newest) == is_free
        other.kill()
    assert ("is still locked" in capfd.readouterr().out) != is_free
