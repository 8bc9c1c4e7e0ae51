"""Lines for the person at the terminal."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import TracebackType

from holdfast._errors import HoldfastError

_PACKAGE = str(Path(__file__).parent)


def say(message: str) -> None:
    """One line on standard error; whoever has closed it does not hear us, and training goes on."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"holdfast: {message}\n")
        sys.stderr.flush()


def speak_plainly() -> None:
    """Let an error of ours that nobody catches be its sentences and the place, not a traceback."""
    if sys.excepthook is sys.__excepthook__:  # a debugger's or notebook's own is left alone
        sys.excepthook = _tell


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, HoldfastError):
        sys.__excepthook__(kind, error, trace)
        return
    import traceback

    say(str(error))
    frames = [f for f in traceback.extract_tb(trace) if not f.filename.startswith((_PACKAGE, "<"))]
    if frames:
        sys.stderr.write(f"  at {frames[-1].filename}:{frames[-1].lineno}\n")
