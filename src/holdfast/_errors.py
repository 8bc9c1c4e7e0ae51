"""Everything that holdfast raises on purpose.

    HoldfastError
    ├── SettingsError        a setting has a value that it cannot have
    ├── FolderError          the run folder cannot be used
    │   ├── NotARun          there is no run in this folder
    │   └── RunIsLive        another process trains in this folder now
    ├── StateError           the state cannot be stored or does not fit
    │   ├── UnstorableState  a value of a type that holdfast cannot store
    │   ├── StateMismatch    the checkpoint does not fit the objects of today
    │   └── RestoreDiffers   an object did not take back what it had given
    ├── CheckpointError
    │   ├── DamagedCheckpoint  a checkpoint's bytes are not those that were written
    │   ├── UnreadableCheckpoint  it cannot be read now, or not by this version
    │   └── NoGoodCheckpoint   there were checkpoints, and none is whole
    └── SaveFailed           a checkpoint could not be made durable

    Stopped (a SystemExit)   the run was asked to stop and is durable

The first line of a message is the thing and the fact, the second the next step.
"""

from __future__ import annotations

import re

_PLACE = re.compile(r"holdfast: (epoch \d+, batch \d+[^\n]*)")


class HoldfastError(Exception):
    """Base of all errors of holdfast."""

    __module__ = "holdfast"


class SettingsError(HoldfastError, ValueError):
    """A setting has a value that it cannot have."""

    __module__ = "holdfast"


class FolderError(HoldfastError):
    """The run folder cannot be used."""

    __module__ = "holdfast"


class NotARun(FolderError):
    """There is no run in this folder."""

    __module__ = "holdfast"


class RunIsLive(FolderError):
    """Another process trains in this folder now."""

    __module__ = "holdfast"

    def __init__(self, message: str, *, pid: int, host: str) -> None:
        super().__init__(message)
        self.pid = pid
        self.host = host


class StateError(HoldfastError):
    """The state cannot be stored, or does not fit."""

    __module__ = "holdfast"


class UnstorableState(StateError, TypeError):
    """A value of a type that holdfast cannot store."""

    __module__ = "holdfast"

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class StateMismatch(StateError):
    """The checkpoint does not fit the objects of today."""

    __module__ = "holdfast"

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        reshaped: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.reshaped = reshaped


class RestoreDiffers(StateError):
    """An object did not take back what it had given."""

    __module__ = "holdfast"

    def __init__(self, message: str, *, paths: tuple[str, ...]) -> None:
        super().__init__(message)
        self.paths = paths


class CheckpointError(HoldfastError):
    """Something is wrong with the checkpoints on disk."""

    __module__ = "holdfast"


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's bytes are not those that were written."""

    __module__ = "holdfast"


class UnreadableCheckpoint(CheckpointError):
    """A checkpoint that cannot be read now, or not by this version; it may well be whole."""

    __module__ = "holdfast"


class NoGoodCheckpoint(CheckpointError):
    """There were checkpoints, and none of them is whole."""

    __module__ = "holdfast"


class SaveFailed(HoldfastError):
    """A checkpoint could not be made durable."""

    __module__ = "holdfast"


class Stopped(SystemExit):
    """The run was asked to stop before its end; its state is durable.

    A SystemExit, so that code after the loop, which believes that training is
    complete, does not run, while `finally` blocks do.
    """

    __module__ = "holdfast"

    def __init__(self, status: int, reason: str = "", step: int = 0) -> None:
        super().__init__(status)
        self.status = status
        self.reason = reason
        self.step = step


def name_place(error: BaseException, epoch: int, batch: int, more: str = "") -> None:
    """Add to an error of the data set where it happened; what a worker has said stays."""
    if any(_PLACE.search(note) for note in getattr(error, "__notes__", ())):
        return
    said = _PLACE.search(str(error))  # torch gives a worker's error on as text
    place = said[1] if said else f"epoch {epoch}, batch {batch}{more}"
    error.add_note(f"holdfast: {place}")
