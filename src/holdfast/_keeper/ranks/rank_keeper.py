"""A keeper that is one of several: what it does with its trainer, and for the hub.

It differs from a keeper that is alone in that it decides nothing: wishes, orders and deaths
go to the hub, and what the hub decides is done here. It stays until the hub lets it go.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

from holdfast import _errors
from holdfast._environment.processes.identity import host_name
from holdfast._keeper.memory_alarm import Alarm
from holdfast._keeper.postmortem import PostMortem
from holdfast._keeper.ranks.ending import Cause, looks_like_a_lost_peer
from holdfast._keeper.ranks.member_keeper import KeeperAmongOthers
from holdfast._keeper.writer import Closing, Job, Outcome
from holdfast._store.commit.write_queue import CADENCE
from holdfast._store.folder.atomic import remove_folder
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.requests import SAME_PRESS_SECONDS, stop_from_file, take_requests
from holdfast._store.memory import control

_LINGER_SECONDS = 60.0
_LAST_WORDS_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 0.05
_TOLD_AT_THE_END = ("asked", "speaks", "said")


class CrewKeeper(KeeperAmongOthers):
    """The keeper of one rank."""

    def _take_in(self, message: dict[str, Any], descriptors: list[int]) -> None:
        kind = message["kind"]
        if kind == "wish":
            self._to_hub("wish", wish=message["wish"], mark=message["mark"])
        elif kind == "due":
            self._to_hub("due", mark=message["mark"], reason=message["reason"])
        elif kind == "missed":
            is_past = bool(message.get("is_past"))
            self._member.missed(message["mark"], message["why"], is_past=is_past)
        elif kind in ("waits", "print", "lap"):
            self._to_hub(kind, **{k: v for k, v in message.items() if k != "kind"})
        elif kind == "farewell":
            self._take_leave(message)
        elif kind == "goodbye":
            self._trainer_gone, self._gone_at = True, time.monotonic()
            self._memory.stop()
            self._end_series()
            self._trainer_leaves()
        else:
            super()._take_in(message, descriptors)
            if kind == "arena":
                self._member.report()  # the keeper before this one may have died before it wrote

    def _snapshot_taken(self, generation: int, sequence: int) -> None:
        held = self._holdings.of(generation)
        record = None if held is None else held.find(sequence)
        if held is not None and record is not None:
            self._hasher.want(held, record)
        self._member.report()

    def _persist_ordered(self, message: dict[str, Any]) -> None:
        held = self._holdings.of(message["generation"])
        record = None if held is None else held.find(message["sequence"])
        if held is None or record is None:
            self._tell("failed", order=message["order"], error="the slot is gone")
            return
        key = (held.arena.attempt, record.mark)
        self._orders.setdefault(key, []).append(message["order"])
        if message["reason"] != CADENCE:
            self._writer.hurry()  # one at a time: it comes after the part that is under way
        self._member.report()
        self._member.order(*key, message["reason"], is_last=message["last"])

    def _take_void(self, message: dict[str, Any]) -> None:
        super()._take_void(message)
        self._to_hub("void", step=message["step"], reason=message["reason"])

    def void(self, step: int, reason: str, rank: int) -> None:
        self._void_from(step)
        self._tell("void", step=step, reason=reason, rank=rank)

    def _salvage(self, descriptor: int, message: dict[str, Any]) -> None:
        held = self._holdings.hold(descriptor, message["path"])
        record = None if held is None else held.find(message["sequence"])
        if held is not None and record is not None:
            self._holdings.salvage(held)
            self._member.report()
            self._member.order(held.arena.attempt, record.mark, "salvaged")

    def _take_leave(self, message: dict[str, Any]) -> None:
        error = message.get("error") or ""
        self._farewell = {
            "clean": message["clean"],
            "reason": message["reason"],
            "status": message["status"],
            "victim": looks_like_a_lost_peer(error),
            "host": host_name(),
            "agreed": message.get("agreed", False),
        }
        self._to_hub("farewell", **self._farewell)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if not self._ends.control.words[control.IN_LOOP]:
            return  # outside the loop the trainer acts at once, by itself
        if number == signal.SIGINT and self._has_nudged:
            self._has_nudged = False
            return
        again = False
        if number == signal.SIGINT:
            first, self._interrupted_at = self._interrupted_at, self._interrupted_at or now
            again = first is not None and now - first > SAME_PRESS_SECONDS
            if first is not None and not again:
                return
        name = signal.Signals(number).name
        again = again or number == signal.SIGQUIT  # of a process 1; any other is dead already
        quits = number == signal.SIGQUIT
        wish = {
            "kind": "stop",
            "reason": "second Ctrl-C" if again and not quits else name,
            "status": 128 + number if quits else _errors.of_signal(number),
            "signal": number,
            "grace": self._grace_of(number),
        }
        if self._job is not None:
            self._job.heard(number)
        self._to_hub("wish", wish=wish, now=again)

    def _look_for_requests(self) -> None:
        if self._hub is None:
            return
        for kind, details in take_requests(self._policy.layout, self._policy.attempt):
            if kind == "stacks":
                self._hangs.ask_stacks(details)
                continue
            now = kind == "stop" and bool(details.get("now"))
            reason = stop_from_file(details).reason if kind == "stop" else "holdfast save"
            wish = {"kind": kind, "reason": f"stop --now: {reason}" if now else reason}
            wish["status"] = _errors.PERSON  # type: ignore[assignment]  # JSON takes both
            self._hub.hear(0, {"kind": "wish", "wish": wish, "now": now})

    def _watch_clock(self, now: float) -> None:
        if not self._trainer_gone and self._farewell is None:
            super()._watch_clock(now)

    def _stop_status(self) -> int | None:
        return self._hub.stop.status if self._hub is not None and self._hub.stop else None

    def _stop_for_time(self, left: float) -> None:
        assert self._stop is not None
        self._wish_stop(*self._stop[:2], left)

    def _wish_stop(self, reason: str, status: int, left: float) -> None:
        wish = {"kind": "stop", "reason": reason, "status": status, "grace": left}
        self._to_hub("wish", wish=wish)

    def _tell_notice(self, **told: Any) -> None:
        mark = int(self._ends.control.words[control.MARK])
        self._to_hub("notice", host=host_name(), mark=mark, told=told)

    def _stop_for_notice(self, reason: str, left: float) -> None:
        self._wish_stop(reason, _errors.REQUEUE, left)

    def tell(self, kind: str, **fields: Any) -> None:
        if kind == "decide" and fields.get("wish_kind") == "stop":
            self._make_way()
        elif kind == "decide":
            self._writer.hurry()
        if kind == "decide" and self._ends.control.words[control.REST] == control.RESTS:
            self._has_nudged = True  # it will wake its main thread by a signal of its own
        if kind == "decide" and fields.get("wish_kind") == "stop":
            self._stop_reason = fields["reason"]
        self._tell(kind, **fields)

    def _asked_for(self) -> str | None:
        return self._stop_reason

    def _save_before_the_limit(self, alarm: Alarm) -> None:
        if not self._trainer_gone:
            fields = {"first": alarm.is_first, "host": host_name(), "figures": alarm.figures()}
            self._to_hub("danger", mark=int(self._ends.control.words[control.MARK]), **fields)
            if alarm.is_first:
                self._tell("memory", quiet=True)  # rank 0 says it; this one may look for the cause

    def held(self) -> list[tuple[int, int]]:
        return self._holdings.boundaries()

    def all_hold(self, attempt: int, mark: int) -> None:
        found = self._holdings.at(attempt, mark)
        if found is not None and attempt == self._policy.attempt:
            self._holdings.drop_before(found[0].arena.generation)

    def write_part(
        self, attempt: int, mark: int, partial: str, number: int, reason: str, last: bool
    ) -> None:
        if (attempt, mark, partial) in self._writing:
            return  # asked once more, after a cut
        found = self._holdings.at(attempt, mark)
        if found is None or not found[0].pin(found[1]):
            self._to_hub("written", key=[attempt, mark], number=number, error="the slot is gone")
            return
        self._writing.add((attempt, mark, partial))
        folder = self._policy.layout.checkpoints / partial
        self._writer.submit(Job(*found, reason, number, partial=folder, is_last=last))

    def _outcome(self, outcome: Outcome) -> None:
        self.later(0.0, lambda: self._part_written(outcome))

    def _part_written(self, outcome: Outcome) -> None:
        key = [outcome.job.held.arena.attempt, outcome.job.record.mark]
        told: dict[str, Any] = {"key": key, "number": outcome.job.order}
        if outcome.file is None:
            error = outcome.error or "unknown"
            self._to_hub("written", **told, error=error, dropped=outcome.is_dropped)
            return
        head = outcome.head
        file = {**outcome.file.to_json(), "metrics": head.get("metrics", {})}
        file["common"] = head.get("common", "")
        self._to_hub("written", **told, file=file)

    def _closed(self, closing: Closing, error: str | None, is_fenced: bool) -> None:
        """The hub's manifest is written, or not; called by the writing thread."""
        key = (closing.state.attempt, control.mark_of(closing.state.step, closing.state.at_turn))
        hub = self._hub
        assert hub is not None
        if error is None:
            self._note_save(time.monotonic() - closing.began)
        self.later(0.0, lambda: hub.committed(key, error, is_fenced=is_fenced))

    def drop(self, attempt: int, mark: int) -> None:
        self._writing = {each for each in self._writing if each[:2] != (attempt, mark)}
        for order in self._orders.pop((attempt, mark), []):
            error = "a newer step is durable, or is written in its place"
            self._tell("dropped", order=order, step=mark // 2, error=error)

    def settle(self, attempt: int, mark: int, error: str | None, *, is_fenced: bool) -> None:
        orders: list[int | None] = [*self._orders.pop((attempt, mark), [])]
        self._writing = {each for each in self._writing if each[:2] != (attempt, mark)}
        if error is None:
            self._failed_step = None
            if attempt == self._policy.attempt:
                self._durable_step = mark // 2
            else:
                self._holdings.retire_salvaged(attempt)
        else:
            self._failed_step = None if is_fenced else mark // 2
        kind = "durable" if error is None else "fenced" if is_fenced else "failed"
        fields = {} if error is None else {"error": error}
        for order in orders or (None,):
            self._tell(kind, order=order, step=mark // 2, mark=mark, **fields)

    def send_away(self, message: dict[str, Any]) -> None:
        self._is_released = True
        if message["step"] is not None:
            self._durable_step = message["step"]
        if not self._trainer_gone:
            details = {name: message[name] for name in _TOLD_AT_THE_END if name in message}
            self._tell_to_leave(message["reason"], message["status"], **details)

    def say_bye(self, message: dict[str, Any]) -> None:
        self._is_released = True
        details = {name: message[name] for name in ("said", "status") if "said" in message}
        self._tell("bye", step=message["step"], reason=message.get("reason"), **details)

    def _let_go_when_idle(self) -> None:
        """The trainer leaves; the slots stay until the hub needs them no more."""
        self._trainer_leaves()

    def _trainer_leaves(self) -> None:
        if not self._farewell:
            self._take_leave({"clean": True, "reason": "closed", "status": 0})

    def _bury(self) -> None:
        # Also when it had said goodbye: what stays readable would keep the loop spinning.
        if self._ends.pidfd is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._ends.pidfd)
        if self._trainer_gone:
            return
        self._trainer_gone, self._gone_at = True, time.monotonic()
        self._kill = None
        self._memory.stop()
        self._hear_the_rest()  # also of one that was told to leave: it may have made an arena
        self._end_series()
        if self._is_released or self._farewell or self._leave_status is not None:
            if self._farewell is None:
                self._examine()
            self._trainer_leaves()
            return
        self._death = self._examine()
        self._tell_of_death(self._death)

    def _tell_of_death(self, death: PostMortem) -> None:
        if not death.ask():
            # Its parent has not heard yet.
            self.later(_ASK_AGAIN_SECONDS, lambda: self._tell_of_death(death))
            return
        step = int(self._ends.control.words[control.STEP])
        self._died_at = time.monotonic()
        self._member.report()
        self._to_hub("died", how=death.how or "died", host=host_name(), step=step)
        death.write(durable=False)

    def _has_failed(self) -> bool:
        """Only a state that all ranks hold is of use to the next start."""
        if not super()._has_failed() or self._holdings.salvages:
            return super()._has_failed()
        mark = int(self._ends.control.words[control.COMMON]) - 1
        durable = -1 if self._durable_step is None else self._durable_step
        return durable < mark // 2 < self._void_step

    def _leave_hung(self, rank: int | None) -> None:
        assert self._hub is not None
        self._hub.end_hung(rank)

    def _save_hung(self) -> None:
        assert self._hub is not None
        self._hub.save_common("hang")

    def _is_gone(self) -> bool:
        return self._trainer_gone or self._farewell is not None

    def take_order(self, message: dict[str, Any]) -> None:
        self._hangs.take(message)

    def _leave_without_hub(self) -> None:
        if self._trainer_gone or self._farewell or self._leave_status is not None:
            return
        layout, attempt = self._policy.layout, self._policy.attempt
        host = read_json(layout.rank(attempt, 0)).get("keeper", {}).get("host", "")
        cause = Cause(0, "cannot be reached any more", kind="died", host=host)
        speaks = self._rank == 1  # the ranks do not say it all at once
        if speaks:
            self._journal("rank-died", rank=0, how=cause.how, host=host)
        self._tell_to_leave(cause.sentence(), _errors.REQUEUE, asked=False, speaks=speaks)

    def _leave_if_free(self, now: float) -> None:
        if not self._is_released and not self._is_hub_gone(now):
            return
        if self._hub is not None:
            if not self._hub.is_over:
                return
            self._record_death()  # before anything that takes time: the next life waits for it
            if not self._may_hub_go(now):
                return
        if self._linger_until is None:
            if self._death is not None:
                self._death.write(durable_step=self._durable_step)
            comes_back = self._leave_status in (_errors.REQUEUE, _errors.HUNG)
            lingers = self._died_at is not None or comes_back
            self._linger_until = now + _LINGER_SECONDS if lingers and self._crew.restarts else 0.0
            if self._linger_until:
                self._holdings.hash_newest()
        if now < self._linger_until and not self._is_followed():
            return
        self._writer.wait_idle()  # an old checkpoint may be half removed
        self._let_go(remove=self._is_released)
        self._post.close()
        if self._hub is not None or not self._is_released:  # nobody will read it
            remove_folder(self._policy.layout.mail(self._policy.attempt))
        self._done = True

    def _is_followed(self) -> bool:
        """Whether a newer attempt has begun: it has opened what we hold before it did."""
        with contextlib.suppress(OSError):
            return self._policy.layout.attempt_numbers()[-1] > self._policy.attempt
        return False

    def _may_hub_go(self, now: float) -> bool:
        """Who hosts a service leaves last, but not never."""
        hub = self._hub
        assert hub is not None
        waiting = [r for r in self._post.unacknowledged() if not hub.is_out_of_reach(r)]
        return not waiting or now - self._gone_at > _LAST_WORDS_SECONDS

    def _record_death(self, how: str | None = None) -> None:
        if self._rank == 0:
            known = None if self._death is None else self._death.how
            super()._record_death(how or known)

    def _row_facts(self) -> dict[str, Any]:
        facts = super()._row_facts()
        if self._hub is not None:
            common = self._hub.common
            facts["mem_step"] = None if common is None else common[1] // 2
            facts["waits"] = {rank: list(each) for rank, each in self._hub.waits.items()}
        return facts

    def _publish_beat(self, beat: dict[str, Any]) -> None:
        mine = {k: beat[k] for k in ("step", "memory_step", "boundary_age_seconds", "phase")}
        used = beat["memory"] or {}
        mine["memory"] = {k: used.get(k) for k in ("rss", "workers", "cgroup", "cache", "limit")}
        mine |= {k: beat[k] for k in ("paused", "pulse_age", "pace")}
        self._to_hub("beat", beat=mine)
        if self._hub is None:
            return
        seats = self._hub.seats.values()
        ranks = [{**seat.beat, "ended": seat.ended and seat.ended.how} for seat in seats]
        held = next((s.beat["paused"] for s in seats if s.beat.get("paused")), None)
        beat["paused"] = beat["paused"] or held
        common = self._hub.common
        beat["memory_step"] = None if common is None else common[1] // 2
        super()._publish_beat({**beat, "ranks": ranks, "straggler": self._hub.straggler})
