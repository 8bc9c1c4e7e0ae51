"""Records the exception that ends a run, with facts that only the trainer knows.

Free disk space, dead workers and the contents of the GPU change within moments. So they are
observed first, in a thread with a bounded wait: a dead file system may hang it, and the state is
not durable yet. Nothing is raised here: it would hide the exception.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name
from holdfast._environment.processes.proc import FairDeadline, is_leaving, read_bytes
from holdfast._errors import Stopped
from holdfast._run.exit.leaving import sentence_of, text_of
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._text import say

_SECONDS = 3.0  # for all of it
_SCAN_SECONDS = 1.0  # for what looks through every object that there is
_DISK_SECONDS = 0.5
_JOIN_SECONDS = 0.02
_TRACEBACK_LENGTH = 20_000


@dataclass(frozen=True)
class Scene:
    """Where the run was when an exception left it."""

    layout: RunLayout
    attempt: int
    rank: int = 0
    ranks: int = 1
    step: int = 0
    steps: int = 0  # of this attempt
    batch: int = 0  # in its epoch
    phase: str | None = None
    where: str = "outside"  # or "loop", or "opening"
    state: Mapping[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] | None = None  # of OOM kills, when the run was opened


def is_failure(error: BaseException | None) -> bool:
    """True unless it is a stop, Ctrl-C or a normal end of the script."""
    if isinstance(error, Stopped | KeyboardInterrupt | GeneratorExit | None):
        return False
    if not isinstance(error, SystemExit):
        return True
    # The shell hides the real code of 256, -1 or a text.
    code: object = error.code
    return code != 0 if isinstance(code, int) else code is not None


def record_exception(error: BaseException, scene: Scene) -> dict[str, Any]:
    known: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # the exception itself must come through
        errors, frames = errors_of(error), frames_of(error)
        record = {**_of_run(scene), **_of_error(error, errors, frames)}
        deadline = time.monotonic() + _SECONDS
        facts: list[Callable[[], dict[str, Any]]] = [
            lambda: {"workers": workers_of(frames)},
            lambda: _of_disks(scene.layout.folder, errors),
            lambda: _of_memory(scene),
            lambda: _of_torch(error, errors, scene, deadline),
            lambda: _traceback(error),
        ]

        def observe() -> None:
            for each in facts:
                with contextlib.suppress(BaseException):  # code of the user may run here
                    record.update(each())

        with contextlib.suppress(RuntimeError):  # no more threads
            thread = threading.Thread(target=observe, name="holdfast-last-words", daemon=True)
            thread.start()
            _join([thread], _SECONDS)
        known = dict(record)  # a thread that hangs may still write to it
        write_json(scene.layout.error(scene.attempt, scene.rank), known)
        known["is_recorded"] = True
    return known


def _join(threads: list[threading.Thread], seconds: float) -> None:
    """Wait for threads, without counting the time in which they wait for a processor."""
    deadline = FairDeadline(seconds, lambda: [os.getpid()])
    while (left := [each for each in threads if each.is_alive()]) and not deadline.is_over():
        left[0].join(_JOIN_SECONDS)


def _of_run(scene: Scene) -> dict[str, Any]:
    return {
        "time": time.time(),
        "host": host_name(),
        "pid": os.getpid(),
        "rank": scene.rank,
        "ranks": scene.ranks,
        "attempt": scene.attempt,
        "step": scene.step,
        "phase": scene.phase,
        "where": scene.where,
        "is_configuration": scene.steps == 0,
    }


def _of_error(error: BaseException, errors: list[BaseException], frames: Frames) -> dict[str, Any]:
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return {
        "type": kind.__name__,
        "qualified": f"{module}{kind.__qualname__}",
        "message": text_of(error),
        "chain": [sentence_of(each) for each in errors[1:]],
        "frames": places_of(frames),
        "exit_code": repr(error.code)[:200] if isinstance(error, SystemExit) else None,
    }


def _traceback(error: BaseException) -> dict[str, Any]:
    import traceback

    return {"traceback": "".join(traceback.format_exception(error))[-_TRACEBACK_LENGTH:]}


def _of_disks(folder: Path, errors: list[BaseException]) -> dict[str, Any]:
    """The free space of every disk that may be involved; a file system that hangs is left out."""
    from holdfast._environment.processes.memory_sample import room, shm_room

    places = [("run", str(folder)), ("tmp", variables.temporary_folder())]
    with contextlib.suppress(OSError):  # it may have been removed
        places.append(("cwd", str(Path.cwd())))
    places += [("target", target) for target in written_targets(errors)]
    found: list[dict[str, Any]] = [{} for _ in places]

    def look(number: int, role: str, place: str) -> None:
        figures = room(place)
        if figures is not None:
            found[number] = {**figures, "role": role}

    threads = [
        threading.Thread(target=look, args=(number, *place), daemon=True)
        for number, place in enumerate(places)
    ]
    with contextlib.suppress(RuntimeError):
        for thread in threads:
            thread.start()
    _join(threads, _DISK_SECONDS)
    return {"disks": [each for each in found if each], "shm": shm_room()}


def _of_memory(scene: Scene) -> dict[str, Any]:
    from holdfast._environment.processes.cgroup import read_counters
    from holdfast._environment.processes.memory_sample import Sampler

    sampler = Sampler(os.getpid())
    # Only the kernel's counters show that it killed a child. Their earlier values are in the
    # keeper's last heartbeat, which is of rank 0 and its host; before the first one, those from
    # the opening of the run are used.
    beat = read_json(scene.layout.heartbeat(scene.attempt)) if scene.rank == 0 else {}
    before = beat.get("counters") or (scene.counters if scene.rank == 0 else None)
    now = read_counters(sampler.cgroup)
    return {"memory": sampler.take(), "counters": {"before": before, "death": now}}


def _of_torch(
    error: BaseException, errors: list[BaseException], scene: Scene, deadline: float
) -> dict[str, Any]:
    """Facts from the adapter, if the script has imported torch."""
    if "torch" not in sys.modules:
        return {}
    adapter = importlib.import_module("holdfast.torch.memory_report")
    frames = [each for one in reversed(errors) for each in frames_of(one)]
    found: dict[str, Any] = adapter.describe(
        error,
        view(frames),
        view([each for each in frames if is_users(each[0])]),
        dict(scene.state),
        counts=(scene.steps, scene.batch),
        until=min(deadline, time.monotonic() + _SCAN_SECONDS),
    )
    return found


# -- What may be filling the memory ----------------------------------------------------------------
# A process that is killed for its memory leaves no record. So when the keeper warns of the limit,
# the trainer searches for a known leak: autograd graphs that are kept.


_SUSPECTS_SECONDS = 1.0


def look_for_graphs(scene: Scene, thread: int) -> None:
    """Search a thread's variables in the background, and say what keeps graphs."""
    if "torch" in sys.modules:
        with contextlib.suppress(RuntimeError):  # no more threads
            threading.Thread(target=_find_suspects, args=(scene, thread), daemon=True).start()


def _find_suspects(scene: Scene, thread: int) -> None:
    with contextlib.suppress(Exception):  # objects of any kind are inspected
        graphs = importlib.import_module("holdfast.torch.memory_report")
        frames = _with_callers(sys._current_frames().get(thread))
        views = view([each for each in frames if is_users(each[0])])
        counts = (scene.steps, scene.batch)
        found = graphs.find_kept_graphs(views, counts, time.monotonic() + _SUSPECTS_SECONDS)
        # A graph that was freed by its backward pass is small.
        found = [each for each in found if not each["freed"]]
        if not found:
            return
        most = found[0]
        say(
            f"{most['holder']} ({most['where']}) keeps {most['count']} losses or outputs with all "
            "that their backward pass would need.\nKeep loss.item() or loss.detach() instead.",
            each=True,
        )
        # The record of an exception says more: it replaces this one, and is not replaced by it.
        path = scene.layout.error(scene.attempt, scene.rank)
        if "type" in read_json(path):
            return
        record = {"time": time.time(), "rank": scene.rank, "step": scene.step, "graphs": found}
        write_json(path, record, durable=False)


# -- What the frames of an exception show: its place, the files being written, the workers ---------
# The frames belong to the user and to libraries. None of their code is called here, and no
# reference to them is kept.


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
    trace = error.__traceback__
    if trace is None:
        return []
    return (_with_callers(trace.tb_frame.f_back) + _passed(error))[-_MOST_FRAMES:]


def _with_callers(frame: FrameType | None) -> Frames:
    found: Frames = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


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


def view(frames: Frames) -> list[View]:
    """The variables of the frames; of many the first and the last."""
    if len(frames) > _SHOWN_FIRST + _VIEWED_LAST:
        frames = frames[:_SHOWN_FIRST] + frames[-_VIEWED_LAST:]
    return [(f.f_code, line, variables_of(f), f.f_globals) for f, line in frames]


def variables_of(frame: FrameType) -> dict[str, Any]:
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
    return list(getattr(sys.modules.get("multiprocessing.process"), "_children", ()))


def _loader_workers(frames: Frames) -> list[Any]:
    """Workers of torch's loaders, which are in `_workers` of the running iterators."""
    found: list[Any] = []
    for frame, _ in frames[-_VIEWED_LAST:]:
        owner = variables_of(frame).get("self")
        workers = getattr(owner, "__dict__", {}).get("_workers")
        if isinstance(workers, list):
            found += workers
    return found
