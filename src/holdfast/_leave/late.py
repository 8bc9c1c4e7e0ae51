"""The words with which a run leaves: at a boundary, or when none was left to answer.

In a script they are said. At a prompt or in a notebook the exception carries them,
since the interpreter shows it anyway, and once is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast._errors import Stopped
from holdfast._leave import statuses
from holdfast._leave.record import reason_of
from holdfast._say import say

_AGAIN = "Run it again to go on."
_DONE = "The next start goes on from there. If training is complete, call run.finish() first."


def say_leaving(stopped: Stopped, durable_step: int | None, *, in_job: bool = False) -> None:
    """Say what is durable as a run leaves that was asked to, and how to go on."""
    kept = _kept(durable_step)
    if isinstance(stopped, KeyboardInterrupt):
        stopped.message = f"{_as_a_person_says(stopped.reason)}: {kept}. {_AGAIN}"
        return
    is_requeued = in_job and stopped.status == statuses.REQUEUE  # a line of its own says so
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
