"""Copies of raw bytes, prepared once: every byte arrives, and none beside its place."""

from __future__ import annotations

import ctypes
import random
import threading
import time

import pytest

from holdfast._run.saving import arena_builder
from holdfast._run.saving.arena_builder import RawCopies

SIZES = [
    pytest.param([1] * 5000, id="bytes"),
    pytest.param([7, 0, 4096, 1, 200_000, 3], id="mixed"),
    pytest.param([3 << 20, 5, 9 << 20], id="large"),
    pytest.param([10_000] * 2500, id="many"),
    pytest.param([], id="none"),
]


class Memory:
    def __init__(self, size: int, fill: int | None = None) -> None:
        content = random.Random(size).randbytes(size) if fill is None else bytes([fill]) * size
        self.buffer = ctypes.create_string_buffer(content, size + 1)
        self.address = ctypes.addressof(self.buffer)

    def read(self, at: int, size: int) -> bytes:
        return ctypes.string_at(self.address + at, size)


@pytest.mark.parametrize("refused", [False, True], ids=["by the kernel", "one by one"])
@pytest.mark.parametrize("sizes", SIZES)
def test_all_bytes_arrive(sizes: list[int], refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if refused:
        monkeypatch.setattr(arena_builder, "_readv", lambda *_: -1)
    total = sum(sizes)
    source, target = Memory(total + 8 * len(sizes)), Memory(total + 3 * len(sizes), fill=0)
    moves, expected, there, here = [], bytearray(), 0, 0
    for number, size in enumerate(sizes):
        moves.append((target.address + there, source.address + here, size))
        gap = number % 3  # some stay neighbours, in one or in both places
        expected += source.read(here, size) + bytes(gap)
        there, here = there + size + gap, here + size + 8 * (number % 2)
    random.Random(1).shuffle(moves)
    copies = RawCopies(moves)
    for _ in range(2):
        ctypes.memset(target.address, 0, there)
        copies.run()
        assert target.read(0, there) == bytes(expected)
    assert copies.size_bytes == total


def test_an_error_in_any_thread_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: int) -> int:
        raise OSError("no such memory")

    monkeypatch.setattr(arena_builder, "_readv", fail)
    source, target = Memory(30 << 20), Memory(30 << 20, fill=0)
    moves = [(target.address + at, source.address + at + 1, 100) for at in range(0, 29 << 20, 200)]
    with pytest.raises(OSError, match="no such memory"):
        RawCopies(moves).run()


def many_moves(source: Memory, target: Memory, total: int) -> list[tuple[int, int, int]]:
    # Each a little apart in its source: they cannot become one.
    return [
        (target.address + at, source.address + at + at // 100_000, 100_000)
        for at in range(0, total - 100_000, 100_000)
    ]


def test_without_another_thread_it_is_done_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    source, target = Memory(12 << 20), Memory(12 << 20, fill=0)
    moves = many_moves(source, target, 11 << 20)
    RawCopies(moves).run()
    for there, here, size in moves:
        assert ctypes.string_at(there, size) == ctypes.string_at(here, size)


def test_an_interrupt_while_threads_start_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def start_one_and_stop(thread: threading.Thread) -> None:
        if begun:
            raise KeyboardInterrupt
        begun.append(thread)
        start(thread)

    def copy_slowly(*_: int) -> int:
        time.sleep(0.2)
        return -1

    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(threading.Thread, "start", start_one_and_stop)
    monkeypatch.setattr(arena_builder, "_readv", copy_slowly)
    source, target = Memory(20 << 20), Memory(20 << 20, fill=0)
    with pytest.raises(KeyboardInterrupt):
        RawCopies(many_moves(source, target, 19 << 20)).run()
    assert begun
    assert not begun[0].is_alive()  # else it would write into the next snapshot
