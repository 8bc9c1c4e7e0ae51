"""`holdfast run`: the start of a command under supervision; on Linux by leader.py."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from holdfast._environment import variables
from holdfast._text import say

NOT_EXECUTABLE = 126
NOT_FOUND = 127


def lead(
    command: Sequence[str],
    max_restarts: int | None = None,
    hang_timeout: str | None = None,
    *,
    spare: bool = False,
) -> int:
    """Start the command, stay until it and its keepers have ended, return its exit status."""
    if not sys.platform.startswith("linux"):
        return _step_aside(command)
    # These can be imported on Linux only.
    from holdfast._supervise.hangs import Timeout
    from holdfast._supervise.leader import Supervision

    # The timeout of a leader above this one counts for all processes below it.
    text = hang_timeout or variables.text("HOLDFAST_HANG_TIMEOUT")
    timeout = None
    if text:
        with contextlib.suppress(ValueError):
            timeout = Timeout.parse(text)
    return Supervision(command, max_restarts, timeout, has_spare=spare).run()


def explain_no_start(program: str, error: OSError) -> int:
    """Say why it could not be started; the status is what a shell would give."""
    if isinstance(error, FileNotFoundError):
        say(f"{program!r}: there is no such program.\nWrite: holdfast run -- python train.py")
        return NOT_FOUND
    say(
        f"{program!r}: cannot be started ({error.strerror}).\n"
        "If it is a script, name its interpreter: holdfast run -- python train.py"
    )
    return NOT_EXECUTABLE


def _step_aside(command: Sequence[str]) -> int:
    """Where there is no keeper to wait for, the command takes our place."""
    try:
        if sys.platform == "win32":
            import subprocess  # there, exec would return to the shell at once

            return subprocess.call(list(command))
        os.execvp(command[0], list(command))
    except OSError as error:
        return explain_no_start(command[0], error)
