"""Memory for a range of an arena: all of it or nothing, and given back for good."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading

import pytest

from holdfast._store.format.image import PAGE
from holdfast._store.memory import pages
from holdfast._store.memory.arena import used_bytes
from holdfast._store.memory.pages import give_memory, pieces_of, take_memory
from tests.small_shm import needs_namespace, small_shm

PIECE = 64 * PAGE


@pytest.fixture
def mapping(monkeypatch):
    monkeypatch.setattr(pages, "PIECE_BYTES", PIECE)
    descriptor = os.memfd_create("test-pages")
    os.ftruncate(descriptor, 20 * PIECE)
    mapped = mmap.mmap(descriptor, 20 * PIECE)
    yield descriptor, mapped
    mapped.close()
    os.close(descriptor)


def test_only_the_range_gets_memory_and_gives_it_back(mapping):
    descriptor, mapped = mapping
    assert used_bytes(descriptor) == 0
    assert give_memory(descriptor, mapped, 2 * PIECE, 5 * PIECE + PAGE)
    assert used_bytes(descriptor) == 5 * PIECE + PAGE
    assert take_memory(descriptor, 2 * PIECE, 5 * PIECE + PAGE)
    assert used_bytes(descriptor) == 0


@pytest.mark.parametrize("cores", [1, 16])
def test_each_piece_is_passed_on_once_when_it_has_its_memory(mapping, monkeypatch, cores):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    descriptor, mapped = mapping
    passed, inside = [], threading.Lock()

    def then(start: int, size_bytes: int) -> None:
        assert inside.acquire(blocking=False)  # one at a time: a driver takes them so
        assert used_bytes(descriptor) >= size_bytes
        passed.append((start, size_bytes))
        inside.release()

    assert give_memory(descriptor, mapped, PAGE, 9 * PIECE, then)
    assert sorted(passed) == pieces_of(PAGE, 9 * PIECE)
    assert sum(size for _, size in passed) == 9 * PIECE


def test_what_was_in_a_range_is_gone_when_it_is_given_back(mapping):
    descriptor, mapped = mapping
    assert give_memory(descriptor, mapped, 0, PIECE)
    mapped[:PIECE] = b"x" * PIECE
    take_memory(descriptor, 0, PIECE)
    assert give_memory(descriptor, mapped, 0, PIECE)
    assert mapped[:PIECE] == bytes(PIECE)


def test_memory_that_is_given_twice_keeps_what_is_in_it(mapping):
    descriptor, mapped = mapping
    give_memory(descriptor, mapped, 0, PIECE)
    mapped[:PIECE] = b"x" * PIECE
    assert give_memory(descriptor, mapped, 0, 3 * PIECE)
    assert mapped[:PIECE] == b"x" * PIECE


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_where_there_is_no_room_nothing_is_kept(mapping, monkeypatch, number):
    descriptor, mapped = mapping
    allocate = os.posix_fallocate

    def refuse(descriptor: int, start: int, size_bytes: int) -> None:
        if start >= 3 * PIECE:
            raise OSError(number, os.strerror(number))
        allocate(descriptor, start, size_bytes)

    touch = pages.touch
    monkeypatch.setattr(pages, "touch", lambda *place: place[1] < 3 * PIECE and touch(*place))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert not give_memory(descriptor, mapped, 0, 8 * PIECE)
    assert used_bytes(descriptor) == 0


_FULL = """
import mmap, os
from holdfast._store.memory.arena import used_bytes
from holdfast._store.memory.pages import give_memory
file = os.open("/dev/shm/arena", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 8 << 20)
print(give_memory(file, mmap.mmap(file, 8 << 20), 0, 8 << 20), used_bytes(file))
"""


@needs_namespace
def test_a_full_shared_memory_is_no_bus_error():
    command = [*small_shm("2m"), sys.executable, "-c", _FULL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False 0\n"), done.stderr


def test_an_older_kernel_gives_the_memory_too(mapping, monkeypatch):
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", -1)
    descriptor, mapped = mapping
    assert give_memory(descriptor, mapped, 0, 3 * PIECE)
    assert used_bytes(descriptor) == 3 * PIECE


def test_another_refusal_and_an_error_of_the_caller_are_raised_and_nothing_is_kept(
    mapping, monkeypatch
):
    descriptor, mapped = mapping

    def fail(*_: int) -> None:
        raise ValueError("the driver")

    with pytest.raises(ValueError, match="the driver"):
        give_memory(descriptor, mapped, 0, 8 * PIECE, fail)
    assert used_bytes(descriptor) == 0

    def refuse(*_: int) -> None:
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(pages, "touch", lambda *_: False)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(PermissionError):
        give_memory(descriptor, mapped, 0, PIECE)


def test_without_more_threads_one_does_it(mapping, monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    descriptor, mapped = mapping
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert give_memory(descriptor, mapped, 0, 8 * PIECE)
    assert used_bytes(descriptor) == 8 * PIECE
