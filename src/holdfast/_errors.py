"""Everything that holdfast raises on purpose.

    HoldfastError
    ├── SettingsError        a setting has a value that it cannot have
    ├── FolderError          the run folder cannot be used
    │   ├── NotARun          there is no run in this folder
    │   └── RunIsLive        another process trains in this folder now
    ├── StateError           the state cannot be stored or does not fit
    │   ├── UnstorableState  a value of a type that holdfast cannot store
    │   ├── StateMismatch    the checkpoint does not fit the script's objects
    │   └── RestoreDiffers   an object did not take back what it had given
    ├── CheckpointError
    │   ├── DamagedCheckpoint  a checkpoint's bytes are not those that were written
    │   ├── UnreadableCheckpoint  it cannot be read now, or not by this version
    │   └── NoGoodCheckpoint   there were checkpoints, and none is whole
    ├── SaveFailed           a checkpoint could not be made durable
    ├── MirrorError          the mirror cannot be read, or is another run's
    ├── RanksError           the ranks cannot be one run
    └── ProofError           a script that is interrupted does not end as it should

    Stopped                  the run was asked to stop

The first line of a message is the thing and the fact, the second the next step.
"""

from __future__ import annotations

import re
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Any

# -- Exit statuses. Docs and tests repeat these numbers: `git grep -nw 74 docs tests`. Exit records
# of older runs contain them: `asked.py`, `attempts.py` and `gather.py` must still know an old one.


FINISHED = 0
BAD = 65  # a rule called the training bad
NOT_DURABLE = 74  # it ended, and the disk did not take its last state
REQUEUE = 75  # interrupted: its starter should start it again
IDLE = 76  # started several times without completing a step: a person must look
HUNG = 77  # no step for too long: its supervisor starts it again
HUNG_UP = 129  # SIGHUP: the terminal was closed, or the connection was lost
PERSON = 130  # Ctrl-C, `holdfast stop`, run.stop()
TERMINATED = 143

ASKED = (PERSON, TERMINATED, HUNG_UP, REQUEUE)  # asked to stop; the run can continue
RESTARTED = (REQUEUE, HUNG)  # the run is started again without a person


def status_of_signal(number: int) -> int:
    """The exit status of a run that this signal asked to stop."""
    if number == signal.SIGTERM:
        return TERMINATED
    name = signal.Signals(number).name
    if name == "SIGHUP":
        return HUNG_UP
    return REQUEUE if name in ("SIGUSR1", "SIGUSR2") else PERSON


# -- Whether the interpreter outlives the run: a notebook, IPython, `python -i` --------------------
# There an exception ends the cell and not the process. So nothing of ours may end the process
# either: everything else in the kernel would be lost.


def is_interactive() -> bool:
    """Whether a person is at a prompt or a notebook, which goes on after an exception."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)  # IPython and its kernel set ps1 too


_PACKAGE = str(Path(__file__).parent)
_LIBRARY = str(Path(re.__file__).parents[1])  # Python's own
_PLACE = re.compile(r"holdfast: (epoch \d+, batch \d+[^\n]*)")


class HoldfastError(Exception):
    """Base of all errors of holdfast."""

    __module__ = "holdfast"  # tracebacks name the public module

    def __init_subclass__(cls) -> None:
        cls.__module__ = "holdfast"

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        place = place_of(self)
        lines = [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]
        return lines if place is None else [*lines, f"  at {place}"]


# What the extras of pyproject.toml bring: holdfast itself is installed from its repository.
_EXTRAS = {
    "jax": ("jax>=0.4.30",),
    "keras": ("keras>=3.3",),
    "kubernetes": ("PyYAML>=5.4",),
    "lightning": ("lightning>=2.2",),
    "mirror": ("fsspec>=2024.2",),
    "mlflow": ("mlflow-skinny>=2.12",),
    "orbax": ("jax>=0.4.30", "orbax-checkpoint>=0.6"),
    "ray": ("ray[train]>=2.57", "torch>=2.4"),
    "s3": ("s3fs>=2024.2",),
    "tensorboard": ("tensorboard>=2.14",),
    "tensorflow": ("tensorflow>=2.16",),
    "torch": ("torch>=2.4",),
    "transformers": ("accelerate>=1.1", "transformers>=5.4"),
    "ui": ("starlette>=0.37", "uvicorn>=0.29"),
    "wandb": ("wandb>=0.19",),
}


def install_command(extra: str) -> str:
    """The command that installs what an extra needs.

    >>> install_command("ui")
    "pip install 'starlette>=0.37' 'uvicorn>=0.29'"
    """
    return f"pip install {' '.join(shlex.quote(each) for each in _EXTRAS[extra])}"


def not_installed(what: str, needed: str, extra: str) -> str:
    """The two lines of an error for a missing package.

    >>> print(not_installed("holdfast ui", "uvicorn", "ui"))
    holdfast ui needs uvicorn, which is not installed here.
    Install it: pip install 'starlette>=0.37' 'uvicorn>=0.29'
    """
    return (
        f"{what} needs {needed}, which is not installed here.\nInstall it: {install_command(extra)}"
    )


def missing_framework(extra: str, name: str) -> ImportError:
    """What an adapter raises whose framework is not installed."""
    return ImportError(not_installed(f"holdfast.{extra}", name, extra))


class SettingsError(HoldfastError, ValueError):
    """A setting has a value that it cannot have."""


class FolderError(HoldfastError):
    """The run folder cannot be used."""


class NotARun(FolderError):
    """There is no run in this folder."""


class RunIsLive(FolderError):
    """Another process trains in this folder now."""

    def __init__(self, message: str, *, pid: int, host: str) -> None:
        super().__init__(message)
        self.pid = pid
        self.host = host


class StateError(HoldfastError):
    """The state cannot be stored, or does not fit."""


class UnstorableState(StateError, TypeError):
    """A value of a type that holdfast cannot store."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class StateMismatch(StateError):
    """The checkpoint does not fit the objects of today."""

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

    def __init__(self, message: str, *, paths: tuple[str, ...]) -> None:
        super().__init__(message)
        self.paths = paths


class CheckpointError(HoldfastError):
    """Something is wrong with the checkpoints on disk."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's bytes are not those that were written."""


class UnreadableCheckpoint(CheckpointError):
    """A checkpoint that cannot be read now, or not by this version; it may well be whole."""


class NoGoodCheckpoint(CheckpointError):
    """There were checkpoints, and none of them is whole."""


class SaveFailed(HoldfastError):
    """A checkpoint could not be made durable."""


class MirrorError(HoldfastError):
    """The mirror cannot be read, or is another run's."""


class RanksError(HoldfastError):
    """The ranks cannot be one run."""


class ProofError(HoldfastError):
    """A script that is interrupted does not end as it should; `proof` has all that is known."""

    def __init__(self, message: str, *, proof: Any) -> None:
        super().__init__(message)
        self.proof = proof


class Stopped(BaseException):
    """The run was asked to stop before its end, or its last state is not durable (NOT_DURABLE).

    Not an Exception, so that code after the loop, which believes that training is
    complete, does not run, while `finally` blocks do. In a script it is a SystemExit
    too, with `status`. At a prompt or in a notebook it is a KeyboardInterrupt instead:
    the cell and those that wait behind it end, and the interpreter goes on.
    """

    __module__ = "holdfast"

    def __init_subclass__(cls) -> None:
        # The two ways to be Stopped are one class to the user.
        cls.__module__, cls.__name__, cls.__qualname__ = "holdfast", "Stopped", "Stopped"

    def __new__(cls, *_arguments: Any, **_named: Any) -> Stopped:
        if cls is Stopped:
            # Only in the main thread does an exception come out at the prompt.
            is_main = threading.current_thread() is threading.main_thread()
            cls = _StoppedCell if is_interactive() and is_main else _StoppedScript
        return super().__new__(cls)

    def __init__(self, status: int, reason: str = "", step: int = 0) -> None:
        super().__init__(status)
        self.status = status
        self.reason = reason
        self.step = step
        self.message = f"stopped at step {step}" + (f" ({reason})." if reason else ".")

    def change(self, status: int, reason: str) -> None:
        """Leave for another reason: the scheduler knows more than the signal says."""
        self.status, self.reason = status, reason
        self.args = (status,)
        self.message = f"stopped at step {self.step} ({reason})."

    def __reduce__(self) -> tuple[Any, ...]:
        return Stopped, (self.status, self.reason, self.step), {"message": self.message}


class _StoppedScript(Stopped, SystemExit):
    def change(self, status: int, reason: str) -> None:
        super().change(status, reason)
        self.code = status


class _StoppedCell(Stopped, KeyboardInterrupt):
    def __str__(self) -> str:
        return self.message

    def _render_traceback_(self) -> list[str]:
        # For a SystemExit IPython would say how to leave it, for others where it was raised.
        return [f"holdfast: {self.message}"]


def place_of(error: BaseException) -> str | None:
    """Where in the user's code an error came up: the file and line, and in a cell its text."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if not f.filename.startswith((_PACKAGE, _LIBRARY, "<"))]
    if not ours:
        return None
    last = ours[-1]
    if Path(last.filename).parent.name.startswith("ipykernel_"):
        return f"line {last.lineno} of the cell: {last.line}"
    return f"{last.filename}:{last.lineno}"


def name_place(error: BaseException, epoch: int, batch: int, more: str = "") -> None:
    """Add to an error of the data set where it happened, unless a worker has added it."""
    if any(_PLACE.search(note) for note in getattr(error, "__notes__", ())):
        return
    said = _PLACE.search(str(error))  # torch passes a worker's error on as text
    place = said[1] if said else f"epoch {epoch}, batch {batch}{more}"
    error.add_note(f"holdfast: {place}")
