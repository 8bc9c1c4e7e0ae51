"""Leaving takes a bounded time.

After the state is durable nothing may hold the process: joins of data-loader
workers, communicator teardown and loggers can hang, and a scheduler would kill
the whole job for it. A thread ends the process when its time is up, but only if
it is really leaving: a script that catches `Stopped` and goes on is left alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable

from holdfast._errors import Stopped


def end_process(status: int) -> None:
    """Leave now, with the children that multiprocessing made."""
    from multiprocessing import active_children  # slow to import

    for child in active_children():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            child.kill()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def is_interactive() -> bool:
    """Whether the interpreter lives on after an exception: a prompt or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


def bound_leaving(
    stopped: Stopped, seconds: float, say: Callable[[str], None], stays: Callable[[], None]
) -> None:
    """End the process in `seconds` if it has not ended by then; `stays` if it was not leaving."""
    if is_interactive():
        stays()
        return
    # While the exception is under way (`finally` blocks, joins) somebody holds it.
    under_way = weakref.ref(stopped)
    status = stopped.status

    def watch() -> None:
        timer.wait(seconds)
        if under_way() is None and threading.main_thread().is_alive():
            stays()
            return
        say(f"leaving took more than {seconds:.0f} s; ending the process. The state is durable.")
        end_process(status)

    timer = threading.Event()
    threading.Thread(target=watch, name="holdfast-leave", daemon=True).start()
