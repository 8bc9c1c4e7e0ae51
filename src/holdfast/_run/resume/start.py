"""The start of an attempt: find the newest good state, restore it, record its origin."""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import _errors
from holdfast._adapters.registry import adapter_of, send_to_device
from holdfast._environment import variables
from holdfast._environment.processes.proc import FairDeadline
from holdfast._errors import CheckpointError, DamagedCheckpoint, UnreadableCheckpoint
from holdfast._run.data.course import Position
from holdfast._state.capture import capture, without_collector
from holdfast._state.fit import places_in
from holdfast._state.restore import decode_extra, restore_again, restore_state
from holdfast._state.restore_adopted import settle_adopted
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import known_origins, note_origin, read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import is_on_line, trace_line, void_steps, without_void
from holdfast._store.format.checksum import digest_all
from holdfast._store.read import find
from holdfast._store.read.find import Candidate, Found, Leftover
from holdfast._store.read.verify import check_file, read_manifest
from holdfast._text import count, say

if TYPE_CHECKING:
    from holdfast._run.ranks.meeting import RankGroup
    from holdfast._run.saving.arena_builder import WaitingArena
    from holdfast._run.saving.keeper_client import KeeperClient
    from holdfast._run.saving.snapshots import Snapshots


class Start:
    """What must be opened before the attempt's number is claimed."""

    def __init__(self, layout: RunLayout, run_id: str, folder: Path) -> None:
        self.layout = layout
        self.run_id = run_id
        self.folder = folder
        self.leftovers: list[Leftover] = find.open_leftovers(run_id)
        # A state that was restored before the attempt's number was claimed: what restore_state
        # says of it, and the seconds that it took.
        self.ahead: tuple[Found, list[str], float] | None = None
        self._has_tried = False
        self.is_touched = False  # the script's objects may not be as it made them

    @without_collector()
    def read_ahead(self, attempt: int, state: dict[str, Any]) -> None:
        """Restore the state that a dead attempt left in memory, while its keeper still writes it.

        If that fails, the state is read again in its turn, which says why.
        """
        candidate = find.newest_in_memory(self.leftovers, attempt)
        if candidate is None or self._has_tried:
            return
        self._has_tried = True
        began = time.monotonic()
        _, line = _find_line(self, attempt)
        if not is_on_line(line, attempt, candidate.step):
            return
        is_begun = bool(self.layout.checkpoint_folders())
        self.is_touched = True
        with contextlib.suppress(Exception):
            found = find.read_candidate(
                candidate, send=send_to_device, choose=places_in(state) if is_begun else None
            )
            changed = restore_state(state, found.loaded)
            self.ahead = (found, changed, time.monotonic() - began)

    def close(self) -> None:
        with contextlib.suppress(IndexError):  # two threads may close them
            while True:
                self.leftovers.pop().arena.close()


@dataclass
class Resumed:
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
    phases: list[int | None] | None = None  # see Phases.rhythm
    loop: int = 0  # the script's loop in which the state was stored
    by_hand: bool = True  # stored by run.boundary()
    at_epoch_end: bool = False  # stored at the end of an epoch
    size: int = 1  # ranks of this attempt
    _spared: set[Path] = field(default_factory=set)
    _waiting: WaitingArena | None = None  # its state is the one that was found
    rules: dict[str, Any] | None = None  # the state of the rules
    best: dict[str, float] | None = None  # value of the metric of keep_best
    _before: dict[str, Any] = field(default_factory=dict)

    def remember(self, state: dict[str, Any]) -> None:
        """Fingerprint the state before the script repeats code from before the stored position."""
        if self.found is not None and not self._before:
            self._before = {name: _print_of(value) for name, value in state.items()}

    def put_back(self, state: dict[str, Any]) -> list[str]:
        """Undo changes since `remember`: they are in the stored state already."""
        changed = []
        if self.found is not None and self._before:
            changed = [n for n, value in state.items() if _print_of(value) != self._before[n]]
            restore_again(state, self.found.loaded, changed)
        self.release()
        return changed

    def hand_over(self, keeper: KeeperClient, snapshots: Snapshots | None) -> None:
        """Give a state that was only in memory to the keeper, and clean up the rest.

        An arena that waits for this attempt is given to `snapshots`.
        """
        found, spare = self.found, set[Path]()
        if found is not None and keeper.has_keeper:
            if found.leftover is not None and not self._is_on_disk(found):
                spare = self._salvage(found, found.leftover, keeper)
            elif snapshots is not None and (waiting := self._find_waiting(found)) is not None:
                from holdfast._run.saving.arena_builder import WaitingArena  # only on Linux

                spare = {waiting.path}
                self.start.leftovers.remove(waiting)  # it is not closed with the others
                of = (waiting.arena, waiting.path, found.loaded.plan, self.attempt)
                self._waiting = WaitingArena(*of, 0 if found.record is None else found.record.slot)
                snapshots.adopt(self._waiting)
                del waiting
        del found
        find.remove_leftovers(self.start.run_id, self.attempt, spare)
        if self.found is None:
            self.release()

    def _is_on_disk(self, found: Found) -> bool:
        at_epoch_end = bool(found.loaded.head.get("at_turn"))
        return self.start.layout.checkpoint(found.step, found.attempt, at_epoch_end).exists()

    def _salvage(self, found: Found, leftover: Leftover, keeper: KeeperClient) -> set[Path]:
        """Have a state that is only in memory written; returns the arenas that must stay."""
        left = self.start.leftovers
        needed = {each.path for each in left if each.arena.attempt == found.attempt}
        if found.loaded.world == self.size:
            # The keepers of other ranks salvage theirs.
            assert found.record is not None
            keeper.salvage(leftover.arena, str(leftover.path), found.record.sequence)
        else:  # today's keepers cannot write it: keep it until a newer state is durable
            self._spared = needed
        return needed

    def _find_waiting(self, found: Found) -> Leftover | None:
        """The arena that waits for this attempt: with the state that was found, or with none.

        A kill during the first snapshot after a takeover leaves an arena without a whole slot.
        """
        left, plan = self.start.leftovers, found.loaded.plan
        if found.leftover is not None:
            left = [found.leftover]
        else:
            layout = (plan.size_bytes, len(plan.specs) + 2)
            left = [
                each
                for each in left
                if (each.arena.slot_bytes, each.arena.ranges) == layout
                and not (each.arena.whole() or each.arena.shared)
            ]
        is_alone = self.size == found.loaded.world == 1
        fits = (each for each in left if each.rank == 0 and each.arena.waits_until is not None)
        return next(fits, None) if is_alone else None

    def clear_memory(self) -> None:
        """A newer state is durable: remove what earlier ranks left in memory."""
        for path in self._spared:
            with contextlib.suppress(OSError):
                path.unlink()
        self._spared = set()

    @property
    def is_released(self) -> bool:
        return self.found is None

    def release(self) -> None:
        self._before.clear()
        self.found = None  # its views keep the mapping open
        if self._waiting is not None:
            self._waiting.is_free = True
            self._waiting = None
        # In the background: unmapping a removed file frees gigabytes page by page.
        threading.Thread(target=self.start.close, daemon=True).start()


def _print_of(value: Any) -> Any:
    captured = capture({"value": value})
    pairs = zip(captured.specs, captured.values, strict=True)
    # All bytes: torch's version counter misses writes through `.data`.
    digests = digest_all([adapter_of(s.kind).bytes_of(v) for s, v in pairs])
    return captured.tree, captured.specs, digests


@without_collector()
def resume(
    start: Start, attempt: int, state: dict[str, Any], group: RankGroup | None = None
) -> Resumed:
    """Restore the newest good state into `state`, and record the attempt's origin."""
    began = time.monotonic()
    layout = start.layout
    is_first = group is None or group.rank == 0
    which = f"attempt {attempt}" + ("" if group is None else f", {group.size} ranks")
    if is_first:
        find.set_aside_unfinished(layout, say)
        find.set_aside_bad(layout, say)
    origins, line = _find_line(start, attempt - 1)
    ahead, start.ahead = start.ahead, None
    if group is None:
        found = find.find_newest(
            *(layout, line, start.leftovers, say, send_to_device, places_in(state)),
            None if ahead is None else ahead[0],
        )
    else:
        # Rank 0's view counts: a network file system shows changes to other hosts late.
        told = group.exchange("line", sorted(line.items()))[0]
        line = dict(told)
        found = find_together(group, layout, line, start.leftovers)
    if is_first:
        _tell_of_deleted(start, line, found)
    if found is None and start.is_touched:
        raise CheckpointError(f"{start.folder}: the state in memory is gone.\nStart it again.")
    if ahead is not None:
        began -= ahead[2]
    if found is None:
        if is_first:
            note_origin(layout, attempt, None)
            say(f"{start.folder}: a new run ({which}).")
            tell_of_removed(start.folder, start.run_id)
        return Resumed(start, attempt, {attempt: None})
    # The objects are filled while the disk flushes.
    origin = (found.attempt, found.step)
    errors: list[BaseException] = []

    def flush() -> None:
        try:
            note_origin(layout, attempt, origin)
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)

    flushing = threading.Thread(target=flush if is_first else None, daemon=True)
    flushing.start()
    if ahead is not None and found is ahead[0]:
        changed, sentences = ahead[1], list[str]()  # it is in memory, so it was not adopted
    else:
        settled, sentences = settle_adopted(found.loaded, state)
        found = replace(found, loaded=settled)
        changed = restore_state(state, found.loaded)
    for name in changed:
        say(f"{name} is not as it was stored: its object did not keep the value.")
    flushing.join()
    if errors:
        raise errors[0]
    resumed = _resumed(start, attempt, found, origins, group)
    say(
        f"{start.folder}: resumed at step {found.step} from {resumed.source} in "
        f"{time.monotonic() - began:.2f} s ({which})."
    )
    for sentence in sentences if is_first else ():
        say(sentence)
    size = 1 if group is None else group.size
    if size != found.loaded.world:
        now = "is 1" if size == 1 else f"are {size}"
        say(
            f"the state was stored by {count(found.loaded.world, 'rank')}, and there {now} now: "
            "the run goes on with the same samples, but not to the same bits."
        )
    return resumed


def _find_line(
    start: Start, attempt: int
) -> tuple[dict[int, tuple[int, int] | None], dict[int, int | None]]:
    """The origins of all attempts, and the lineage that ends with one of them."""
    origins = known_origins(start.layout, {each.arena.attempt for each in start.leftovers})
    return origins, without_void(trace_line(origins, attempt), void_steps(start.layout))


# The journal line of a salvaged checkpoint may come after the lines of newer checkpoints.
_OLDER_LINES = 64


def _tell_of_deleted(start: Start, line: dict[int, int | None], found: Found | None) -> None:
    """Say that a newer checkpoint was removed from outside."""
    layout, reached = start.layout, -1 if found is None else found.step
    gone, older = reached, 0
    for line_bytes in journal.read_back(layout.journal):
        event = journal.parse(line_bytes) if b'"checkpoint"' in line_bytes else None
        if event is None or event.get("event") != "checkpoint":
            continue
        step, attempt, name = (event.get(key) for key in ("step", "attempt", "name"))
        if not isinstance(step, int) or not isinstance(attempt, int):
            continue
        if not is_on_line(line, attempt, step):
            continue
        older += step <= reached
        if older > _OLDER_LINES:
            break  # along a lineage steps only grow: what is further back was before
        if step > gone and not any(layout.set_aside.glob(f"{glob.escape(str(name))}*")):
            gone = step
    if gone > reached:
        where = "at the beginning" if found is None else f"at step {reached}, the newest left"
        say(f"{start.folder}: the checkpoint of step {gone} was deleted; the run goes on {where}.")


def _resumed(
    start: Start,
    attempt: int,
    found: Found,
    origins: dict[int, tuple[int, int] | None],
    group: RankGroup | None,
) -> Resumed:
    head, extra = found.loaded.head, decode_extra(found.loaded)
    position = extra.get("position")
    line = trace_line({**origins, attempt: (found.attempt, found.step)}, attempt)
    # Only attempts with checkpoints on disk: a run may have thousands of others.
    present = {number for _, number, _ in start.layout.checkpoint_folders()}
    present |= {attempt, found.attempt}
    # A new rank keeps the generators as the script has seeded them.
    is_known = group is None or group.rank < found.loaded.world
    return Resumed(
        start,
        attempt,
        line={number: step for number, step in line.items() if number in present},
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
        at_epoch_end=bool(head.get("at_turn")),
        size=1 if group is None else group.size,
        best=head.get("best"),
        rules=head.get("rules"),
    )


# -- Several ranks resume from one state: all of them can read it, or none uses it -----------------
# A state in memory counts only if every rank finds its part. Each rank checks its share of the
# files, and a candidate that one of them finds damaged is set aside for all.


_CANDIDATES = 64


def find_together(
    group: RankGroup, layout: RunLayout, line: dict[int, int | None], leftovers: list[Leftover]
) -> Found | None:
    """The newest state that all ranks can read; None if there never was one."""
    offered = _offers(group, layout, line, leftovers)
    damaged = 0
    for number, candidate in enumerate(offered):
        found, error = _try(group, candidate)
        votes = group.exchange(f"vote {number}", None if error is None else str(error))
        complaints = [vote for vote in votes if vote is not None]
        if not complaints:
            assert found is not None
            return found
        if isinstance(error, UnreadableCheckpoint):
            raise error
        if group.rank == 0:
            damaged += find.report_damage(candidate, DamagedCheckpoint(complaints[0]), layout, say)
        else:
            damaged += candidate.folder is not None
    group.exchange("nothing found", None)  # wait for rank 0, which may still set candidates aside
    find.refuse_to_start_over(layout, damaged)
    return None


def _offers(
    group: RankGroup, layout: RunLayout, line: dict[int, int | None], leftovers: list[Leftover]
) -> list[Candidate]:
    """The candidates, the newest first; the same list on all ranks."""
    mine = {(*key, len(peers)): peers for key, peers in find.held_by_ranks(leftovers).items()}
    names = [[c.attempt, c.step, c.folder.name] for c in find.on_disk(layout, line) if c.folder]
    told = group.exchange("candidates", {"memory": [list(key) for key in mine], "disk": names})
    shared = set.intersection(*({tuple(key) for key in each["memory"]} for each in told))
    offered = [
        Candidate(attempt, step, folder=layout.checkpoints / name)
        for attempt, step, name in told[0]["disk"]
    ]
    for attempt, mark, size in sorted(shared):
        last = line.get(attempt, -1)
        if last is None or mark // 2 <= last:
            peers = mine[attempt, mark, size]
            leftover, record = peers[group.rank % size]
            offered.append(Candidate(attempt, mark // 2, None, leftover, record, tuple(peers)))
    return sorted(offered, key=_order, reverse=True)[:_CANDIDATES]


def _order(candidate: Candidate) -> tuple[int, int, int, int, str]:
    """As `age`, but without the sequence numbers, which differ between ranks."""
    attempt, step, in_memory, _, name = find.sort_key(candidate)
    mark = candidate.record.mark if candidate.record is not None else 0
    return attempt, step, in_memory, mark, name


def _try(group: RankGroup, candidate: Candidate) -> tuple[Found | None, CheckpointError | None]:
    """Read this rank's state, and check its share of the other files."""
    try:
        if candidate.folder is not None:
            _check_share(candidate.folder, group.rank, group.size)
        return find.read_candidate(candidate, group.rank, send_to_device), None
    except CheckpointError as error:
        return None, error


def _check_share(folder: Path, rank: int, size: int) -> None:
    for number, file in enumerate(read_manifest(folder).files):
        if number % size == rank and number != rank and (lines := check_file(folder, file)):
            raise DamagedCheckpoint(f"{folder / file.name}: {lines[0]}.")


# -- Why the previous attempt died, in one line ----------------------------------------------------


# Exit statuses of a run that has finished, or was asked to stop.
_WANTED = (_errors.FINISHED, *_errors.ASKED)


def line_of_death(layout: RunLayout, folder: Path, attempt: int) -> str:
    """Why the attempt before this one was lost or failed; empty if it was asked to stop."""
    number = max((n for n in layout.attempt_numbers() if n < attempt), default=0)
    # Under `holdfast run` the supervisor has said it.
    if not number or variables.whole_number("HOLDFAST_RESTART"):
        return ""
    if read_json(layout.exit(number)).get("status") in _WANTED:
        return ""
    # Slow to import.
    from holdfast._diagnose.deaths.judge import judge
    from holdfast._diagnose.evidence.gather import gather_run
    from holdfast._diagnose.verdict import Cause

    verdict = judge(gather_run(layout.folder, number))
    if verdict.cause in (
        *(Cause.RUNNING, Cause.FINISHED, Cause.ASKED, Cause.PREEMPTED, Cause.TIME_LIMIT),
        Cause.UNKNOWN,
    ):
        return ""
    at = "" if verdict.step is None else f" at step {verdict.step}"
    more = f"holdfast why {folder} --attempt {number}"
    return f"the previous attempt ended{at}. {verdict.sentence} More: {more}"


# -- A run folder that was removed while its run trained: the state is in memory alone -------------
# The id of the run went with the folder, so no start finds the arenas by itself. An arena knows the
# folder of its run. A new run in that folder says what is in memory and how to get it, and begins
# from nothing: people also remove a folder to begin again.


_KEPT_SECONDS = 86_400.0  # it takes memory: the next new run in this folder removes it then
_KEEPER_SECONDS = 10.0  # for a keeper whose trainer has just died
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class _Left:
    path: Path
    step: int | None  # of its newest snapshot that has checksums
    captured_at: float


def tell_of_removed(folder: Path, run_id: str) -> None:
    """Say what earlier runs in this folder, which have other ids, left in memory."""
    if sys.platform != "linux":
        return
    paths = {each.path for each in _find(folder, run_id)}
    if not paths:
        return
    if trainers := _wait_for_keepers(paths):
        pids = " ".join(map(str, sorted(trainers)))
        say(
            f"{folder}: the folder was removed or moved, and the run that trained here goes on "
            f"without it (pid {pids}). This is a new run.\nTo stop the other one: kill {pids}"
        )
        return
    # The keepers have added the checksums meanwhile.
    left = [each for each in _find(folder, run_id) if each.step is not None]
    for each in [each for each in left if time.time() - each.captured_at > _KEPT_SECONDS]:
        left.remove(each)
        with contextlib.suppress(OSError):
            each.path.unlink()
    if left:
        newest = max(left, key=lambda each: each.captured_at)
        into = shlex.quote(f"{folder}-step-{newest.step}")
        say(
            f"{folder}: the folder was removed or moved while a run trained here. Step "
            f"{newest.step} of that run is in the memory of this machine. This is a new run.\n"
            f"To go on there, within a day: holdfast adopt {into} --from {newest.path}"
        )


def _find(folder: Path, run_id: str) -> list[_Left]:
    from holdfast._store.memory.arena import Arena, NotAnArena
    from holdfast._store.memory.backing import find_all, open_leftover, users_of

    place, found = os.path.realpath(folder), []
    others = [path for other, path in find_all() if other != run_id]
    # To close a file that another run of this process has open would end its locks.
    ours = users_of("self") if others else {}
    for path in others:
        if path in ours or (descriptor := open_leftover(path)) is None:
            continue
        try:
            arena = Arena(descriptor)
        except (NotAnArena, ValueError, OSError):
            os.close(descriptor)
            continue
        whole = arena.whole()
        # One that waits for its next attempt was durable, and goes by itself.
        if arena.folder == place and whole and arena.waits_until is None:
            step = max((record.step for record in whole if record.is_hashed), default=None)
            found.append(_Left(path, step, max(record.captured_at for record in whole)))
        arena.close()
    return found


def _wait_for_keepers(paths: set[Path]) -> set[int]:
    """Let the keepers of dead trainers finish; returns the trainers that live."""
    from holdfast._store.memory.backing import users_of

    def find_users() -> set[int]:
        return {pid for path, pids in users_of().items() if path in paths for pid in pids}

    deadline = FairDeadline(_KEEPER_SECONDS, find_users)
    while True:
        users = find_users()
        trainers = {pid for pid in users if not _is_keeper(pid)}
        if trainers or not users or deadline.is_over():
            return trainers
        time.sleep(_LOOK_SECONDS)


def _is_keeper(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"holdfast._keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return True  # it has just ended
