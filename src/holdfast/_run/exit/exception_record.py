"""Records the exception that ends a run, with facts that only the trainer knows.

Free disk space, dead workers and the contents of the GPU change within moments. So they are
observed first, in a thread with a bounded wait: a dead file system may hang it, and the state is
not durable yet. Nothing is raised here: it would hide the exception.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name
from holdfast._environment.processes.proc import FairDeadline
from holdfast._errors import Stopped
from holdfast._run.exit.exception_frames import (
    Frames,
    errors_of,
    frames_of,
    frames_of_thread,
    is_users,
    places_of,
    view,
    workers_of,
    written_targets,
)
from holdfast._run.exit.record import sentence_of, text_of
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
    """Record what is known of an exception, and return it."""
    known: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # the exception itself must come through
        errors, frames = errors_of(error), frames_of(error)
        record = {**_of_run(scene), **_of_error(error, errors, frames)}
        deadline = time.monotonic() + _SECONDS
        looks: list[Callable[[], dict[str, Any]]] = [
            lambda: {"workers": workers_of(frames)},
            lambda: _of_disks(scene.layout.folder, errors),
            lambda: _of_memory(scene),
            lambda: _of_torch(error, errors, scene, deadline),
            lambda: _traceback(error),
        ]
        _within(_SECONDS, lambda: _look(looks, record))
        known = dict(record)  # a thread that hangs may still write to it
        write_json(scene.layout.error(scene.attempt, scene.rank), known)
        known["is_recorded"] = True
    return known


def _look(looks: list[Callable[[], dict[str, Any]]], record: dict[str, Any]) -> None:
    for look in looks:
        # Code of the user may run here, and raise anything.
        with contextlib.suppress(BaseException):
            record.update(look())


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Run in a thread, and wait for at most so long."""
    thread = threading.Thread(target=work, name="holdfast-last-words", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads
        thread.start()
        _join([thread], seconds)


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
    if "torch" not in sys.modules:
        return

    def look() -> None:
        with contextlib.suppress(Exception):  # objects of any kind are inspected
            _find_suspects(scene, thread)

    with contextlib.suppress(RuntimeError):
        threading.Thread(target=look, name="holdfast-suspects", daemon=True).start()


def _find_suspects(scene: Scene, thread: int) -> None:
    graphs = importlib.import_module("holdfast.torch.memory_report")
    views = view([each for each in frames_of_thread(thread) if is_users(each[0])])
    counts = (scene.steps, scene.batch)
    found = graphs.find_kept_graphs(views, counts, time.monotonic() + _SUSPECTS_SECONDS)
    # A graph that was freed by its backward pass is small.
    found = [each for each in found if not each["freed"]]
    if not found:
        return
    most = found[0]
    say(
        f"{most['holder']} ({most['where']}) keeps {most['count']} losses or outputs with all that "
        "their backward pass would need.\nKeep loss.item() or loss.detach() instead.",
        each=True,
    )
    # The record of an exception says more: it replaces this one, and is not replaced by it.
    path = scene.layout.error(scene.attempt, scene.rank)
    if "type" in read_json(path):
        return
    record = {"time": time.time(), "rank": scene.rank, "step": scene.step, "graphs": found}
    write_json(path, record, durable=False)
