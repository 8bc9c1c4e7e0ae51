"""What a run leaves with when its loop was left without a boundary to answer."""

from __future__ import annotations

from holdfast._errors import Stopped
from holdfast._leave.record import reason_of
from holdfast._say import say


def say_leaving(stopped: Stopped, durable_step: int | None) -> None:
    """Say what is durable as a run leaves that was asked to, and how to go on."""
    say(
        f"{_kept(durable_step)}; leaving with status {stopped.status} ({stopped.reason}). "
        "Start the same command again to go on."
    )


def _kept(durable_step: int | None) -> str:
    return "nothing is durable yet" if durable_step is None else f"step {durable_step} is durable"


def answer_late(
    asked: tuple[str, int] | None, error: BaseException | None, step: int, durable_step: int | None
) -> Stopped | None:
    """The answer to a stop (its reason and status) that came too late for a boundary, if any."""
    kept = _kept(durable_step)
    if asked is None:
        if error is not None:
            say(f"{type(error).__name__} in step {step + 1}; {kept}.")
        elif durable_step != step:
            say(f"the loop was left early, at step {step}; {kept}.")
        return None
    reason, status = asked
    if error is None:
        say(f"{reason}: leaving; {kept}.")
    else:  # data-loader workers may have died of the signal too
        say(f"after {reason} the step failed ({reason_of(error)}); {kept}.")
    return Stopped(status, reason, step)
