"""Leaving takes a bounded time.

After the state is durable nothing may hold the process: joins of data-loader
workers, communicator teardown and loggers can hang, and a scheduler would kill
the whole job for it. A thread ends the process when its time is up, but only if
it is really leaving: a script that catches `Stopped` and goes on is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from holdfast import _errors
from holdfast._errors import Stopped, is_interactive
from holdfast._run.exit.record import ExitRecord
from holdfast._text import say

_bounds: list[tuple[int, threading.Event, Callable[[], None]]] = []  # of runs that were left


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


def leave_at_once(
    place: ExitRecord, reason: str, record: dict[str, Any], *, asked: bool, then: str = ""
) -> None:
    """Say so, note it, and end the process: a person does not want to wait for the step."""
    step, status = record["durable_step"], record["status"]
    kept = "nothing is durable yet" if step is None else f"step {step} is durable"
    say(f"leaving at once ({reason}): {kept}. Status {status}.")
    if then:
        say(then)
    place.write({"how": reason, **record}, asked=asked)
    end_process(status)


def _is_leaving_by(stopped: weakref.ref[Stopped]) -> bool:
    """Whether the main thread is on its way out: in `finally` blocks, or joining what is left.

    By this very exception: a process that makes one run after the other may handle another.
    """
    main = threading.main_thread()
    if not main.is_alive():
        return True
    found = sys._current_exceptions().get(main.ident or 0)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    while error is not None and error is not stopped():
        error = error.__context__  # another one came up on the way
    return error is not None


def bound_leaving(stopped: Stopped, seconds: float, stays: Callable[[], None]) -> None:
    """End the process in `seconds` if it has not ended by then; `stays` if it was not leaving."""
    if is_interactive():
        stays()
        return
    status, leaving = stopped.status, weakref.ref(stopped)

    def watch() -> None:
        timer.wait(seconds)
        try:
            _bounds.remove(bound)
        except ValueError:
            return  # another run was opened meanwhile
        if not _is_leaving_by(leaving):
            stays()
            return
        say(f"leaving took more than {seconds:.0f} s; ending the process. The state is durable.")
        end_process(status)

    timer = threading.Event()
    bound = (os.getpid(), timer, stays)
    _bounds.append(bound)
    threading.Thread(target=watch, name="holdfast-leave", daemon=True).start()


def goes_on() -> None:
    """A run is opened, so whatever this process has left before, it is not leaving itself.

    Told at once: while something holds the interpreter, the thread cannot tell the keeper in time.
    """
    while _bounds:
        pid, timer, stays = _bounds.pop()
        if pid == os.getpid():  # else of the process that has forked this one
            timer.set()
            stays()


def die_if_terminated(stopped: Stopped) -> None:
    """Let a SIGTERM end an interpreter that no exception ends, now that the state is durable.

    A notebook server sends it to a kernel that is to be gone, and a killing follows.
    """
    asked = stopped.status == _errors.TERMINATED and is_interactive()
    if asked and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # else the user's was called
        signal.raise_signal(signal.SIGTERM)
