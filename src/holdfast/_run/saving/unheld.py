"""What of ours a debugger must leave alone.

pydevd, which is in debugpy and PyCharm, stops all threads when one is stopped, and attaches to
every Python that is started: a keeper would wait for an editor before its first line, stop with
the trainer and be ended with it. Both can be declined in ways that pydevd offers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator


def never_held(thread: threading.Thread) -> threading.Thread:
    """The same thread, which goes on while others are stopped; before it is started."""
    # As debugpy marks its own: a plain thread has neither attribute.
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    return thread


@contextlib.contextmanager
def without_debugger() -> Iterator[None]:
    """What this thread starts meanwhile is started as it is."""
    pydevd = sys.modules.get("_pydev_bundle.pydev_monkey")
    skip = getattr(pydevd, "skip_subprocess_arg_patch", contextlib.nullcontext)
    with skip():
        yield
