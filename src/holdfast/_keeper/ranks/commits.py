"""Checkpoints of several ranks: all hold it, each writes its part, one writes the manifest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast._errors import SaveFailed
from holdfast._keeper.ranks.state import HubState, RankEntry
from holdfast._store.commit.write_queue import CADENCE, Key, Urgency, gives_way, sort_out

if TYPE_CHECKING:
    from holdfast._keeper.ranks.hub import Hub

_HOPELESS_SECONDS = 10.0


@dataclass
class PendingCommit:
    """One checkpoint in progress."""

    key: Key
    reason: str
    began: float
    number: int = 0  # of this attempt to write it
    is_writing: bool = False
    asked: set[int] = field(default_factory=set)  # ranks that were told to write their part
    files: dict[int, dict[str, Any]] = field(default_factory=dict)
    is_closing: bool = False  # the manifest is being written
    partial: str = ""  # the folder that the parts go to
    is_last: bool = False  # only the newest state counts now
    is_ordered: bool = False  # by trainers, which keep its slot
    write_began: float = 0.0

    @property
    def urgency(self) -> Urgency:
        found = Urgency.of(self.reason, is_last=self.is_last)
        return max(found, Urgency.ASKED) if self.is_ordered else found

    @property
    def is_kept(self) -> bool:
        return self.is_closing


class Commits:
    """Which boundary all ranks hold, and which is durable."""

    def __init__(self, state: HubState, hub: Hub) -> None:
        self._state = state
        self._hub = hub
        self._commits: dict[Key, PendingCommit] = {}
        self._writes = int(state.clock() * 1000)  # a hub before this one had smaller numbers
        self.common: Key | None = None
        self.durable: Key | None = None
        self._invalid_from: float = math.inf  # from which step on a rule called all states bad

    @property
    def is_empty(self) -> bool:
        """True if no checkpoint is in progress."""
        return not self._commits

    def is_durable(self, key: Key) -> bool:
        return self.durable is not None and key <= self.durable

    @property
    def durable_step(self) -> int | None:
        return None if self.durable is None else self.durable[1] // 2

    @property
    def common_step(self) -> int | None:
        return None if self.common is None else self.common[1] // 2

    def _is_void(self, key: Key) -> bool:
        return key[1] // 2 >= self._invalid_from

    def save_common(self, reason: str) -> int | None:
        """Make the newest snapshot that all ranks hold durable, before anything older.

        Returns its step; None if there is nothing to save.
        """
        key = self.common
        if key is None or self.is_durable(key):
            return None
        self._want(key, reason, is_last=True)
        return key[1] // 2

    def forget_asked(self, rank: int) -> None:
        """Another keeper may speak for this rank now: ask it again for its parts."""
        for commit in self._commits.values():
            commit.asked.discard(rank)

    def save_common_at_end(self) -> None:
        """Save the newest common snapshot at the end of training, after waiting writes."""
        if self.common is not None and not self.is_durable(self.common):
            self._want(self.common, "closed")

    def forget_incomplete(self) -> None:
        """Not failed, but forgotten: a rank that waits for it is told to leave instead."""
        self._commits = {key: c for key, c in self._commits.items() if self._can_be_whole(c)}

    def on_held(self, entry: RankEntry, held: list[Key]) -> None:
        entry.held = {(key[0], key[1]) for key in held if not self._is_void(key)}
        self._find_common()
        self.advance()
        self._ask_again(entry)

    def on_missed(
        self, entry: RankEntry, mark: int, why: str, at: int = 0, *, is_past: bool = False
    ) -> None:
        """A rank had passed the boundary already, or had no slot for it."""
        entry.observe(self._state.clock(), at)
        self._hub.agreement.plan_missed(mark)
        commit = self._commits.get((self._state.attempt, mark))
        if commit is not None and not is_past:  # else see give_up_hopeless
            self._fail(commit, f"rank {entry.rank}: {why}")

    def on_order(self, _: RankEntry, key: Key, reason: str, *, last: bool = False) -> None:
        """A trainer wants this boundary on disk; the others will order it too."""
        if self._is_void(key):
            self._refuse_void(key)
            return
        if self.is_durable(key):
            self._tell_durable(key)
            return
        self._add_commit(key, reason, is_last=last)
        self._commits[key].is_ordered = True
        self.give_up_hopeless()
        self.advance()

    def on_void(self, entry: RankEntry, step: int, reason: str) -> None:
        """A rule of one rank has called a step bad: that holds for all ranks."""
        self.void_from(step, reason, entry.rank)

    def void_from(self, step: int, reason: str, rank: int) -> None:
        """Drop everything from this step on, on all ranks."""
        if step >= self._invalid_from:
            return
        self._invalid_from = step
        for entry in self._state.entries.values():
            entry.held = {key for key in entry.held if not self._is_void(key)}
        self.common = None  # an older one that all hold takes its place
        if self.durable is not None and self._is_void(self.durable):
            self.durable = None  # which older one is durable is not known
        # First: a rank that waits for a checkpoint must know why it fails.
        self._state.all_keepers.void(step=step, reason=reason, rank=rank)
        # Here: a trainer may be told to leave before it could do it.
        self._state.services.set_aside_void()
        for key in [key for key in self._commits if self._is_void(key)]:
            del self._commits[key]
            self._refuse_void(key)
        self._find_common()
        self._hub.after_commit()

    def _refuse_void(self, key: Key) -> None:
        error = f"a rule has called step {key[1] // 2} bad"
        self._state.all_keepers.failed(key=key, error=error, fenced=False)

    def on_written(
        self,
        entry: RankEntry,
        key: Key,
        number: int | None,
        error: str | None = None,
        *,
        dropped: bool = False,
        file: dict[str, Any] | None = None,
    ) -> None:
        commit = self._commits.get(key)
        if commit is None or number != commit.number:
            return  # written for a checkpoint that has failed since
        if dropped:
            self._drop(commit)
            self._hub.after_commit()
            return
        if error or file is None:
            self._fail(commit, f"rank {entry.rank}: {error}")
            return
        commit.files[entry.rank] = file
        if len(commit.files) < self._state.size or commit.is_closing:
            return
        prints = {rank: file.get("common", "") for rank, file in sorted(commit.files.items())}
        other = next((rank for rank, each in prints.items() if each != prints[0]), None)
        if other is not None:  # a tensor might be stored by no rank
            self._fail(commit, f"ranks 0 and {other} do not agree on what is the same on both")
            return
        commit.is_closing = True
        self._state.services.commit(commit.key, commit.reason, commit.files)

    def _find_common(self) -> None:
        held = [entry.held for entry in self._state.entries.values()]
        both = set.intersection(*held) if held else set()
        newest = max(both, default=None)
        if newest is None or (self.common is not None and newest <= self.common):
            return
        self.common = newest
        self._state.all_keepers.common(key=newest)
        reason = self._hub.agreement.common_reached(newest)
        if reason is None and any(
            commit.urgency is Urgency.BACKGROUND and not commit.is_writing
            for commit in self._commits.values()
        ):
            reason = CADENCE  # a waiting periodic save takes the newest state, and keeps no slot
        if reason is not None:
            self._want(newest, reason)

    def _want(self, key: Key, reason: str, *, is_last: bool = False) -> None:
        if not self.is_durable(key):
            self._add_commit(key, reason, is_last=is_last)
        self.advance()

    def _add_commit(self, key: Key, reason: str, *, is_last: bool) -> None:
        commit = self._commits.setdefault(key, PendingCommit(key, reason, self._state.clock()))
        commit.is_last = commit.is_last or is_last

    def advance(self) -> None:
        """Begin to write a checkpoint as soon as all ranks hold it."""
        waiting = [commit for commit in self._commits.values() if not commit.is_writing]
        # A checkpoint that not all hold may never be whole: drop nothing for it.
        ready, dropped = sort_out(list(filter(self._can_be_whole, waiting)), self.durable)
        last = max((each.key for each in ready if each.is_last), default=(0, 0))
        oldest = max(last, self.durable or last)
        dropped += [each for each in waiting if each not in ready and each.key < oldest]
        for commit in {commit.key: commit for commit in dropped}.values():
            self._drop(commit)
        writing = [commit for commit in self._commits.values() if commit.is_writing]
        found = next(iter(ready), None)
        if found is None or not all(self._gives_way(each, found) for each in writing):
            return
        for each in writing:
            if not each.is_closing:
                self._drop(each)
        found.is_writing, found.write_began = True, self._state.clock()
        self._begin_writing(found)

    def _gives_way(self, writing: PendingCommit, commit: PendingCommit) -> bool:
        """True if a checkpoint need not wait for the one that is being written."""
        now, needed = self._state.clock(), self._state.services.write_seconds() / 2
        if writing.is_closing:
            return commit.urgency is Urgency.LAST
        return gives_way(
            writing,
            commit,
            elapsed_seconds=now - writing.write_began,
            needed_seconds=needed,
            left_seconds=None if self._hub.kill_at is None else self._hub.kill_at - now,
        )

    def _drop(self, commit: PendingCommit) -> None:
        """A newer one is written in its place."""
        self._commits.pop(commit.key, None)
        self._state.all_keepers.dropped(key=commit.key)

    def _begin_writing(self, commit: PendingCommit) -> None:
        try:
            partial = self._state.services.begin(commit.key)
        except SaveFailed as error:
            self._fail(commit, str(error))
            return
        if partial is None:  # it exists already
            self.committed(commit.key, None)
            return
        commit.partial = partial
        self._writes += 1
        commit.number = self._writes
        for entry in self._state.entries.values():
            self._ask_again(entry)
        self._remove_given_up()  # now: removing large files takes time

    def _remove_given_up(self) -> None:
        self._state.services.remove_given_up({each.partial for each in self._commits.values()})

    def _ask_again(self, entry: RankEntry) -> None:
        """Ask for a part, also a keeper that has replaced one which died before it wrote it."""
        for commit in self._commits.values():
            known = commit.asked | set(commit.files)
            if commit.partial and entry.rank not in known and commit.key in entry.held:
                commit.asked.add(entry.rank)
                self._state.keeper(entry.rank).write(
                    key=commit.key,
                    partial=commit.partial,
                    number=commit.number,
                    reason=commit.reason,
                    last=commit.is_last,
                )

    def give_up_hopeless(self) -> None:
        """Fail the checkpoints of a boundary that some rank has passed without saving it."""
        now = self._state.clock()
        for commit in list(self._commits.values()):
            if commit.is_writing or self._hub.end.is_under_way:
                continue
            for entry in self._state.entries.values():
                mark = 2 * int(entry.beat.get("step") or 0)
                is_past = mark > commit.key[1] and now - commit.began > _HOPELESS_SECONDS
                is_past = is_past or entry.past >= commit.key[1]
                is_past = is_past and commit.key[0] == self._state.attempt
                if commit.key not in entry.held and (is_past or entry.ended):
                    self._fail(commit, f"rank {entry.rank} did not save step {commit.key[1] // 2}")
                    break

    def committed(self, key: Key, error: str | None, *, is_fenced: bool = False) -> None:
        """The manifest is written, or could not be."""
        commit = self._commits.get(key)
        if error is not None:
            if commit is not None:
                self._fail(commit, error, is_fenced=is_fenced)
            return
        self._commits.pop(key, None)
        if self._is_void(key):
            return  # called bad meanwhile: its writer has set it aside
        self.durable = key if self.durable is None else max(self.durable, key)
        self._tell_durable(key)
        self._hub.after_commit()

    def _tell_durable(self, key: Key) -> None:
        self._state.all_keepers.durable(key=key)

    def _fail(self, commit: PendingCommit, error: str, *, is_fenced: bool = False) -> None:
        self._commits.pop(commit.key, None)
        self._state.services.note("save-failed", step=commit.key[1] // 2, error=error)
        self._state.all_keepers.failed(key=commit.key, error=error, fenced=is_fenced)
        self._remove_given_up()  # the disk may be full
        self._hub.after_commit()

    def _can_be_whole(self, commit: PendingCommit) -> bool:
        return all(commit.key in entry.held for entry in self._state.entries.values())
