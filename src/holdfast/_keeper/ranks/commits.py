"""Checkpoints of several ranks: all hold it, each writes its part, one writes the manifest."""

from __future__ import annotations

from typing import Any

from holdfast._errors import SaveFailed
from holdfast._keeper.ranks.table import Commit, Seat, Table
from holdfast._store.commit.write_queue import CADENCE, Key, Urgency, gives_way, sort_out

_HOPELESS_SECONDS = 10.0


class Commits(Table):
    """Which boundary all ranks hold, and which is durable."""

    def _after_commit(self) -> None:
        """One checkpoint less is on its way."""
        raise NotImplementedError

    def _on_held(self, seat: Seat, message: dict[str, Any]) -> None:
        held = {(key[0], key[1]) for key in message["held"]}
        seat.held = {key for key in held if not self._is_void(key)}
        self._look_at_common()
        self._advance_commits()
        self._ask_again(seat)

    def _on_missed(self, seat: Seat, message: dict[str, Any]) -> None:
        """A rank had passed the boundary already, or had no slot for it."""
        mark = message["mark"]
        self._see(seat, message.get("at", 0))
        if self._plan is not None and self._plan[0] == mark:
            self._plan = None
            if self._due_reason is not None:
                self._plan_ahead()
        commit = self._commits.get((self._attempt, mark))
        if commit is not None and not message.get("is_past"):  # else see _give_up_hopeless
            self._fail(commit, f"rank {seat.rank}: {message.get('why', 'no slot was free')}")

    def _on_order(self, seat: Seat, message: dict[str, Any]) -> None:  # noqa: ARG002  any may
        """A trainer wants this boundary on disk; so do the others, who pass it too."""
        key = (message["key"][0], message["key"][1])
        if self._is_void(key):
            self._refuse_void(key)
            return
        if self._is_durable(key):
            self._tell_durable(key)
            return
        self._add_commit(key, message["reason"], is_last=bool(message.get("last")))
        self._commits[key].is_ordered = True
        self._give_up_hopeless()
        self._advance_commits()

    def _on_void(self, seat: Seat, message: dict[str, Any]) -> None:
        """A rule of one rank has called everything from a step on bad: it is for all."""
        self.void_from(message["step"], message["reason"], seat.rank)

    def void_from(self, step: int, reason: str, rank: int) -> None:
        """Hold and write nothing from this step on, on no rank, and tell all of it."""
        if step >= self.void_step:
            return
        self.void_step = step
        for seat in self.seats.values():
            seat.held = {key for key in seat.held if not self._is_void(key)}
        self.common = None  # an older one that all hold takes its place
        if self.durable is not None and self._is_void(self.durable):
            self.durable = None  # older ones may not be durable
        for each in self.seats:  # first: whoever waits for a checkpoint is to know why it fails
            self._send(each, "void", step=step, reason=reason, by=rank)
        # A trainer that is told may be sent away before it could do it.
        self._books.set_aside_void()
        for key in [key for key in self._commits if self._is_void(key)]:
            del self._commits[key]
            self._refuse_void(key)
        self._look_at_common()
        self._after_commit()

    def _refuse_void(self, key: Key) -> None:
        error = f"a rule has called step {key[1] // 2} bad"
        for rank in self.seats:
            self._send(rank, "failed", key=list(key), error=error, fenced=False)

    def _on_written(self, seat: Seat, message: dict[str, Any]) -> None:
        commit = self._commits.get((message["key"][0], message["key"][1]))
        if commit is None or message["number"] != commit.number:
            return  # written for one that has failed since
        if message.get("dropped"):
            self._drop(commit)
            self._after_commit()
            return
        if message.get("error"):
            self._fail(commit, f"rank {seat.rank}: {message['error']}")
            return
        commit.files[seat.rank] = message["file"]
        if len(commit.files) < self._size or commit.is_closing:
            return
        prints = {rank: file.get("common", "") for rank, file in sorted(commit.files.items())}
        other = next((rank for rank, each in prints.items() if each != prints[0]), None)
        if other is not None:  # a tensor might be stored by nobody
            self._fail(commit, f"ranks 0 and {other} do not agree on what is the same on both")
            return
        commit.is_closing = True
        self._books.commit(commit.key, commit.reason, commit.files)

    def _look_at_common(self) -> None:
        held = [seat.held for seat in self.seats.values()]
        both = set.intersection(*held) if held else set()
        newest = max(both, default=None)
        if newest is None or (self.common is not None and newest <= self.common):
            return
        self.common = newest
        for rank in self.seats:
            self._send(rank, "common", key=list(newest))
        if self._plan is not None and newest == (self._attempt, self._plan[0]):
            self._plan = None
        reason, self._due_reason = self._due_reason, None
        if reason is None and any(
            commit.urgency is Urgency.BACKGROUND and not commit.is_writing
            for commit in self._commits.values()
        ):
            reason = CADENCE  # what waits by the clock is written as it is now, and keeps no slot
        if reason is not None:
            self._want(newest, reason)

    def _want(self, key: Key, reason: str, *, is_last: bool = False) -> None:
        if not self._is_durable(key):
            self._add_commit(key, reason, is_last=is_last)
        self._advance_commits()

    def _add_commit(self, key: Key, reason: str, *, is_last: bool) -> None:
        commit = self._commits.setdefault(key, Commit(key, reason, self._clock()))
        commit.is_last = commit.is_last or is_last

    def _advance_commits(self) -> None:
        """Let the parts of one checkpoint be written as soon as all ranks hold it."""
        waiting = [commit for commit in self._commits.values() if not commit.is_writing]
        # What not all hold may never be whole: nothing is dropped for it.
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
        found.is_writing, found.write_began = True, self._clock()
        self._begin_writing(found)

    def _gives_way(self, writing: Commit, commit: Commit) -> bool:
        """Whether a checkpoint need not wait for the one that is being written."""
        now, needed = self._clock(), self._books.write_seconds() / 2
        if writing.is_closing:
            return commit.urgency is Urgency.LAST
        return gives_way(
            writing,
            commit,
            elapsed_seconds=now - writing.write_began,
            needed_seconds=needed,
            left_seconds=None if self._kill_at is None else self._kill_at - now,
        )

    def _drop(self, commit: Commit) -> None:
        """A newer one is written in its place."""
        self._commits.pop(commit.key, None)
        for rank in self.seats:
            self._send(rank, "dropped", key=list(commit.key))

    def _begin_writing(self, commit: Commit) -> None:
        try:
            partial = self._books.begin(commit.key)
        except SaveFailed as error:
            self._fail(commit, str(error))
            return
        if partial is None:  # it is there already
            self.committed(commit.key, None)
            return
        commit.partial = partial
        self._writes += 1
        commit.number = self._writes
        for seat in self.seats.values():
            self._ask_again(seat)

    def _ask_again(self, seat: Seat) -> None:
        """Ask for a part: also a keeper whose forerunner has died before it wrote it."""
        for commit in self._commits.values():
            known = commit.asked | set(commit.files)
            if commit.partial and seat.rank not in known and commit.key in seat.held:
                commit.asked.add(seat.rank)
                fields: dict[str, Any] = {"partial": commit.partial, "number": commit.number}
                fields |= {"reason": commit.reason, "last": commit.is_last}
                self._send(seat.rank, "write", key=list(commit.key), **fields)

    def _give_up_hopeless(self) -> None:
        """A rank has gone past a boundary that others wait to save, and did not save it."""
        now = self._clock()
        for commit in list(self._commits.values()):
            if commit.is_writing or self._ending is not None:
                continue
            for seat in self.seats.values():
                mark = 2 * int(seat.beat.get("step") or 0)
                is_past = mark > commit.key[1] and now - commit.began > _HOPELESS_SECONDS
                is_past = is_past or seat.past >= commit.key[1]
                is_past = is_past and commit.key[0] == self._attempt
                if commit.key not in seat.held and (is_past or seat.ended):
                    self._fail(commit, f"rank {seat.rank} did not save step {commit.key[1] // 2}")
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
            return  # called bad in this very moment: whoever wrote it has set it aside
        self.durable = key if self.durable is None else max(self.durable, key)
        self._tell_durable(key)
        self._after_commit()

    def _tell_durable(self, key: Key) -> None:
        for rank in self.seats:
            self._send(rank, "durable", key=list(key))

    def _fail(self, commit: Commit, error: str, *, is_fenced: bool = False) -> None:
        self._commits.pop(commit.key, None)
        self._books.note("save-failed", step=commit.key[1] // 2, error=error)
        for rank in self.seats:
            self._send(rank, "failed", key=list(commit.key), error=error, fenced=is_fenced)
        self._after_commit()

    def _can_be_whole(self, commit: Commit) -> bool:
        return all(commit.key in seat.held for seat in self.seats.values())
