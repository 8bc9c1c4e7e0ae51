"""The words with which a run leaves: at a boundary, or when none was left to answer.

In a script they are said. At a prompt or in a notebook the exception carries them,
since the interpreter shows it anyway, and once is enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast import _errors
from holdfast._errors import HoldfastError, Stopped
from holdfast._run.exit.record import reason_of
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._text import say

_AGAIN = "Run it again to go on."
_DONE = "The next start goes on from there. If training is complete, call run.finish() first."


def say_leaving(stopped: Stopped, durable_step: int | None, *, in_job: bool = False) -> None:
    """Say what is durable as a run leaves that was asked to, and how to go on."""
    kept = _kept(durable_step)
    if isinstance(stopped, KeyboardInterrupt):
        stopped.message = f"{_as_a_person_says(stopped.reason)}: {kept}. {_AGAIN}"
        return
    is_requeued = in_job and stopped.status == _errors.REQUEUE  # a line of its own says so
    again = "" if is_requeued else " Start the same command again to go on."
    say(f"{kept}; leaving with status {stopped.status} ({stopped.reason}).{again}")


def say_in_memory(stopped: Stopped, step: int, *, is_removed: bool) -> None:
    """Say where the last state is, as a run leaves whose disk did not take it.

    `is_removed` if the run folder is not there any more.
    """
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
    """Say what became of a stop that came too late for a boundary, or that none was asked for."""
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
    else:  # data-loader workers may have died of the signal too
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
    """Say what Keras' fit was not given, if it trained and no step of the run was passed."""
    for value in state.values():
        of_keras = any(base.__module__.partition(".")[0] == "keras" for base in type(value).__mro__)
        made = getattr(getattr(value, "optimizer", None), "iterations", 0)
        if of_keras and hasattr(value, "fit") and int(made) > step:
            say(
                "no step of this run was seen: fit() tells the run nothing by itself.\n"
                "Give it the callback: model.fit(…, callbacks=[holdfast.keras.Callback(run)])"
            )
            return


# -- What a failing run says itself, before Python shows its traceback -----------------------------
# Only where it knows better than the traceback: that the disk was full where torch speaks of a
# position in a file, or which worker died where a file was not found.


def say_verdict(error: BaseException, words: dict[str, Any], folder: Path) -> None:
    """Say why the run fails, if that can be told and the exception does not tell it itself."""
    if words and not isinstance(error, HoldfastError):  # ours are sentences already
        with contextlib.suppress(Exception):  # the exception itself must come through
            _say_verdict(words, folder)


def _say_verdict(words: dict[str, Any], folder: Path) -> None:
    # They are needed only where something has gone wrong.
    from holdfast._diagnose.deaths.judge import judge
    from holdfast._diagnose.evidence.evidence import Evidence, RankEvidence
    from holdfast._diagnose.evidence.gather import gather_run
    from holdfast._diagnose.verdict import Cause

    rank, attempt = words["rank"], words["attempt"]
    mine = RankEvidence(rank=rank, error=words, host=words["host"], step=words["step"])
    verdict = judge(Evidence(subject=str(folder), kind="run", ranks=[mine], attempt=attempt))
    is_victim = verdict.cause in (Cause.PEER_LOST, Cause.COLLECTIVE_TIMEOUT)
    if is_victim and words["ranks"] > 1:
        # What ended first is the news. If it could speak, it has; if not, one speaks for all.
        if rank:
            return
        evidence = gather_run(folder, attempt)
        evidence.is_live = False  # but for these words
        verdict = judge(evidence)
        culprit = verdict.rank
        if culprit not in (None, rank) and _has_failed(folder, attempt, culprit):
            return
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
    elif verdict.advice:  # a full disk has not taken the record either
        say(verdict.advice[0], each=not is_victim)


def _has_failed(folder: Path, attempt: int, rank: int) -> bool:
    """Whether a rank has recorded an exception, and so has said itself what there is to say."""
    return "type" in read_json(RunLayout(folder).error(attempt, rank))
