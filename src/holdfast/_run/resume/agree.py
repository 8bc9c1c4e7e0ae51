"""Several ranks find one state to go on from: all of them can read it, or none uses it.

What is in memory counts only if every rank finds its part there. Each rank checks its share
of the files, and a candidate that one of them finds damaged is set aside for all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from holdfast._adapters.registry import send_to_device
from holdfast._errors import CheckpointError, DamagedCheckpoint, UnreadableCheckpoint
from holdfast._store.folder.layout import RunLayout
from holdfast._store.read.damage import check_file
from holdfast._store.read.find import (
    Candidate,
    Found,
    Leftover,
    age,
    held_by_ranks,
    on_disk,
    read_candidate,
    refuse_to_begin_anew,
    report_damage,
)
from holdfast._store.read.verify import read_manifest

_CANDIDATES = 64


class Party(Protocol):
    """The ranks that start together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, topic: str, value: Any) -> list[Any]: ...


def find_together(
    party: Party,
    layout: RunLayout,
    line: dict[int, int | None],
    leftovers: list[Leftover],
    say: Callable[[str], None],
) -> Found | None:
    """The newest state that all ranks can read; None if there never was one."""
    offered = _offers(party, layout, line, leftovers)
    damaged = 0
    for number, candidate in enumerate(offered):
        found, error = _try(party, candidate)
        votes = party.exchange(f"vote {number}", None if error is None else str(error))
        complaints = [vote for vote in votes if vote is not None]
        if not complaints:
            assert found is not None
            return found
        if isinstance(error, UnreadableCheckpoint):
            raise error
        if party.rank == 0:
            damaged += report_damage(candidate, DamagedCheckpoint(complaints[0]), layout, say)
        else:
            damaged += candidate.folder is not None
    party.exchange("nothing found", None)  # rank 0 may be setting aside what the others look for
    refuse_to_begin_anew(layout, damaged)
    return None


def _offers(
    party: Party, layout: RunLayout, line: dict[int, int | None], leftovers: list[Leftover]
) -> list[Candidate]:
    """What may be good, the newest first; the same list on all ranks."""
    mine = {(*key, len(peers)): peers for key, peers in held_by_ranks(leftovers).items()}
    names = [[c.attempt, c.step, c.folder.name] for c in on_disk(layout, line) if c.folder]
    told = party.exchange("candidates", {"memory": [list(key) for key in mine], "disk": names})
    shared = set.intersection(*({tuple(key) for key in each["memory"]} for each in told))
    offered = [
        Candidate(attempt, step, folder=layout.checkpoints / name)
        for attempt, step, name in told[0]["disk"]
    ]
    for attempt, mark, size in sorted(shared):
        last = line.get(attempt, -1)
        if last is None or mark // 2 <= last:
            peers = mine[attempt, mark, size]
            leftover, record = peers[party.rank % size]
            offered.append(Candidate(attempt, mark // 2, None, leftover, record, tuple(peers)))
    return sorted(offered, key=_order, reverse=True)[:_CANDIDATES]


def _order(candidate: Candidate) -> tuple[int, int, int, int, str]:
    """As `age`, but for the sequence numbers, which each rank has its own."""
    attempt, step, in_memory, _, name = age(candidate)
    mark = candidate.record.mark if candidate.record is not None else 0
    return attempt, step, in_memory, mark, name


def _try(party: Party, candidate: Candidate) -> tuple[Found | None, CheckpointError | None]:
    """Read this rank's state, and check the files that no other rank reads as a whole."""
    try:
        if candidate.folder is not None:
            _check_share(candidate.folder, party.rank, party.size)
        return read_candidate(candidate, party.rank, send_to_device), None
    except CheckpointError as error:
        return None, error


def _check_share(folder: Path, rank: int, size: int) -> None:
    files = read_manifest(folder).files
    for number, file in enumerate(files):
        if number % size == rank and number != rank:
            lines = check_file(folder, file)
            if lines:
                raise DamagedCheckpoint(f"{folder / file.name}: {lines[0]}.")
