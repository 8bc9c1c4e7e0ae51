"""Records the exceptions that end threads: the main thread often sees only their consequence.

A producer that dies leaves a queue empty, and the main thread then raises `queue.Empty`. Python
only prints the exception of the thread. A record holds text, and no reference to the exception:
its frames may hold tensors.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast._run.exit.leaving import describe, errors_of, frames_of

_MOST = 8  # the newest ones

_recorded: list[dict[str, Any]] = []


def watch_threads() -> None:
    """Record what ends threads from now on; the hook that is set shows it as before."""
    former = threading.excepthook
    if getattr(former, "func", None) is not _observe:
        threading.excepthook = functools.partial(_observe, former)


def thread_errors() -> list[dict[str, Any]]:
    """The exceptions that have ended threads, oldest first."""
    return list(_recorded)


def _observe(former: Callable[[Any], Any], args: threading.ExceptHookArgs) -> None:
    with contextlib.suppress(Exception):
        error, thread = args.exc_value, args.thread
        if error is not None and not isinstance(error, SystemExit):
            told = describe(error, errors_of(error), frames_of(error))
            told |= {"thread": "" if thread is None else thread.name, "time": None}
            # A hook of the user may stand between two of ours, and call both.
            if not _recorded or told != {**_recorded[-1], "time": None}:
                _recorded.append({**told, "time": time.time()})
                del _recorded[:-_MOST]
    former(args)
