"""What a keeper finds and a person should read."""

from __future__ import annotations

import time
from typing import Any

from holdfast._errors import RanksError
from holdfast._keeper.hangs.record import told_of
from holdfast._text import size

_MOST_RANKS = 8


def sentence_of(message: dict[str, Any]) -> str | None:
    """The words for a message that only tells something; None if there is more to do about it."""
    if message["kind"] == "failed":
        return f"a checkpoint could not be made: {message['error']}. It will be tried again."
    if message["kind"] == "mirror":
        return str(message["text"])
    if message["kind"] == "twins":
        first, second = message["ranks"]
        return (
            f"ranks {first} and {second} train on identical batches: each should have its own "
            "share of the data.\nGive the loader a DistributedSampler, or seed each rank's "
            "data in another way."
        )
    if message["kind"] == "short-warning":
        return (
            f"SLURM warns {message['warning']:.0f} s before the time limit, and a step with its "
            f"save takes {message['needed']:.0f} s here.\n"
            f"Ask for more: --signal=USR2@{2 * message['needed'] + 30:.0f}"
        )
    if message["kind"] in ("hang", "hang-over", "paused"):
        return _of_hang(message)
    if message["kind"] == "notice":
        return _of_notice(message)
    if message["kind"] == "memory" and not message.get("quiet"):
        return _of_memory(message)
    return None


def uneven(epoch: int, batches: list[list[int]]) -> RanksError:
    """The ranks have different numbers of batches, so no later step is the same on all of them."""
    counts = ", ".join(f"rank {rank}: {count}" for rank, count in batches[:_MOST_RANKS])
    more = ", …" if len(batches) > _MOST_RANKS else ""
    return RanksError(
        f"the ranks have different numbers of batches in epoch {epoch} ({counts}{more}), and a "
        "step is saved only where all ranks have made it.\n"
        "Give all ranks the same number: a DistributedSampler, drop_last=True, or "
        "run.batches(loader, steps=…). DDP's Join is not supported."
    )


def _of_hang(message: dict[str, Any]) -> str | None:
    if message["kind"] == "hang-over":
        return "it goes on: a step was made after all."
    if message["kind"] == "paused":
        if message.get("is_deaf"):
            return None  # this very process: it would be heard when it is over
        who = f"rank {message['rank']}" if message["of"] > 1 else "the run"
        return f"{who} is held by {message['by']}: no hang. The watch waits until it goes on."
    return told_of(message)


def _of_notice(message: dict[str, Any]) -> str | None:
    reason = message["reason"]
    if message["what"] == "deaf":
        return (
            f"{message['cloud']} does not tell whether this machine is about to end ({reason}).\n"
            "Let this process reach 169.254.169.254 (AWS: from a container with a hop limit of "
            "2), or switch this off: holdfast.Settings(notices='off')"
        )
    if message["acts"] == "save":
        return f"{reason}: the next step is made durable, and the run goes on."
    if message["acts"] == "later":
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(message["at"]))
        return f"{reason} comes at {at} UTC: the run leaves {message['lead']:.0f} s before."
    return None  # the stop itself is said


def _of_memory(message: dict[str, Any]) -> str:
    growth, limit = size(message["bytes_per_second"]), size(message["limit"])
    if message["what"] == "shm":
        fact = f"/dev/shm fills by {growth}/s: its {limit} are full"
    elif message["what"] == "machine":
        fact = f"memory grows by {growth}/s: the machine's {limit} are used up"
    else:
        fact = f"memory grows by {growth}/s: the limit of {limit} ({message['what']}) is reached"
    who = f"rank {message['of_rank']} on {message['host']}: " if "of_rank" in message else ""
    step = message["step"]
    then = "The next step" if step is None else f"Step {step}"
    now = "" if step is None else " now"
    return f"{who}{fact} in about {message['seconds']:.0f} s. {then} is made durable{now}."
