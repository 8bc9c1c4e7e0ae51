"""Find the newest good state on the run's lineage, in memory or on disk.

A damaged or unfinished checkpoint is set aside, reported in one line and in the journal, and the
one before it is used. It is never deleted and never loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._errors import DamagedCheckpoint, NoGoodCheckpoint
from holdfast._store.folder import journal
from holdfast._store.folder.atomic import move_aside
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import is_on_line, set_aside_void
from holdfast._store.memory.backing import attempt_of, find_leftovers, open_leftover, rank_of
from holdfast._store.read.merge_ranks import join, read_checkpoint
from holdfast._store.read.verify import (
    ChoosePlaces,
    Loaded,
    Placement,
    SendToDevice,
    loaded_from,
    verify_image,
)

if TYPE_CHECKING:
    from holdfast._store.format.image import ImagePlan
    from holdfast._store.memory.arena import Arena, SlotRecord


@dataclass(eq=False)
class Leftover:
    """An arena that an earlier attempt left in memory."""

    arena: Arena
    path: Path
    rank: int = 0


@dataclass(frozen=True)
class Found:
    attempt: int
    step: int
    loaded: Loaded
    leftover: Leftover | None = None  # set if it was in memory
    record: SlotRecord | None = None


@dataclass(frozen=True)
class Candidate:
    attempt: int
    step: int
    folder: Path | None = None
    leftover: Leftover | None = None
    record: Any = None
    peers: tuple[tuple[Leftover, Any], ...] = ()  # of all ranks, in their order


def open_leftovers(run_id: str) -> list[Leftover]:
    """The arenas that earlier attempts of this run left in memory.

    Opened before waiting for the last keeper: it removes the file when it is done, and an open
    mapping stays readable.
    """
    if not (paths := find_leftovers(run_id)):
        return []
    from holdfast._store.memory.arena import Arena, NotAnArena  # only on Linux

    found = []
    for path in paths:
        descriptor = open_leftover(path)
        if descriptor is None:
            continue
        try:
            arena = Arena(descriptor)
        except (NotAnArena, ValueError, OSError):
            os.close(descriptor)
            continue  # perhaps a live attempt is creating it
        if arena.run_id == run_id:
            found.append(Leftover(arena, path, rank_of(path)))
    return found


def attempts_in_memory(run_id: str) -> set[int]:
    """The attempts of this run that left an arena."""
    return {attempt_of(path) for path in find_leftovers(run_id)}


def set_aside_unfinished(layout: RunLayout, say: Callable[[str], None]) -> None:
    """Move checkpoints that were never committed out of the way."""
    for partial in layout.partial_folders():
        with contextlib.suppress(OSError):
            where = move_aside(partial, layout.set_aside)
            say(f"an unfinished checkpoint was set aside: {where}")
            _note_aside(layout, partial, where, "unfinished")


def set_aside_bad(layout: RunLayout, say: Callable[[str], None]) -> None:
    """Move checkpoints that a rule has called bad out of the way."""
    for before, where in set_aside_void(layout):
        say(f"a rule has called {before.name} bad; it was set aside: {where}")
        _note_aside(layout, before, where, "called bad")


def _note_aside(layout: RunLayout, before: Path, where: Path | str, why: str) -> None:
    journal.append(layout.journal, "set-aside", name=before.name, where=str(where), why=why)


def find_newest(
    layout: RunLayout,
    line: dict[int, int | None],
    leftovers: list[Leftover],
    say: Callable[[str], None],
    send: SendToDevice | None = None,
    choose: ChoosePlaces | None = None,
    ahead: Found | None = None,
) -> Found | None:
    """The newest intact state on the lineage; None if there never was one.

    `ahead` was read already, and is returned if it is the newest.

    With `choose`, it is read into the memory of live objects. What a damaged one has left there,
    the one before it overwrites; if there is none, this raises.
    """
    damaged = 0
    candidates = list(_candidates(layout, line, leftovers))
    # With snapshots alone, a run may begin from nothing after damage: nothing is touched
    # before they are checked.
    is_begun = any(candidate.folder is not None for candidate in candidates)
    for candidate in candidates:
        this = candidate.leftover, candidate.record
        if ahead is not None and this == (ahead.leftover, ahead.record):
            return ahead
        try:
            return read_candidate(candidate, send=send, choose=choose if is_begun else None)
        except DamagedCheckpoint as error:
            damaged += report_damage(candidate, error, layout, say)
    refuse_to_start_over(layout, damaged)
    return None


def newest_in_memory(leftovers: list[Leftover], attempt: int) -> Candidate | None:
    """The newest state that an attempt of one process left in memory; None if it is not hashed.

    Whether it may be used is decided by `find_newest`.
    """
    for leftover in leftovers:
        newest = leftover.arena.newest()
        is_of_it = leftover.arena.attempt == attempt and not leftover.rank
        if is_of_it and newest is not None and newest.is_hashed:
            return Candidate(attempt, newest.step, leftover=leftover, record=newest)
    return None


def refuse_to_start_over(layout: RunLayout, damaged: int) -> None:
    """If there were checkpoints, only a person may decide to train from the beginning."""
    strangers = len(layout.checkpoint_folders())
    if strangers and not damaged:
        raise NoGoodCheckpoint(
            f"{layout.folder}: none of the {strangers} checkpoints here is on this run's own line "
            "of attempts, and holdfast does not start over by itself.\n"
            f"See them with: holdfast ls {layout.folder}. To start over, use another folder."
        )
    if damaged or any(layout.set_aside.glob("step-*")):
        # Also at every later start.
        raise NoGoodCheckpoint(
            f"{layout.folder}: no checkpoint of this run is whole; "
            f"the damaged ones are in {layout.set_aside}.\n"
            "To start over, use another folder."
        )


def remove_leftovers(run_id: str, attempt: int, spare: Collection[Path]) -> None:
    """Remove the arenas of earlier attempts, once they are not needed any more."""
    for path in find_leftovers(run_id):
        if attempt_of(path) < attempt and path not in spare:
            with contextlib.suppress(OSError):
                path.unlink()


def _candidates(
    layout: RunLayout, line: dict[int, int | None], leftovers: list[Leftover]
) -> Iterator[Candidate]:
    found = on_disk(layout, line)
    of_ranks = {each.arena.attempt for each in leftovers if each.rank > 0}
    for leftover in leftovers:
        if leftover.arena.attempt not in of_ranks:
            found += [
                Candidate(leftover.arena.attempt, record.step, leftover=leftover, record=record)
                for record in leftover.arena.whole()
                if record.is_hashed  # else damage could not be detected
            ]
    for (attempt, mark), peers in held_by_ranks(leftovers).items():
        if attempt in of_ranks:
            found.append(Candidate(attempt, mark // 2, None, *peers[0], peers=tuple(peers)))
    on_line = [c for c in found if is_on_line(line, c.attempt, c.step)]
    yield from sorted(on_line, key=sort_key, reverse=True)


def held_by_ranks(
    leftovers: list[Leftover],
) -> dict[tuple[int, int], list[tuple[Leftover, SlotRecord]]]:
    """By (attempt, mark), the slots of all ranks for that boundary, if all are here."""
    found: dict[tuple[int, int], dict[int, tuple[Leftover, SlotRecord]]] = {}
    for leftover in leftovers:
        for record in reversed(leftover.arena.whole()):  # the newest of a mark wins
            if record.is_hashed:
                key = (leftover.arena.attempt, record.mark)
                found.setdefault(key, {})[leftover.rank] = (leftover, record)
    return {
        key: [by_rank[rank] for rank in sorted(by_rank)]
        for key, by_rank in found.items()
        if set(by_rank) == set(range(len(by_rank)))
    }


def on_disk(layout: RunLayout, line: dict[int, int | None]) -> list[Candidate]:
    folders = layout.checkpoint_folders()
    return [Candidate(a, step, folder=f) for step, a, f in folders if is_on_line(line, a, step)]


def sort_key(candidate: Candidate) -> tuple[int, int, bool, int, str]:
    """A sort key. Of one step the state in memory comes first: it is quicker to read, and
    never older than the disk, which was written from there."""
    in_memory = candidate.folder is None
    sequence = candidate.record.sequence if in_memory else 0
    name = "" if candidate.folder is None else candidate.folder.name
    return (candidate.attempt, candidate.step, in_memory, sequence, name)


def read_candidate(
    candidate: Candidate,
    rank: int = 0,
    send: SendToDevice | None = None,
    choose: ChoosePlaces | None = None,
) -> Found:
    """Read and check it; DamagedCheckpoint if it is damaged.

    With `send`, tensors that were on a device are sent there; with `choose`, the state of a single
    rank is put into its places.
    """

    def choose_here(plan: ImagePlan, head: dict[str, Any]) -> Placement | None:
        # Before anything is touched.
        _refuse_another_step(candidate, head, str(candidate.folder or where))
        is_alone = head.get("world", 1) == 1 and len(candidate.peers) <= 1
        return choose(plan, head) if choose is not None and is_alone else None

    where = ""
    if candidate.folder is not None:
        loaded = read_checkpoint(candidate.folder, rank, choose_here)
        _refuse_another_step(candidate, loaded.head, str(candidate.folder))
        if send is not None:
            loaded.sent.send(send, loaded.plan.specs, loaded.tensors, hashed=False)
        return Found(candidate.attempt, candidate.step, loaded)
    assert candidate.leftover is not None
    record = candidate.record
    where = f"the snapshot of step {record.step} in memory"
    slot = _slot(candidate.leftover, record, where)
    is_slot = not (candidate.peers or candidate.leftover.arena.shared)
    loaded = verify_image(*slot, where, send, choose_here, is_slot=is_slot)
    world = loaded.head.get("world", 1)
    if world != max(1, len(candidate.peers)):
        raise DamagedCheckpoint(f"{where}: it is a part of {world}, and not all of them are here.")
    if world > 1:
        loaded = _joined(candidate, loaded, rank % world, where)
    _refuse_another_step(candidate, loaded.head, where)
    return Found(candidate.attempt, candidate.step, loaded, candidate.leftover, record)


def _slot(
    leftover: Leftover, record: SlotRecord, where: str
) -> tuple[memoryview, ImagePlan, list[bytes]]:
    arena = leftover.arena
    try:
        plan = arena.plan(record.slot)
    except ValueError as error:
        raise DamagedCheckpoint(f"{where}: {error}.") from error
    return arena.image(record.slot), plan, arena.digests(record.slot)


def _joined(candidate: Candidate, own: Loaded, rank: int, where: str) -> Loaded:
    sources = []
    for number, (leftover, record) in enumerate(candidate.peers):
        place = f"{where}, rank {number}"
        # The tensors of another rank are checked when they are used.
        theirs = own if number == rank else loaded_from(*_slot(leftover, record, place), place)
        sources.append(theirs)
    return join(sources, rank, [where] * len(sources))


def _refuse_another_step(candidate: Candidate, head: dict[str, Any], where: str) -> None:
    """A slot's record and a folder's name have no checksum: the image decides."""
    step, attempt = head["step"], head.get("attempt", candidate.attempt)
    is_other = (step, attempt) != (candidate.step, candidate.attempt)
    if candidate.record is not None:
        is_other |= candidate.record.mark % 2 != bool(head.get("at_turn"))
    if is_other:
        raise DamagedCheckpoint(f"{where}: it holds step {step} of attempt {attempt}.")


def report_damage(
    candidate: Candidate, error: DamagedCheckpoint, layout: RunLayout, say: Callable[[str], None]
) -> int:
    """Set a damaged checkpoint aside and report it; returns how many checkpoints that were."""
    if candidate.folder is None:
        say(f"{error} It is not used.")
        journal.append(layout.journal, "damaged", step=candidate.step, why=str(error))
        return 0
    where: Path | str = "where it was"
    with contextlib.suppress(OSError):
        where = move_aside(candidate.folder, layout.set_aside)
    say(f"{error} It was set aside ({where}); looking for the previous one.")
    _note_aside(layout, candidate.folder, where, str(error))
    return 1
