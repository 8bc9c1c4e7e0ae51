"""What the frames of an exception show: its place, the files being written, the workers.

The frames belong to the user and to libraries. None of their code is called here, and no reference
to them is kept.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from holdfast._environment.processes.proc import FairDeadline, is_leaving, read_bytes

Frames = list[tuple[FrameType, int]]  # each with its line, the outermost first
View = tuple[CodeType, int, dict[str, Any], dict[str, Any]]  # its variables, and its module's

_MOST_FRAMES = 4000  # an endless recursion has many more
_SHOWN_FIRST, _SHOWN_LAST = 10, 30
_VIEWED_LAST = 150
_CO_OPTIMIZED = 1  # the code of a function
_MOST_CAUSES = 10
_MOST_TARGETS = 6
_MOST_WORKERS = 64
_DYING_SECONDS = 1.0  # for a worker that has closed its connections to end
_PAUSE_SECONDS = 0.005
_PACKAGE = str(Path(__file__).parents[2])
_LIBRARY = str(Path(re.__file__).parents[1])  # Python's own
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
# A disk that is only read may be full without harm: only functions that write name a target.
_WRITES = re.compile(r"save|write|dump|export|store|flush|checkpoint|log", re.IGNORECASE)
_TARGETS = re.compile(
    r"f|fp|fh|out|output|target|dest|destination|to|(.*_)?(path|file|filename|fname|filepath|dir)",
    re.IGNORECASE,
)


def errors_of(error: BaseException) -> list[BaseException]:
    """An exception and those that it came from, the nearest first."""
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and len(found) < _MOST_CAUSES:
        if any(following is each for each in found):
            break
        found.append(following)
        context = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or context
    return found


def frames_of(error: BaseException) -> Frames:
    """The frames from the outermost caller to the place of the exception."""
    trace = error.__traceback__
    if trace is None:
        return []
    found: Frames = []
    caller = trace.tb_frame.f_back
    while caller is not None and len(found) < _MOST_FRAMES:
        found.append((caller, caller.f_lineno))
        caller = caller.f_back
    found.reverse()
    return (found + _passed(error))[-_MOST_FRAMES:]


def _passed(error: BaseException) -> Frames:
    """The frames that an exception has left, without their callers."""
    found: Frames = []
    trace = error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def places_of(frames: Frames) -> list[list[Any]]:
    """File, line and function of the frames; of many the first and the last."""
    if len(frames) > _SHOWN_FIRST + _SHOWN_LAST:
        frames = frames[:_SHOWN_FIRST] + frames[-_SHOWN_LAST:]
    return [[frame.f_code.co_filename, line, frame.f_code.co_name] for frame, line in frames]


def frames_of_thread(identifier: int) -> Frames:
    """The current frames of a thread."""
    found: Frames = []
    frame = sys._current_frames().get(identifier)
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def view(frames: Frames) -> list[View]:
    """The variables of the frames; of many the first and the last."""
    if len(frames) > _SHOWN_FIRST + _VIEWED_LAST:
        frames = frames[:_SHOWN_FIRST] + frames[-_VIEWED_LAST:]
    return [(f.f_code, line, variables_of(f), f.f_globals) for f, line in frames]


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame, in a dict of our own."""
    held = frame.f_locals
    found = dict(held)
    # Up to Python 3.12 a frame keeps this dict until it returns: a function that tries again with
    # a smaller batch would still hold the memory of the last try. It may be cleared unless the
    # function has called `locals()` itself, or a debugger is attached.
    if (
        sys.version_info < (3, 13)
        and frame.f_code.co_flags & _CO_OPTIMIZED
        and frame.f_trace is None
        and sys.getrefcount(held) <= 3  # the frame, this function, and the call
    ):
        held.clear()
    return found


def is_users(frame: FrameType) -> bool:
    """True if a frame runs the user's own code, not a library's."""
    name = frame.f_code.co_filename
    return not name.startswith((_PACKAGE, _LIBRARY, "<frozen")) and not _INSTALLED.search(name)


def written_targets(errors: list[BaseException]) -> list[str]:
    """The files that were being written, by the variables of the frames."""
    found: dict[str, None] = {}
    for error in errors:
        for name in (getattr(error, "filename", None), getattr(error, "filename2", None)):
            if isinstance(name, str) and isinstance(error, OSError):
                found[name] = None
        for frame, _ in reversed(_passed(error)):
            if _WRITES.search(frame.f_code.co_name):
                found.update(dict.fromkeys(_targets_in(frame)))
    return [str(Path(name).absolute()) for name in list(found)[:_MOST_TARGETS]]


def _targets_in(frame: FrameType) -> Iterator[str]:
    for name, value in variables_of(frame).items():
        if not _TARGETS.fullmatch(name):
            continue
        if isinstance(value, Path | str):
            # A text that is being written is no path.
            if 0 < len(str(value)) < 4096 and "\n" not in str(value):
                yield str(value)
        elif hasattr(type(value), "write"):  # an open file
            place = getattr(value, "name", None)
            if isinstance(place, str) and not place.startswith("<"):
                yield place


def workers_of(frames: Frames) -> list[dict[str, Any]]:
    """The worker processes of this one; those that have ended come first."""
    found: dict[int, dict[str, Any]] = {}
    workers = [*_children(), *_loader_workers(frames)]
    # The connection to a dying process is reset before its exit status is known.
    deadline = FairDeadline(_DYING_SECONDS, lambda: map(_pid_of, workers))
    while any(map(_is_dying, workers)) and not deadline.is_over():
        time.sleep(_PAUSE_SECONDS)
    for process in workers:
        with contextlib.suppress(Exception):  # objects of any library
            status = process.exitcode
            if process.pid is not None:
                found[process.pid] = {
                    "pid": process.pid,
                    "alive": status is None,
                    "exitcode": status,
                }
    return sorted(found.values(), key=lambda each: bool(each["alive"]))[:_MOST_WORKERS]


def _is_dying(process: Any) -> bool:
    """True if a process is ending and its status is not known yet."""
    with contextlib.suppress(Exception):  # as above
        return process.exitcode is None and is_leaving(
            read_bytes(f"/proc/{_pid_of(process)}/stat") or b""
        )
    return False


def _pid_of(process: Any) -> int:
    found = getattr(process, "pid", None)
    return found if isinstance(found, int) else 0


def _children() -> list[Any]:
    # `active_children()` would leave out the dead.
    module = sys.modules.get("multiprocessing.process")
    return list(getattr(module, "_children", ()))


def _loader_workers(frames: Frames) -> list[Any]:
    """Workers of torch's loaders, which are in `_workers` of the running iterators."""
    found: list[Any] = []
    for frame, _ in frames[-_VIEWED_LAST:]:
        owner = variables_of(frame).get("self")
        workers = getattr(owner, "__dict__", {}).get("_workers")
        if isinstance(workers, list):
            found += workers
    return found
