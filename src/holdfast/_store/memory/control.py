"""The control page: a few words that trainer and keeper share.

The trainer writes them at each boundary, at the cost of a memory write; the keeper reads them at
any time, even while the trainer is in a long call.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from typing import Any

from holdfast._store.format.image import PAGE

STEP = 0  # completed steps
BOUNDARY_NS = 1  # monotonic time of the last boundary
IN_LOOP = 2  # 1 while the user's loop runs
REST = 3  # RESTS in a phase without boundaries; HEARD when the phase received a stop
EPOCH = 4  # 1 + the index of the current epoch; 0 without epochs
EPOCHS = 5  # how many there are to be
STAYS = 6  # 1 if the process outlives the run, as a notebook's kernel does

# Only with several ranks; the keeper writes all but MARK, WAITS and DONE:
MARK = 7  # the last boundary: 2 * step, and 1 more at the end of an epoch
DUE = 8  # something is to be done at the first boundary from this mark on
HOLD = 9  # the newest agreement: wait at the boundary for its decision
WAITS = 10  # the agreement that the trainer waits for
PLANNED = 11  # the mark at which all ranks take a snapshot; 0 for none
COMMON = 12  # 1 + the mark of the newest snapshot that all ranks hold
DONE = 13  # 1 when training is complete: no boundary comes any more

# For the detection of hangs, written by the trainer:
PULSE_NS = 14  # monotonic time of the last beat of its pulse thread; 0: it has none
PAUSED = 15  # index into DEBUGGERS: what holds the main thread
DISTURBED = 16  # bits in the order of DISTURBANCES: what slows it or uses memory
WORK = 17  # what holdfast itself does in the main thread, one of the three below
COMPILES = 18  # how many graphs torch.compile has compiled so far
LOOP_NS = 19  # monotonic time at which the user's loop began
LOOP_STEP = 20  # and the step at which it did

# For the series. The times only grow:
SAVED_NS = 21  # time in which saving has held the main thread
AGREED_NS = 22  # time in which waiting for other ranks has
RESTED_NS = 23  # time in phases without boundaries
WORK_NS = 24  # monotonic time at which WORK began; 0: none
REST_NS = 25  # monotonic time at which such a phase began; 0: none
SNAPSHOTS = 26  # how many were taken
ASIDE = 128  # 64 pairs: 1 + a step, and the time after its boundary outside of any step
_ASIDES = 63
RING = 256  # monotonic time of the boundary of each of the last 256 steps
RING_MASK = 255

OPENS = 1  # opens the run, or finds the other ranks
SAVES = 2  # copies a snapshot, or waits until a checkpoint is durable
AGREES = 3  # waits for the other ranks

CLIENT = "debugpy, which waits for a client"
DEBUGGERS = ("", "pdb", "debugpy", CLIENT, "a prompt", "a debugger")
DISTURBANCES = (
    "sys.settrace",
    "sys.setprofile",
    "cProfile",
    "torch.profiler",
    "memory recording",
    "a TensorBoard writer",
    "a debugger",  # attached, but not stopped
    "anomaly detection",
    "tracemalloc",
    "a tracer",  # gdb or strace
    "coverage",
    "a profiler",  # any other
)
# A writer runs in parallel with the training: it explains a slow step, but does not excuse a hang.
SLOWING = (1 << len(DISTURBANCES)) - 1 - (1 << DISTURBANCES.index("a TensorBoard writer"))

RESTS = 1
HEARD = 2
NEVER = (1 << 63) - 1
WORDS = PAGE // 8


class ControlPage:
    """The shared words; `words` is indexed by the names above."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapped = mmap.mmap(descriptor, PAGE)
        self.words = memoryview(self._mapped)[: 8 * WORDS].cast("Q")

    @classmethod
    def create(cls) -> ControlPage:
        descriptor = os.memfd_create("holdfast-control", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, PAGE)
        page = cls(descriptor)
        page.words[DUE] = NEVER
        return page

    def close(self) -> None:
        self.words.release()
        self._mapped.close()
        os.close(self.descriptor)


def private_words() -> list[int]:
    words = [0] * WORDS
    words[DUE] = NEVER
    return words


@contextlib.contextmanager
def at_work(words: Any, what: int) -> Iterator[None]:
    """Publish what holdfast itself does in the main thread."""
    before, words[WORK] = words[WORK], what
    is_outermost = before not in (SAVES, AGREES)
    began = time.monotonic_ns()
    if is_outermost:
        words[WORK_NS] = began
    try:
        yield
    finally:
        words[WORK] = before
        if is_outermost:
            words[WORK_NS] = 0
            words[AGREED_NS if what == AGREES else SAVED_NS] += time.monotonic_ns() - began


def begin_loop(words: Any) -> None:
    words[LOOP_STEP] = step = words[STEP]
    words[ASIDE + 2 * (step & _ASIDES)] = 0  # LOOP_NS covers the time before the loop
    words[LOOP_NS] = time.monotonic_ns()
    words[IN_LOOP] = 1


def begin_rest(words: Any) -> None:
    words[REST_NS] = time.monotonic_ns()


def end_rest(words: Any) -> None:
    """The phase ends: exclude its time from the current step."""
    seconds_ns = time.monotonic_ns() - words[REST_NS]
    words[REST_NS] = 0
    words[RESTED_NS] += seconds_ns
    step = words[STEP]
    pair = ASIDE + 2 * (step & _ASIDES)
    if words[pair] != step + 1:
        words[pair], words[pair + 1] = step + 1, 0
    words[pair + 1] += seconds_ns


def pass_epoch_end(words: Any, now_ns: int) -> None:
    """A boundary that completes no step: exclude the time since the last one from the next."""
    words[BOUNDARY_NS] = now_ns
    step = words[STEP]
    pair = ASIDE + 2 * (step & _ASIDES)
    last = words[RING + (step & RING_MASK)]
    words[pair], words[pair + 1] = step + 1, max(0, now_ns - last) if last else 0


def aside_ns(words: Any, step: int) -> int:
    """The time after a step's boundary that does not belong to the next step."""
    pair = ASIDE + 2 * (step & _ASIDES)
    return int(words[pair + 1]) if words[pair] == step + 1 else 0


def mark_of(step: int, at_epoch_end: bool) -> int:
    """The number of a boundary, which grows from each to the next."""
    return 2 * step + at_epoch_end
