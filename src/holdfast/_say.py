"""Lines for the person at the terminal."""

from __future__ import annotations

import contextlib
import sys


def say(message: str) -> None:
    """One line on standard error; whoever has closed it does not hear us, and training goes on."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"holdfast: {message}\n")
        sys.stderr.flush()
