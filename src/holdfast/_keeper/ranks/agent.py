"""Answers the hub for one rank, and dispatches what the hub decides.

It reads and writes the words that are shared with the trainer, so it can answer while the trainer
is in a long call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from holdfast._store.memory import control

_MOMENT_SECONDS = 0.002  # until the trainer's stores are visible here: memory order is weak


class Body(Protocol):
    """The keeper around it."""

    def later(self, seconds: float, act: Callable[[], None]) -> None: ...
    def tell(self, kind: str, **fields: Any) -> None: ...
    def held(self) -> list[tuple[int, int]]: ...
    def all_hold(self, attempt: int, mark: int) -> None: ...
    def write_part(
        self, attempt: int, mark: int, partial: str, number: int, reason: str, last: bool
    ) -> None: ...
    def drop(self, attempt: int, mark: int) -> None: ...
    def settle(self, attempt: int, mark: int, error: str | None, *, is_fenced: bool) -> None: ...
    def send_away(self, message: dict[str, Any]) -> None: ...
    def say_bye(self, message: dict[str, Any]) -> None: ...
    def take_order(self, message: dict[str, Any]) -> None: ...
    def void(self, step: int, reason: str, rank: int) -> None: ...


class RankAgent:
    """The position of one rank, its plans and the decisions that are not carried out yet."""

    def __init__(
        self, attempt: int, words: Any, send: Callable[..., None], body: Body, who: dict[str, Any]
    ) -> None:
        self._attempt = attempt
        self._words = words
        self._send = send
        self._body = body
        self._who = who
        self._is_held = False  # an agreement is in progress
        self._asked = self._answered = 0  # the newest agreements that were asked, and answered
        self._decided: int | None = None  # the mark of a decision that is not carried out yet
        self._planned: int | None = None
        self._told: dict[int, int] = {}  # by attempt: the newest snapshot reported to the hub
        if words[control.DUE] != control.NEVER:
            # A keeper before this one died during an agreement: the trainer checks in at each
            # boundary until the hub decides.
            words[control.HOLD] = words[control.PLANNED] = words[control.DUE] = 0

    def greet(self) -> None:
        """Tell the hub that this rank is here, and which snapshots it holds."""
        self._send("hello", who=self._who, held=self._held())

    def report(self) -> None:
        """Tell the hub which snapshots this rank holds now."""
        held = self._held()
        newest = max((mark for attempt, mark in held if attempt == self._attempt), default=-1)
        if self._planned is not None and newest >= self._planned:
            self._planned = None
        self._set_due()
        self._send("held", held=held)

    def _held(self) -> list[tuple[int, int]]:
        held = self._body.held()
        for attempt, mark in held:
            self._told[attempt] = max(mark, self._told.get(attempt, -1))
        return held

    def missed(self, mark: int, why: str, *, is_past: bool = False) -> None:
        """There is no snapshot of a boundary at which one was to be taken.

        `is_past`: the plan came too late. A trainer that stands at that very boundary, as after
        its last step, may still save it.
        """
        if self._planned == mark:
            self._planned = None
            self._set_due()
        at = int(self._words[control.MARK])
        self._send("missed", mark=mark, why=why, at=at, is_past=is_past)

    def order(self, attempt: int, mark: int, reason: str, *, is_last: bool = False) -> None:
        """The trainer wants a boundary on disk; this carries out a decision to save."""
        if self._decided is not None and mark >= self._decided:
            self._decided = None
            self._set_due()
        self._send("order", key=[attempt, mark], reason=reason, last=is_last)

    # -- from the hub -----------------------------------------------------------------

    def hear(self, message: dict[str, Any]) -> None:
        act = getattr(self, f"_on_{message['kind']}", None)
        if act is not None:
            act(message)

    def _on_hold(self, message: dict[str, Any]) -> None:
        self._asked = number = message["round"]
        self._is_held = True
        self._words[control.HOLD] = number
        self._words[control.DUE] = 0
        self._planned = None
        self._words[control.PLANNED] = 0
        self._body.later(_MOMENT_SECONDS, lambda: self._answer(number))

    def _answer(self, number: int) -> None:
        """Report where the trainer is, or the first boundary that it may still reach."""
        self._answered = number
        words = self._words
        mark = int(words[control.MARK])
        rests = words[control.REST] == control.RESTS and (self._attempt, mark) in self._body.held()
        stands = words[control.WAITS] == number or words[control.DONE] or rests
        self._send("at", round=number, mark=mark if stands else mark + 1)

    def _on_decide(self, message: dict[str, Any]) -> None:
        if self._answered < message["round"] == self._asked:
            # Without this rank: the hub must know where its trainer was before it hears of it.
            self._body.later(_MOMENT_SECONDS, lambda: self._decide(message))
        else:
            self._decide(message)

    def _decide(self, message: dict[str, Any]) -> None:
        self._decided = message["mark"]
        # The hold stays: a trainer that reaches a boundary before it has the message waits.
        number = message["round"]
        if self._words[control.HOLD] == number:
            self._is_held = False
        self._set_due()
        wish = dict(message["wish"])
        kind = wish.pop("kind")
        self._body.tell("decide", mark=message["mark"], round=number, wish_kind=kind, **wish)

    def _on_plan(self, message: dict[str, Any]) -> None:
        mark = message["mark"]
        if self._words[control.MARK] >= mark or self._is_held:
            self.missed(mark, "it was past that step", is_past=True)
            return
        self._planned = mark
        self._set_due()

    def _on_common(self, message: dict[str, Any]) -> None:
        attempt, mark = message["key"]
        if attempt == self._attempt:
            self._words[control.COMMON] = mark + 1
        self._body.all_hold(attempt, mark)

    def _on_write(self, message: dict[str, Any]) -> None:
        attempt, mark = message["key"]
        if mark > self._told.get(attempt, -1):
            # To the keeper before this one, which died before it had acknowledged the letter: the
            # trainer has not handed its slots over yet. Told of them, the hub asks again.
            return
        fields = {name: message[name] for name in ("partial", "number", "reason", "last")}
        self._body.write_part(attempt, mark, **fields)

    def _on_dropped(self, message: dict[str, Any]) -> None:
        self._body.drop(*message["key"])

    def _on_durable(self, message: dict[str, Any]) -> None:
        attempt, mark = message["key"]
        self._body.settle(attempt, mark, None, is_fenced=False)

    def _on_failed(self, message: dict[str, Any]) -> None:
        attempt, mark = message["key"]
        self._body.settle(attempt, mark, message["error"], is_fenced=bool(message["fenced"]))

    def _on_void(self, message: dict[str, Any]) -> None:
        self._body.void(message["step"], message["reason"], message["by"])

    def _on_leave(self, message: dict[str, Any]) -> None:
        self._body.send_away(message)

    def _on_uneven(self, message: dict[str, Any]) -> None:
        self._body.tell("uneven", **{k: v for k, v in message.items() if k != "kind"})

    def _on_twins(self, message: dict[str, Any]) -> None:
        self._body.tell("twins", ranks=message["ranks"])

    def _on_memory(self, message: dict[str, Any]) -> None:
        self._body.tell("memory", **{k: v for k, v in message.items() if k != "kind"})

    def _on_notice(self, message: dict[str, Any]) -> None:
        self._body.tell("notice", **{k: v for k, v in message.items() if k != "kind"})

    def _on_bye(self, message: dict[str, Any]) -> None:
        self._body.say_bye(message)

    def _on_look(self, message: dict[str, Any]) -> None:
        self._body.take_order(message)

    _on_anew = _on_guard = _on_look

    def _set_due(self) -> None:
        """Set the mark from which on the trainer must check in at a boundary."""
        words = self._words
        words[control.PLANNED] = self._planned or 0
        if self._is_held:
            return
        ahead = [mark for mark in (self._decided, self._planned) if mark is not None]
        words[control.DUE] = min(ahead, default=control.NEVER)
