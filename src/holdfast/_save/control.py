"""The control page: a few words that trainer and keeper share.

The trainer writes them at each boundary, which costs a store; the keeper reads
them whenever it likes, even while the trainer is inside a long call.
"""

from __future__ import annotations

import mmap
import os

from holdfast._record.image import PAGE

STEP = 0  # completed steps
BOUNDARY_NS = 1  # monotonic time of the last boundary
IN_LOOP = 2  # 1 while the user's loop runs
REST = 3  # RESTS while a phase runs that passes no boundary; HEARD when its stop was heard there
EPOCH = 4  # of the current epoch 1 + its index; 0 without epochs
EPOCHS = 5  # how many there are to be
STAYS = 6  # 1 if the process outlives the run, as a notebook's kernel does

RESTS = 1
HEARD = 2
_WORDS = 16


class ControlPage:
    """The shared words; `words` is indexed by the names above."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapped = mmap.mmap(descriptor, PAGE)
        self.words = memoryview(self._mapped)[: 8 * _WORDS].cast("Q")

    @classmethod
    def create(cls) -> ControlPage:
        descriptor = os.memfd_create("holdfast-control", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, PAGE)
        return cls(descriptor)

    def close(self) -> None:
        self.words.release()
        self._mapped.close()
        os.close(self.descriptor)
