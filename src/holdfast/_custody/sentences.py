"""What a keeper finds and a person should read."""

from __future__ import annotations

from typing import Any


def sentence_of(message: dict[str, Any]) -> str | None:
    """The words for a message that only tells something; None if there is more to do about it."""
    if message["kind"] == "failed":
        return f"a checkpoint could not be made: {message['error']}. It will be tried again."
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
    return None
