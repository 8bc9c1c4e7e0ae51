"""The start of an attempt: find, restore, and note where it came from."""

from __future__ import annotations

import contextlib
import glob
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from holdfast._adapters.registry import adapter_of, send_to_device
from holdfast._run.data.course import Position
from holdfast._run.resume.agree import Party, find_together
from holdfast._run.resume.previous_death import LifeBefore
from holdfast._run.resume.removed_folder import tell_of_removed
from holdfast._state.adopted import settle_adopted
from holdfast._state.capture import capture, without_collector
from holdfast._state.restore import decode_extra, restore_again, restore_state
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import known_origins, note_origin
from holdfast._store.folder.invalid import void_steps, without_void
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import is_on_line, trace_line
from holdfast._store.format.checksum import digest_all
from holdfast._store.read.find import (
    Found,
    Leftover,
    find_newest,
    open_leftovers,
    remove_leftovers,
    set_aside_bad,
    set_aside_unfinished,
)
from holdfast._text import say

# -- One piece of work in a thread of its own, whose error is raised where it is waited for --------


class Background:
    """Runs at once; `join` waits for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  raised again by join
            self._error = error


class Salvager(Protocol):
    """Whoever makes durable what an earlier attempt left in memory."""

    @property
    def has_keeper(self) -> bool: ...

    def salvage(self, arena: Any, path: str, sequence: int) -> None: ...


class Start:
    """What must be looked at before the attempt's number is taken."""

    def __init__(self, layout: RunLayout, run_id: str, folder: Path) -> None:
        self.layout = layout
        self.run_id = run_id
        self.folder = folder
        self.leftovers: list[Leftover] = open_leftovers(run_id)

    def close(self) -> None:
        while self.leftovers:
            self.leftovers.pop().arena.close()


@dataclass
class Resumed:
    """Where an attempt begins."""

    start: Start
    attempt: int
    line: dict[int, int | None]
    found: Found | None = None
    step: int = 0
    resumed_from: int | None = None
    source: str = "new"
    generators: dict[str, Any] | None = None
    position: Position | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    phases: list[int | None] | None = None  # when they came
    loop: int = 0  # in which of the script's loops the state was stored
    by_hand: bool = True  # or between two calls of run.boundary()
    at_turn: bool = False  # of an epoch
    size: int = 1  # the ranks that go on from here
    _spared: set[Path] = field(default_factory=set)
    rules: dict[str, Any] | None = None  # what the rules that may stop it knew
    best: dict[str, float] | None = None  # of the metric that decides which checkpoint is kept
    _before: dict[str, Any] = field(default_factory=dict)

    def look(self, state: dict[str, Any]) -> None:
        """Note the state before the script runs again what it ran before the state was stored."""
        if self.found is not None and not self._before:
            self._before = {name: _print_of(value) for name, value in state.items()}

    def put_back(self, state: dict[str, Any]) -> list[str]:
        """Undo what has changed since `look`: it had been done before, and is in the state."""
        changed = []
        if self.found is not None and self._before:
            changed = [n for n, value in state.items() if _print_of(value) != self._before[n]]
            restore_again(state, self.found.loaded, changed)
        self.release()
        return changed

    def hand_over(self, keeper: Salvager) -> None:
        """Give what was only in memory to the keeper, and clean up the rest."""
        found = self.found
        spare: set[Path] = set()
        if found is not None and found.leftover is not None and found.record is not None:
            at_turn = bool(found.loaded.head.get("at_turn"))
            folder = self.start.layout.checkpoint(found.step, found.attempt, at_turn)
            if keeper.has_keeper and not folder.exists():
                left = self.start.leftovers
                spare = {each.path for each in left if each.arena.attempt == found.attempt}
                if found.loaded.world == self.size:
                    # Those of other ranks are salvaged by their keepers.
                    path = str(found.leftover.path)
                    keeper.salvage(found.leftover.arena, path, found.record.sequence)
                else:  # no keepers of today could write it: it stays until something newer is
                    self._spared = spare
        del found
        remove_leftovers(self.start.run_id, self.attempt, spare)
        if self.found is None:
            self.release()

    def clear_memory(self) -> None:
        """Something newer is durable: what earlier ranks left in memory is not needed any more."""
        for path in self._spared:
            with contextlib.suppress(OSError):
                path.unlink()
        self._spared = set()

    @property
    def is_released(self) -> bool:
        return self.found is None

    def release(self) -> None:
        """Let go of the stored state."""
        self._before.clear()
        self.found = None  # else its views keep the mapping from being closed
        # The last mapping of a removed file gives gigabytes back to the system, page by page.
        Background(self.start.close)


def _print_of(value: Any) -> Any:
    """Equal as long as nobody has changed the value."""
    captured = capture({"value": value})
    pairs = zip(captured.specs, captured.values, strict=True)
    # Read to the last byte: torch does not count what is written through `.data`.
    digests = digest_all([adapter_of(s.kind).bytes_of(v) for s, v in pairs])
    return captured.tree, captured.specs, digests


def _with_checkpoints(
    layout: RunLayout, line: dict[int, int | None], attempt: int, newest: int
) -> dict[int, int | None]:
    """The part of the line that still has something on disk: a run may have thousands of lives."""
    present = {number for _, number, _ in layout.checkpoint_folders()} | {attempt, newest}
    return {number: step for number, step in line.items() if number in present}


@without_collector()
def resume(
    start: Start, attempt: int, state: dict[str, Any], party: Party | None = None
) -> Resumed:
    """Restore the newest good state into `state`, and note the attempt's origin."""
    began = time.monotonic()
    layout = start.layout
    is_first = party is None or party.rank == 0
    before = LifeBefore(layout, start.folder, attempt) if is_first else None
    if is_first:
        set_aside_unfinished(layout, say)
        set_aside_bad(layout, say)
    origins = known_origins(layout, {leftover.arena.attempt for leftover in start.leftovers})
    line = without_void(trace_line(origins, attempt - 1), void_steps(layout))
    if party is None:
        found = find_newest(layout, line, start.leftovers, say, send_to_device)
    else:
        # Rank 0 has the folder at first hand; a network file system shows it to others late.
        told = party.exchange("line", sorted(line.items()))[0]
        line = dict(told)
        found = find_together(party, layout, line, start.leftovers, say)
    if is_first:
        _tell_of_deleted(start, line, found)
    if found is None:
        if before is not None:
            note_origin(layout, attempt, None)
            say(f"{start.folder}: a new run (attempt {attempt}{_ranks(party)}).")
            before.tell()
            tell_of_removed(start.folder, start.run_id, say)
        return Resumed(start, attempt, {attempt: None})
    settled, sentences = settle_adopted(found.loaded, state)
    found = replace(found, loaded=settled)
    # A disk takes its time to flush; the objects can be filled meanwhile.
    origin = (found.attempt, found.step)
    flushing = Background(lambda: note_origin(layout, attempt, origin) if is_first else None)
    for changed in restore_state(state, found.loaded):
        say(f"{changed} did not stay as it was stored; its object does not keep it.")
    flushing.join()
    resumed = _resumed(start, attempt, found, origins, party)
    say(
        f"{start.folder}: resumed at step {found.step} from {resumed.source} in "
        f"{time.monotonic() - began:.2f} s (attempt {attempt}{_ranks(party)})."
    )
    if before is not None:
        before.tell()
        for sentence in sentences:
            say(sentence)
    size = 1 if party is None else party.size
    if size != found.loaded.world:
        say(
            f"the state was stored by {_count(found.loaded.world)}, and there {_are(size)} now: "
            "the run goes on with the same samples, but not to the same bits."
        )
    return resumed


def _tell_of_deleted(start: Start, line: dict[int, int | None], found: Found | None) -> None:
    """Say that a newer checkpoint was there and is neither there nor set aside."""
    layout, reached = start.layout, -1 if found is None else found.step
    gone = reached
    for event in journal.read(layout.journal):
        step, attempt, name = (event.get(key) for key in ("step", "attempt", "name"))
        if (
            event.get("event") == "checkpoint"
            and isinstance(step, int)
            and isinstance(attempt, int)
            and step > gone
            and is_on_line(line, attempt, step)
            and not any(layout.set_aside.glob(f"{glob.escape(str(name))}*"))
        ):
            gone = step
    if gone > reached:
        where = "at the beginning" if found is None else f"at step {reached}, the newest left"
        say(f"{start.folder}: the checkpoint of step {gone} was deleted; the run goes on {where}.")


def _ranks(party: Party | None) -> str:
    return "" if party is None else f", {party.size} ranks"


def _are(size: int) -> str:
    return "is 1" if size == 1 else f"are {size}"


def _count(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def _resumed(
    start: Start,
    attempt: int,
    found: Found,
    origins: dict[int, tuple[int, int] | None],
    party: Party | None,
) -> Resumed:
    head, extra = found.loaded.head, decode_extra(found.loaded)
    position = extra.get("position")
    line = trace_line({**origins, attempt: (found.attempt, found.step)}, attempt)
    # A rank that was not there has generators of its own, as the script has seeded them.
    is_known = party is None or party.rank < found.loaded.world
    return Resumed(
        start,
        attempt,
        line=_with_checkpoints(start.layout, line, attempt, found.attempt),
        found=found,
        step=found.step,
        resumed_from=found.step,
        source="memory" if found.leftover is not None else "disk",
        generators=extra["generators"] if is_known else None,
        position=None if position is None else Position.from_tree(position),
        metrics=head.get("metrics", {}),
        phases=head.get("phases"),
        loop=head.get("loop", 0),
        by_hand=head.get("by_hand", True),
        at_turn=bool(head.get("at_turn")),
        size=1 if party is None else party.size,
        best=head.get("best"),
        rules=head.get("rules"),
    )
