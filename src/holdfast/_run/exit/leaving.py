"""How a run leaves: within a bounded time, and with which words.

After the state is durable nothing may hold the process: joins of data-loader workers, communicator
teardown and loggers can hang, and a scheduler would kill the whole job for it. A thread ends the
process when its time is up, but only if it is really leaving: a script that catches `Stopped` and
goes on is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from holdfast import _errors
from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name
from holdfast._environment.processes.proc import FairDeadline, is_leaving, read_bytes
from holdfast._errors import HoldfastError, Stopped, is_interactive
from holdfast._store.folder import journal
from holdfast._store.folder.atomic import wait_for_writes, write_atomic
from holdfast._store.folder.attempts import read_json, release, write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.format.threads import start_thread
from holdfast._text import say

_WRITE_SECONDS = 1.0  # at most, for a record that another thread is writing
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
    wait_for_writes(_WRITE_SECONDS)  # the main thread may be recording its exception
    os._exit(status)


def leave_at_once(
    place: ExitRecord, reason: str, record: dict[str, Any], *, asked: bool, then: str = ""
) -> None:
    """Say so, record it, and end the process without waiting for the step."""
    status = record["status"]
    say(f"leaving at once ({reason}): {_kept(record['durable_step'])}. Status {status}.")
    if then:
        say(then)
    place.write({"how": reason, **record}, asked=asked)
    end_process(status)


def _is_leaving_by(stopped: weakref.ref[Stopped]) -> bool:
    """True while the main thread leaves: in `finally` blocks, or joining threads.

    By this very exception: a process that makes several runs may handle another one.
    """
    main = threading.main_thread()
    if not main.is_alive():
        return True
    found = sys._current_exceptions().get(main.ident or 0)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    while error is not None and error is not stopped():
        error = error.__context__  # another one was raised meanwhile
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


def cancel_exit() -> None:
    """A run is opened, so the process is not leaving.

    The keeper is told here: while a call holds the GIL, the thread could not do it in time.
    """
    while _bounds:
        pid, timer, stays = _bounds.pop()
        if pid == os.getpid():  # else it belongs to the process that forked this one
            timer.set()
            stays()


def die_if_terminated(stopped: Stopped) -> None:
    """Let a SIGTERM end an interactive interpreter, which no exception ends.

    A notebook server sends it to a kernel that is to end, and SIGKILL soon after.
    """
    asked = stopped.status == _errors.TERMINATED and is_interactive()
    if asked and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # else a handler was called
        signal.raise_signal(signal.SIGTERM)


# -- The words with which a run leaves -------------------------------------------------------------
# In a script they are printed. At a prompt or in a notebook the exception carries them, since the
# interpreter shows it.


_AGAIN = "Run it again to go on."
_DONE = (
    "The next start goes on from there. If training is complete, call run.finish() before you "
    "leave the loop."
)


def say_leaving(stopped: Stopped, durable_step: int | None, *, in_job: bool = False) -> None:
    kept = _kept(durable_step)
    if isinstance(stopped, KeyboardInterrupt):
        stopped.message = f"{_as_a_person_says(stopped.reason)}: {kept}. {_AGAIN}"
        return
    is_requeued = in_job and stopped.status == _errors.REQUEUE  # another line says so
    again = "" if is_requeued else " Start the same command again to go on."
    say(f"{kept}; leaving with status {stopped.status} ({stopped.reason}).{again}")


def say_in_memory(stopped: Stopped, step: int, *, is_removed: bool) -> None:
    how = "Make room on the disk, or make the folder writable. Then start the same command again on"
    if is_removed:
        how = "The run folder was removed or moved. Start the same command again on"
    then = "it says how to go on there" if is_removed else "it goes on there"
    say(
        f"step {step} stays in the memory of this machine; leaving with status {stopped.status} "
        f"({stopped.reason}).\n{how} this machine, before it is rebooted: {then}."
    )


@contextlib.contextmanager
def stop_at_interrupt() -> Iterator[None]:
    """Make Ctrl-C a stop, with a sentence in place of a traceback, while a run is being opened."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, Stopped):
            raise
        stopped = Stopped(_errors.PERSON, "Ctrl-C")
        words = "while the run was being opened: no step was made, and what was saved stays"
        if isinstance(stopped, KeyboardInterrupt):
            stopped.message = f"interrupted {words}. {_AGAIN}"
        else:
            say(f"Ctrl-C {words}; leaving with status {stopped.status}.")
        raise stopped from None


def answer_late(
    stopped: Stopped | None,
    error: BaseException | None,
    step: int,
    durable_step: int | None,
    *,
    is_left: bool = False,
) -> None:
    """Say how a run leaves outside a boundary; `stopped`: a stop came too late for one."""
    kept = _kept(durable_step)
    if stopped is None:
        if error is not None:
            say(f"{type(error).__name__} in step {step + 1}; {kept}.")
        elif durable_step is None and step == 0:
            say(
                "this run has seen no step, so nothing is saved.\n"
                "Loop over run.steps(n), or over run.epochs(n) and run.batches(loader)."
            )
        elif durable_step != step:
            say(f"the loop was left early, at step {step}; {kept}.\n{_DONE}")
        elif is_left:
            say(f"the loop was left at step {step}, which is durable.\n{_DONE}")
        return
    reason = stopped.reason
    if isinstance(stopped, KeyboardInterrupt):
        reason = _as_a_person_says(reason)
    if error is None:
        words = f"{reason}: leaving; {kept}."
    elif isinstance(error, KeyboardInterrupt):
        words = f"{reason}: step {step + 1} was not finished; {kept}."
    else:  # the signal may have ended data-loader workers too
        words = f"after {reason} the step failed ({reason_of(error)}); {kept}."
    if isinstance(stopped, KeyboardInterrupt):
        stopped.message = f"{words} {_AGAIN}"
    else:
        say(words)


def _kept(durable_step: int | None) -> str:
    return "nothing is durable yet" if durable_step is None else f"step {durable_step} is durable"


def _as_a_person_says(reason: str) -> str:
    return "interrupted" if reason == "SIGINT" else reason  # there is no Ctrl-C in a notebook


def say_unseen_fit(state: Mapping[str, Any], step: int) -> None:
    """Say that Keras' fit lacks the callback, if it trained and the run saw no step."""
    for value in state.values():
        of_keras = any(base.__module__.partition(".")[0] == "keras" for base in type(value).__mro__)
        made = getattr(getattr(value, "optimizer", None), "iterations", 0)
        if of_keras and hasattr(value, "fit") and int(made) > step:
            say(
                "no step of this run was seen: fit() tells the run nothing by itself.\n"
                "Give it the callback: model.fit(…, callbacks=[holdfast.keras.Callback(run)])"
            )
            return


# -- What a failing run says before Python shows its traceback -------------------------------------
# Only where it knows more than the traceback: that the disk was full where torch names a position
# in a file, or which worker died where a file was not found.


def say_verdict(error: BaseException, words: dict[str, Any], folder: Path) -> None:
    """Say why the run fails, if that is known and the exception does not say it."""
    if words and not isinstance(error, HoldfastError):  # ours say it already
        with contextlib.suppress(Exception):  # the exception itself must come through
            _say_verdict(words, folder)


def _say_verdict(words: dict[str, Any], folder: Path) -> None:
    # Slow to import, and needed only in a failure.
    from holdfast._diagnose.deaths.judge import judge
    from holdfast._diagnose.evidence.evidence import Evidence, RankEvidence
    from holdfast._diagnose.evidence.gather import gather_run
    from holdfast._diagnose.verdict import Cause

    rank, attempt = words["rank"], words["attempt"]
    mine = RankEvidence(rank=rank, error=words, host=words["host"], step=words["step"])
    verdict = judge(Evidence(subject=str(folder), kind="run", ranks=[mine], attempt=attempt))
    is_victim = verdict.cause in (Cause.PEER_LOST, Cause.COLLECTIVE_TIMEOUT)
    if is_victim and words["ranks"] > 1:
        # The rank that ended first is the cause. If it said so, be silent; else rank 0 says it.
        if rank:
            return
        evidence = gather_run(folder, attempt)
        evidence.is_live = False  # except for this process
        verdict = judge(evidence)
        culprit = verdict.rank
        if culprit not in (None, rank) and "type" in read_json(
            RunLayout(folder).error(attempt, culprit)
        ):
            return  # that rank has recorded its exception, and has said so
    better = {
        *(Cause.CUDA_OOM, Cause.CUDA_ERROR, Cause.DISK_FULL, Cause.SHM_FULL, Cause.WORKER_DIED),
        *(Cause.OOM_WORKER, Cause.OOM_CGROUP, Cause.OOM_MACHINE, Cause.PEER_LOST, Cause.KILLED),
        *(Cause.COLLECTIVE_TIMEOUT, Cause.RENDEZVOUS, Cause.ENVIRONMENT, Cause.LYING_STATUS),
        *(Cause.SEGFAULT, Cause.ABORT, Cause.BUS_ERROR, Cause.CXX_EXCEPTION, Cause.TERMINATED),
    }
    if verdict.cause not in better:
        return
    say(verdict.sentence, each=not is_victim)
    if words.get("is_recorded"):
        say(f"More: holdfast why {folder}", each=not is_victim)
    elif verdict.advice:  # nor was the record written to a full disk
        say(verdict.advice[0], each=not is_victim)


# -- How an attempt ended: its exit status, its reason, and the record of both ---------------------


_MESSAGE_LENGTH = 4000
_MOST_PARTS = 8  # of a group of exceptions


def status_of(error: BaseException | None) -> int:
    if error is None:
        return _errors.FINISHED
    if isinstance(error, Stopped):
        return error.status
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return _errors.PERSON if isinstance(error, KeyboardInterrupt) else 1


def reason_of(error: BaseException | None) -> str:
    """The reason of a stop; any other exception as Python prints it, of bounded length."""
    if error is None:
        return "closed"
    if isinstance(error, Stopped):
        return error.reason
    return f"{type(error).__name__}: {text_of(error)}".strip(": ")


def text_of(error: BaseException) -> str:
    """The text of an exception; of a group also those of its parts."""
    try:
        said = str(error)[:_MESSAGE_LENGTH]
    except BaseException as broken:  # noqa: BLE001  the user's __str__ may raise anything
        return f"(its text could not be had: {type(broken).__name__})"
    if isinstance(error, BaseExceptionGroup):  # its own text only counts them
        parts = [reason_of(each) for each in error.exceptions[:_MOST_PARTS]]
        said = f"{said}: {'; '.join(parts)}"[:_MESSAGE_LENGTH]
    return said


@dataclass(frozen=True)
class ExitRecord:
    """Writes the end of an attempt; of several ranks the first writes for all."""

    layout: RunLayout
    attempt: int
    rank: int = 0
    launcher: dict[str, Any] | None = None  # the process that restarts the run by itself

    def write(self, record: dict[str, Any], *, asked: bool) -> None:
        """Record the end, so that no other process waits for this attempt."""
        release(self.layout, self.attempt)  # first: the rest may fail on a full disk
        if self.rank:
            return
        journal.append(self.layout.journal, "exit", attempt=self.attempt, **record)
        told: dict[str, Any] = {**record, "time": time.time()}
        if asked and self.launcher is not None:
            # A launcher that restarts any failed process must not undo a stop.
            told = {**told, "asked": True, "launcher": self.launcher}
        with contextlib.suppress(OSError):
            write_json(self.layout.exit(self.attempt), told)

    def write_trouble(self, error: BaseException) -> None:
        """Keep a traceback that the user is not shown."""
        with contextlib.suppress(OSError):
            text = _traceback(error).encode("utf-8", "backslashreplace")
            write_atomic(self.layout.trouble(self.attempt, self.rank), text, durable=False)


def _traceback(error: BaseException) -> str:
    import traceback  # slow to import

    return "".join(traceback.format_exception(error))


# -- Records the exception that ends a run, with facts that only the trainer knows -----------------
# Free disk space, dead workers and the contents of the GPU change within moments. So they are
# observed first, in a thread with a bounded wait: a dead file system may hang it, and the state is
# not durable yet. Nothing is raised here: it would hide the exception.


_SECONDS = 3.0  # for all of it
_SCAN_SECONDS = 1.0  # for what looks through every object that there is
_DISK_SECONDS = 0.5
_JOIN_SECONDS = 0.02
_TRACEBACK_LENGTH = 20_000


@dataclass(frozen=True)
class ErrorContext:
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
    threads: list[dict[str, Any]] = field(default_factory=list)  # exceptions that have ended some


def is_failure(error: BaseException | None) -> bool:
    """True unless it is a stop, Ctrl-C or a normal end of the script."""
    if isinstance(error, Stopped | KeyboardInterrupt | GeneratorExit | None):
        return False
    if not isinstance(error, SystemExit):
        return True
    # The shell hides the real code of 256, -1 or a text.
    code: object = error.code
    return code != 0 if isinstance(code, int) else code is not None


def left_at(error: BaseException, context: ErrorContext) -> list[list[Any]] | None:
    """Where `sys.exit` was called with status 0 in the loop: it looks like the end of training."""
    is_exit = isinstance(error, SystemExit) and not isinstance(error, Stopped)
    if not is_exit or is_failure(error) or context.where != "loop":
        return None
    return places_of(frames_of(error))[-_SHOWN_FIRST:]


def record_exception(error: BaseException, context: ErrorContext) -> dict[str, Any]:
    known: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # the exception itself must come through
        errors, frames = errors_of(error), frames_of(error)
        record = {**_of_run(context), **describe(error, errors, frames)}
        deadline = time.monotonic() + _SECONDS
        facts: list[Callable[[], dict[str, Any]]] = [
            lambda: {"workers": workers_of(frames)},
            lambda: _of_disks(context.layout.folder, errors),
            lambda: _of_memory(context),
            lambda: _of_torch(error, errors, context, deadline),
            lambda: {"traceback": _traceback(error)[-_TRACEBACK_LENGTH:]},
        ]

        def observe() -> None:
            for each in facts:
                with contextlib.suppress(BaseException):  # code of the user may run here
                    record.update(each())

        _join([start_thread(observe, name="holdfast-last-words")], _SECONDS)
        known = dict(record)  # a thread that hangs may still write to it
        write_json(context.layout.error(context.attempt, context.rank), known)
        known["is_recorded"] = True
    return known


def _join(started: list[threading.Thread | None], seconds: float) -> None:
    """Wait for threads, without counting the time in which they wait for a processor."""
    deadline, threads = FairDeadline(seconds, lambda: [os.getpid()]), list(filter(None, started))
    while (left := [each for each in threads if each.is_alive()]) and not deadline.is_over():
        left[0].join(_JOIN_SECONDS)


def _of_run(context: ErrorContext) -> dict[str, Any]:
    return {
        "time": time.time(),
        "host": host_name(),
        "pid": os.getpid(),
        "rank": context.rank,
        "ranks": context.ranks,
        "attempt": context.attempt,
        "step": context.step,
        "phase": context.phase,
        "where": context.where,
        "is_configuration": context.steps == 0,
        **({"threads": context.threads} if context.threads else {}),
    }


def describe(error: BaseException, errors: list[BaseException], frames: Frames) -> dict[str, Any]:
    """Its type, text, causes and places."""
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return {
        "type": kind.__name__,
        "qualified": f"{module}{kind.__qualname__}",
        "message": text_of(error),
        "chain": [reason_of(each) for each in errors[1:]],
        "frames": places_of(frames),
        "exit_code": repr(error.code)[:200] if isinstance(error, SystemExit) else None,
    }


def _of_disks(folder: Path, errors: list[BaseException]) -> dict[str, Any]:
    """The free space of every disk that may be involved; a file system that hangs is left out."""
    from holdfast._environment.processes.memory_sample import room, shm_room

    places = [("run", str(folder)), ("tmp", variables.temporary_folder())]
    with contextlib.suppress(OSError):  # it may have been removed
        places.append(("cwd", str(Path.cwd())))
    places += [("target", target) for target in written_targets(errors)]
    found: dict[int, dict[str, Any]] = {}

    def look(number: int, role: str, place: str) -> None:
        if (figures := room(place)) is not None:
            found[number] = {**figures, "role": role}

    threads = [start_thread(look, number, *place) for number, place in enumerate(places)]
    _join(threads, _DISK_SECONDS)
    return {"disks": [each for _, each in sorted(dict(found).items())], "shm": shm_room()}


def _of_memory(context: ErrorContext) -> dict[str, Any]:
    from holdfast._environment.processes.cgroup import read_counters
    from holdfast._environment.processes.memory_sample import Sampler

    sampler = Sampler(os.getpid())
    # Only the kernel's counters show that it killed a child. Their earlier values are in the
    # keeper's last heartbeat, which is of rank 0 and its host; before the first one, those from
    # the opening of the run are used.
    beat = read_json(context.layout.heartbeat(context.attempt)) if context.rank == 0 else {}
    before = beat.get("counters") or (context.counters if context.rank == 0 else None)
    now = read_counters(sampler.cgroup)
    return {"memory": sampler.take(), "counters": {"before": before, "death": now}}


def _of_torch(
    error: BaseException, errors: list[BaseException], context: ErrorContext, deadline: float
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
        dict(context.state),
        counts=(context.steps, context.batch),
        until=min(deadline, time.monotonic() + _SCAN_SECONDS),
    )
    return found


# -- What may be filling the memory ----------------------------------------------------------------
# A process that is killed for its memory leaves no record. So when the keeper warns of the limit,
# the trainer searches for a known leak: autograd graphs that are kept.


_SUSPECTS_SECONDS = 1.0


def look_for_graphs(context: ErrorContext, thread: int) -> None:
    """Search a thread's variables in the background, and say what keeps graphs."""
    if "torch" in sys.modules:
        start_thread(_find_suspects, context, thread)


def _find_suspects(context: ErrorContext, thread: int) -> None:
    with contextlib.suppress(Exception):  # objects of any kind are inspected
        graphs = importlib.import_module("holdfast.torch.memory_report")
        frames = _with_callers(sys._current_frames().get(thread))
        views = view([each for each in frames if is_users(each[0])])
        counts = (context.steps, context.batch)
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
        path = context.layout.error(context.attempt, context.rank)
        if "type" in read_json(path):
            return
        record = {"time": time.time(), "rank": context.rank, "step": context.step, "graphs": found}
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
    passed = _passed(error)
    callers = _with_callers(passed[0][0].f_back) if passed else []
    return (callers + passed)[-_MOST_FRAMES:]


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
    workers = _children()
    for frame, _ in frames[-_VIEWED_LAST:]:  # those of torch's loaders, in a running iterator
        held = getattr(variables_of(frame).get("self"), "__dict__", {}).get("_workers")
        workers += held if isinstance(held, list) else []
    # The connection to a dying process is reset before its exit status is known.
    deadline = FairDeadline(_DYING_SECONDS, lambda: map(_pid_of, workers))
    while any(map(_is_dying, workers)) and not deadline.is_over():
        time.sleep(_PAUSE_SECONDS)
    for process in workers:
        with contextlib.suppress(Exception):  # objects of any library
            pid, status = process.pid, process.exitcode
            if pid is not None:
                found[pid] = {"pid": pid, "alive": status is None, "exitcode": status}
    return sorted(found.values(), key=lambda each: bool(each["alive"]))[:_MOST_WORKERS]


def _children() -> list[Any]:
    # `active_children()` would leave out the dead.
    return list(getattr(sys.modules.get("multiprocessing.process"), "_children", ()))


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


# -- The exceptions that end threads: the main thread often sees only their consequence ------------
# A producer that dies leaves a queue empty, and the main thread then raises `queue.Empty`. Python
# only prints the exception of the thread. A record holds text, and no reference to the exception:
# its frames may hold tensors. It is in the journal of the open run too: a hang leaves no other.


_MOST_THREADS = 8  # the newest ones
_MOST_CHARACTERS = 1000
_recorded: list[dict[str, Any]] = []
#: Where the open runs note it, by their folders.
thread_journals: dict[Path, Callable[..., None]] = {}


def watch_threads() -> None:
    """Record what ends threads from now on; the hook that is set shows it as before."""
    former = threading.excepthook
    if getattr(former, "func", None) is not _observe:
        threading.excepthook = functools.partial(_observe, former)


def thread_errors() -> list[dict[str, Any]]:
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
                del _recorded[:-_MOST_THREADS]
                short = {**told, "message": told["message"][:_MOST_CHARACTERS]}
                facts = {name: short[name] for name in ("thread", "type", "message", "frames")}
                for journal in list(thread_journals.values()):
                    journal("thread-died", **facts)
    former(args)
