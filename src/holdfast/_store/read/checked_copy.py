"""Bytes that are copied and checked at once: one pass over a state, by all cores.

A piece is copied, and hashed where it has arrived while it is still in the cache of the core. So
the checksum is that of the copy: memory that is written badly is found too.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from holdfast._errors import DamagedCheckpoint
from holdfast._store.format.checksum import digest, portions
from holdfast._store.format.threads import run_all

_PIECE_BYTES = 1 << 20  # about what the cache of a core holds
_LONG_BYTES = 32 << 20  # by several threads
_LONG_PIECE_BYTES = 8 << 20
_WORTH_RELEASING_BYTES = 1 << 14  # below it a plain copy is over before another thread could run
_MOST_THREADS = 8


class CheckedCopy(NamedTuple):
    name: str  # in messages
    source: memoryview
    target: memoryview | None  # None: it is only checked, where it is
    expected: bytes


def copy_checked(
    copies: Sequence[CheckedCopy], complain: Callable[[str, bytes, bytes], str]
) -> None:
    """Copy and check all; DamagedCheckpoint, worded by `complain`, at the first wrong one.

    Targets may be half filled then.
    """

    def compare(copy: CheckedCopy, actual: bytes) -> None:
        if actual != copy.expected:
            raise DamagedCheckpoint(complain(copy.name, actual, copy.expected))

    def copy_few(few: list[CheckedCopy]) -> None:
        for each in few:
            compare(each, _copy_one(each))

    works: list[Callable[[], None]] = []
    for numbers in portions([each.source.nbytes for each in copies]):
        few = [copies[number] for number in numbers]
        if few[0].source.nbytes >= _LONG_BYTES:
            works += _long_works(few[0], compare)
        else:
            works.append(functools.partial(copy_few, few))
    run_all(works, min(os.cpu_count() or 1, _MOST_THREADS))


def _copy_one(copy: CheckedCopy) -> bytes:
    source, target = copy.source, copy.target
    if target is None:
        return digest(source)
    if source.nbytes <= _PIECE_BYTES:
        move(target, source)
        return digest(target)
    hasher = xxhash.xxh3_128()
    for at in range(0, source.nbytes, _PIECE_BYTES):
        arrived = target[at : at + _PIECE_BYTES]
        move(arrived, source[at : at + _PIECE_BYTES])
        hasher.update(arrived)
    return hasher.digest()


def _long_works(
    copy: CheckedCopy, compare: Callable[[CheckedCopy, bytes], None]
) -> list[Callable[[], None]]:
    """A long range in pieces, which any thread copies; they are hashed in their order."""
    arrived = copy.source if copy.target is None else copy.target
    hashing = InOrder(arrived, lambda actual: compare(copy, actual))

    def work(start: int) -> None:
        end = min(start + _LONG_PIECE_BYTES, copy.source.nbytes)
        if copy.target is not None:
            move(copy.target[start:end], copy.source[start:end])
        hashing.arrived(start, end)

    starts = range(0, copy.source.nbytes, _LONG_PIECE_BYTES)
    return [functools.partial(work, start) for start in starts]


class InOrder:
    """Hashes memory that is filled in pieces in any order."""

    def __init__(self, view: memoryview, done: Callable[[bytes], None]) -> None:
        self._view = view
        self._done = done
        self._hasher = xxhash.xxh3_128()
        self._at = 0
        self._arrived: dict[int, int] = {}
        self._hashing = threading.Lock()

    def arrived(self, start: int, end: int) -> None:
        """A piece is there; hash it and those behind it, if all before it are hashed."""
        self._arrived[start] = end
        # One thread hashes; the others go on. Check again after releasing the lock: what arrived
        # in between found it taken.
        while self._at in self._arrived and self._hashing.acquire(blocking=False):
            try:
                while (last := self._arrived.pop(self._at, None)) is not None:
                    self._hasher.update(self._view[self._at : last])
                    self._at = last
                    if last == self._view.nbytes:
                        self._done(self._hasher.digest())
            finally:
                self._hashing.release()


def address_of(view: memoryview) -> int:
    """Where a view's bytes are; it must be writable and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def move(target: memoryview, source: memoryview) -> None:
    """Copy bytes; other threads run meanwhile."""
    if source.nbytes < _WORTH_RELEASING_BYTES or source.readonly:
        target[:] = source
    else:
        ctypes.memmove(address_of(target), address_of(source), source.nbytes)
