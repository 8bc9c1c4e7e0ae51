"""The arena: one whole slot at every instant, and locks that end with their process."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._keeper.storage import Storage
from holdfast._store.commit.write import Policy
from holdfast._store.folder.layout import RunLayout
from holdfast._store.format.image import PAGE, plan_image
from holdfast._store.memory.arena import MAX_SLOTS, Arena, NotAnArena, arena_bytes
from holdfast.torch.adapter import ADAPTER as adapter

RUN = "0123456789abcdef" * 2
PLAN = plan_image([adapter.spec("w", torch.zeros(100))], 100)


def make(slots=3):
    descriptor = os.memfd_create("test-arena")
    os.fchmod(descriptor, 0o600)
    os.posix_fallocate(descriptor, 0, arena_bytes(PLAN.size_bytes, len(PLAN.specs) + 2, slots))
    return Arena.create(descriptor, run_id=RUN, attempt=7, generation=2, slots=slots, plan=PLAN)


@pytest.fixture
def arena():
    with make() as made:
        yield made


def take(arena, sequence, held=()):
    slot = arena.begin(held)
    assert slot is not None
    arena.finish(slot, sequence=sequence, mark=sequence * 20)
    return slot


@contextlib.contextmanager
def child_that_locks(descriptor, slot):
    """A real process, forked, that holds the lock of a slot until it is killed."""
    ready_read, ready_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready_read)
        theirs = Arena(descriptor)  # a name: unmapping it would let go of the lock
        os.write(ready_write, b"y" if theirs.try_lock(slot) else b"n")
        signal.pause()
        os._exit(0)
    os.close(ready_write)
    try:
        assert os.read(ready_read, 1) == b"y"
        yield pid
    finally:
        os.close(ready_read)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_fresh_arena_has_no_whole_slot_and_knows_who_it_is(arena):
    assert arena.whole() == []
    assert arena.newest() is None
    assert (arena.run_id, arena.attempt, arena.generation, arena.slots) == (RUN, 7, 2, 3)
    assert [arena.plan(slot) for slot in range(3)] == [PLAN] * 3


def test_a_slot_is_whole_only_when_it_is_finished(arena):
    slot = arena.begin()
    assert arena.newest() is None
    arena.finish(slot, sequence=1, mark=100)
    newest = arena.newest()
    assert (newest.slot, newest.sequence, newest.step, newest.is_hashed) == (slot, 1, 50, False)


def test_the_newest_whole_slot_is_never_written_over(arena):
    before = take(arena, 1)
    for sequence in range(2, 30):
        slot = arena.begin()
        assert slot != before
        assert arena.newest().slot == before  # what a kill would leave now
        arena.finish(slot, sequence=sequence, mark=2 * sequence)
        before = slot


def test_a_slot_that_was_given_up_is_not_whole_and_free_again(arena):
    kept = take(arena, 1)
    slot = arena.begin()
    arena.abandon(slot)
    assert [record.slot for record in arena.whole()] == [kept]
    assert arena.begin() == slot


def test_slots_that_are_held_are_left_alone(arena):
    newest = take(arena, 1)
    others = {0, 1, 2} - {newest}
    for held in others:
        slot = arena.begin({held})
        assert slot == (others - {held}).pop()
        arena.abandon(slot)
    assert arena.begin(others) is None


def test_the_newest_hashed_slot_is_the_last_to_be_written_over(arena):
    hashed = take(arena, 1)
    arena.set_digests(hashed, 1, [b""])
    for sequence in range(2, 6):  # a keeper that gets no processor hashes none of these
        assert take(arena, sequence) != hashed
    others = [slot for slot in range(3) if slot != hashed]
    assert arena.begin(others) == hashed


def test_with_one_slot_there_is_nothing_to_write_in_once_it_is_whole():
    with make(slots=1) as arena:
        take(arena, 1)
        assert arena.begin() is None


def test_a_process_that_reads_a_slot_keeps_the_writer_off_and_its_death_frees_it(arena):
    newest = take(arena, 1)
    free = sorted({0, 1, 2} - {newest})
    with child_that_locks(arena.descriptor, free[0]) as reader:
        slot = arena.begin()
        assert slot == free[1]
        arena.abandon(slot)
        assert not arena.try_lock(free[0])
        assert arena.begin({free[1]}) is None
        end(reader)
        assert arena.begin({free[1]}) == free[0]


def test_a_writer_that_dies_in_the_middle_leaves_the_slot_before_it_whole(arena):
    kept = take(arena, 1)
    pid = os.fork()
    if pid == 0:
        theirs = Arena(arena.descriptor)
        theirs.begin()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert [record.slot for record in arena.whole()] == [kept]
    slot = arena.begin()  # the dead writer's lock went with it
    assert slot is not None
    assert slot != kept


def test_checksums_count_only_for_the_state_they_were_made_of(arena):
    slot = take(arena, 1)
    digests = [bytes([i]) * 16 for i in range(arena.ranges)]
    arena.set_digests(slot, 1, digests)
    assert arena.newest().is_hashed
    assert arena.digests(slot) == digests
    other = take(arena, 2)
    take(arena, 3)
    assert take(arena, 4, held={other}) == slot
    assert not arena.newest().is_hashed


def test_the_tables_and_slots_do_not_overlap(arena):
    for slot in range(3):
        arena.image(slot)[len(PLAN.header) :] = bytes([slot + 1]) * (
            PLAN.size_bytes - len(PLAN.header)
        )
        arena.set_digests(slot, 9, [bytes([0xF0 + slot]) * 16] * arena.ranges)
    for slot in range(3):
        assert set(arena.image(slot)[len(PLAN.header) :]) == {slot + 1}
        assert set(b"".join(arena.digests(slot))) == {0xF0 + slot}
        assert arena.plan(slot) == PLAN


operations = st.lists(
    st.tuples(st.sampled_from(["finish", "abandon", "die", "hash"]), st.sets(st.integers(0, 4))),
    max_size=40,
)


@settings(max_examples=60)
@given(slots=st.integers(1, 5), steps=operations)
def test_no_sequence_of_operations_loses_the_newest_whole_slot(slots, steps):
    with make(slots) as arena:
        sequence, model = 0, {}  # slot → sequence of what is whole in it
        for operation, held in steps:
            newest = max(model, key=model.get, default=None)
            if operation == "hash" and newest is not None:
                arena.set_digests(newest, model[newest], [b"d" * 16] * arena.ranges)
                assert arena.newest().is_hashed
                continue
            slot = arena.begin(held)
            free = set(range(slots)) - held - {newest}
            if slot is None:
                assert not free
                continue
            assert slot in free
            model.pop(slot, None)
            if operation == "finish":
                sequence += 1
                arena.finish(slot, sequence=sequence, mark=2 * sequence)
                model[slot] = sequence
            elif operation == "abandon":
                arena.abandon(slot)
            # "die": a writer that was killed in the middle leaves the slot as it is
            assert {r.slot: r.sequence for r in arena.whole()} == model
            assert [r.sequence for r in arena.whole()] == sorted(model.values(), reverse=True)


# -- what is no arena ------------------------------------------------------------


def opened(tmp_path, data, mode=0o600):
    path = tmp_path / "arena"
    path.write_bytes(data)
    path.chmod(mode)
    return os.open(path, os.O_RDWR)


@pytest.fixture
def whole_bytes():
    with make() as arena:
        return bytes(arena.mapped)


def refuse(descriptor):
    try:
        with pytest.raises(NotAnArena) as refused:
            Arena(descriptor)
        return str(refused.value)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o606, 0o601])
def test_a_file_that_others_may_touch_is_refused(tmp_path, whole_bytes, mode):
    assert "private" in refuse(opened(tmp_path, whole_bytes, mode))


def test_a_file_of_another_user_is_refused(tmp_path, whole_bytes, monkeypatch):
    descriptor = opened(tmp_path, whole_bytes)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "private" in refuse(descriptor)


def test_a_folder_a_pipe_and_a_device_are_refused(tmp_path):
    for descriptor in (os.open(tmp_path, os.O_RDONLY), os.open("/dev/zero", os.O_RDWR)):
        refuse(descriptor)


def test_every_length_shorter_than_the_whole_is_refused(tmp_path, whole_bytes):
    for length in (0, 1, PAGE, 3 * PAGE - 1, 3 * PAGE, len(whole_bytes) - 1):
        refuse(opened(tmp_path, whole_bytes[:length]))
    Arena(opened(tmp_path, whole_bytes)).close()


@settings(max_examples=50)
@given(head=st.binary(max_size=120))
def test_garbage_is_refused(tmp_path_factory, head):
    refuse(opened(tmp_path_factory.mktemp("garbage"), head.ljust(4 * PAGE, b"\xaa")))


@pytest.mark.parametrize("slots", [0, MAX_SLOTS + 1, 2**63])
def test_a_number_of_slots_that_cannot_be_is_refused(tmp_path, whole_bytes, slots):
    at = 16 + 32 + 2 * 8
    data = whole_bytes[:at] + slots.to_bytes(8, "little") + whole_bytes[at + 8 :]
    refuse(opened(tmp_path, data))


@pytest.mark.parametrize("length", [0, 100, PAGE - 9, 1 << 40, 2**64 - 1])
def test_a_slot_whose_header_is_damaged_has_no_plan(arena, length):
    arena.image(0)[:8] = length.to_bytes(8, "little")
    with pytest.raises(ValueError, match=r"header|Expecting|holdfast"):
        arena.plan(0)
    assert arena.plan(1) == PLAN


def test_a_keeper_takes_no_slot_that_it_has_not_heard_of(arena, tmp_path):
    """An order to save an older slot may still be on its way to it."""
    policy = Policy(RunLayout(tmp_path), RUN, 7, {7: None}, 3, best=None, version="0")
    storage = Storage(policy, lambda _: None, lambda *_: None)
    storage.holdings.hold(os.dup(arena.descriptor), None)
    for sequence in (1, 2):
        take(arena, sequence)
    assert storage.newest_announced() is None
    storage.announce(1)
    assert storage.newest_announced()[1].sequence == 1
    storage.announce(2)
    storage.announce(1)
    assert storage.newest_announced()[1].sequence == 2
    storage.release(is_needed=False)
