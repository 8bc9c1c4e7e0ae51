"""How a run leaves: within a bounded time, and with which words.

After the state is durable nothing may hold the process: joins of data-loader workers, communicator
teardown and loggers can hang, and a scheduler would kill the whole job for it. A thread ends the
process when its time is up, but only if it is really leaving: a script that catches `Stopped` and
goes on is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import _errors
from holdfast._errors import HoldfastError, Stopped, is_interactive
from holdfast._store.folder import journal
from holdfast._store.folder.atomic import write_atomic
from holdfast._store.folder.attempts import read_json, release, write_json
from holdfast._store.folder.layout import RunLayout
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


def goes_on() -> None:
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
_DONE = "The next start goes on from there. If training is complete, call run.finish() first."


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
    then = "it goes on there"
    if is_removed:
        how = "The run folder was removed or moved. Start the same command again on"
        then = "it says how to go on there"
    say(
        f"step {step} stays in the memory of this machine; leaving with status {stopped.status} "
        f"({stopped.reason}).\n"
        f"{how} this machine, before it is rebooted: {then}."
    )


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
        say(f"more: holdfast why {folder}", each=not is_victim)
    elif verdict.advice:  # nor was the record written to a full disk
        say(verdict.advice[0], each=not is_victim)


# -- How an attempt ended: its exit status, its reason, and the record of both ---------------------


_MESSAGE_LENGTH = 4000
_MOST_PARTS = 8  # of a group of exceptions


def status_of(error: BaseException | None) -> int:
    """The exit status that Python will give for this exception."""
    if error is None:
        return _errors.FINISHED
    if isinstance(error, Stopped):
        return error.status
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return _errors.PERSON if isinstance(error, KeyboardInterrupt) else 1


def reason_of(error: BaseException | None) -> str:
    if error is None:
        return "closed"
    if isinstance(error, Stopped):
        return error.reason
    return sentence_of(error)


def sentence_of(error: BaseException) -> str:
    """An exception as Python prints it, of bounded length."""
    return f"{type(error).__name__}: {text_of(error)}".strip(": ")


def text_of(error: BaseException) -> str:
    """The text of an exception; of a group also those of its parts."""
    try:
        said = str(error)[:_MESSAGE_LENGTH]
    except BaseException as broken:  # noqa: BLE001  the user's __str__ may raise anything
        return f"(its text could not be had: {type(broken).__name__})"
    if isinstance(error, BaseExceptionGroup):  # its own text only counts them
        parts = [sentence_of(each) for each in error.exceptions[:_MOST_PARTS]]
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
        import traceback

        with contextlib.suppress(OSError):
            text = "".join(traceback.format_exception(error))
            path = self.layout.trouble(self.attempt, self.rank)
            write_atomic(path, text.encode("utf-8", "backslashreplace"), durable=False)
