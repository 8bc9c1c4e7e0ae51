"""Letters between keepers that have no connection: signed files in a folder that both see.

    mail/to-00003/from-00000-<life>-000000012.letter    one message, the 12th of that life
    mail/to-00003/from-00000-<life>-000000002.note      what its writer has had from rank 3

A letter has the message and the oldest number that its sender still keeps, so that a new life of
the receiver knows where to begin. A note acknowledges letters; each has a new name, so that a
listing shows what is new. The receiver removes letters it has taken, the sender those that were
acknowledged another way. File systems may show files late and in any order: a letter waits for the
one before it.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._keeper.network.connection import MOST_BYTES, Complaints, FrameRefused, keyed, parse
from holdfast._store.folder.atomic import write_atomic
from holdfast._store.folder.plain_file import NotPlain, read_plain

if TYPE_CHECKING:
    from holdfast._keeper.network.endpoint import Ledger

_NAME = re.compile(r"from-(\d{5,})-([0-9a-f]{24})-(\d{9,})\.(letter|note)")
_MOST_FILE_BYTES = MOST_BYTES + 1024
_BUDGET_SECONDS = 0.1  # at a time: the keeper's loop must go on


@dataclass
class _Written:
    """Our files in the folder of another rank."""

    peer_life: str | None = None
    oldest: int = 1  # of the letters that may lie there
    newest: int = 0
    next: int = 1  # the letter to be written next
    notes: int = 0
    told: tuple[str | None, int] | None = None


@dataclass
class _Found:
    """The files of one life of a sender in our folder."""

    letters: list[int] = field(default_factory=list)
    notes: list[int] = field(default_factory=list)


class Mail:
    """The letters of one keeper, in and out."""

    def __init__(
        self, folder: Path, key: bytes, rank: int, life: str, complaints: Complaints
    ) -> None:
        self._folder = folder
        self._key = key
        self._rank = rank
        self._life = life
        self._complaints = complaints
        self._written: dict[int, _Written] = {}
        self._notes_read: dict[int, tuple[str, int]] = {}
        self.is_behind = False  # the last poll left something for the next

    # -- out ---------------------------------------------------------------------

    def post(self, to: int, ledger: Ledger) -> None:
        """Write what is not acknowledged and not in the other's folder yet."""
        written = self._written.setdefault(to, _Written(ledger.peer_life, oldest=ledger.first))
        if written.peer_life != ledger.peer_life:
            # Its predecessor may have taken some of them with it.
            written.peer_life = ledger.peer_life
            written.next = ledger.first
        until = time.monotonic() + _BUDGET_SECONDS
        for number in range(max(ledger.first, written.next), ledger.next):
            body = b'{"first":%d,"message":%b}' % (ledger.first, ledger.kept(number))
            if not self._put(to, number, "letter", body):
                return
            written.newest = max(written.newest, number)
            written.next = number + 1
            if time.monotonic() > until:
                return

    def clear(self, to: int, ledger: Ledger) -> None:
        """Remove the letters that were acknowledged."""
        written = self._written.get(to)
        if written is not None:
            for number in range(written.oldest, min(ledger.first, written.newest + 1)):
                self._remove(self._path(to, number, "letter"))
            written.oldest = max(written.oldest, ledger.first)

    def _tell(self, to: int, ledger: Ledger) -> None:
        """Write a note of what we have received, unless the last one says the same."""
        written = self._written.setdefault(to, _Written(ledger.peer_life, oldest=ledger.first))
        had = (ledger.peer_life, ledger.had(ledger.peer_life))
        body = b'{"life":"%b","had":%d}' % ((had[0] or "").encode(), had[1])
        if had != written.told and self._put(to, written.notes + 1, "note", body):
            self._remove(self._path(to, written.notes, "note"))
            written.notes += 1
            written.told = had

    def withdraw_note(self, to: int) -> None:
        """The connection acknowledges instead."""
        written = self._written.get(to)
        if written is not None and written.told is not None:
            self._remove(self._path(to, written.notes, "note"))
            written.told = None

    def close(self) -> None:
        """Remove our notes and empty folders; letters stay for their receiver."""
        for to in self._written:
            self.withdraw_note(to)
        for folder in (*map(self._folder_of, self._written), self._folder_of(self._rank)):
            with contextlib.suppress(OSError):
                folder.rmdir()
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    # -- in ----------------------------------------------------------------------

    def look(
        self, ledgers: Mapping[int, Ledger], connected: Collection[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The messages that have arrived from these ranks, each once and in order."""
        until = time.monotonic() + _BUDGET_SECONDS
        self.is_behind = False
        for rank, lives in self._list().items():
            ledger = ledgers.get(rank)
            if ledger is None:
                continue
            if rank not in connected:  # else the connection knows the current life
                for life in lives:
                    ledger.meet_by_mail(life)
            self._remove_stale(rank, ledger, lives)
            found = lives.get(ledger.peer_life or "")
            if found is None:
                continue
            self._read_note(rank, ledger, found.notes)
            for message in self._take(rank, ledger, sorted(found.letters)):
                yield rank, message
                if time.monotonic() > until:
                    self.is_behind = True
                    break
            if found.letters and rank not in connected:
                self._tell(rank, ledger)

    def _list(self) -> dict[int, dict[str, _Found]]:
        found: dict[int, dict[str, _Found]] = defaultdict(lambda: defaultdict(_Found))
        with contextlib.suppress(OSError):  # no letter was written yet
            for path in self._folder_of(self._rank).iterdir():
                if match := _NAME.fullmatch(path.name):
                    of_life = found[int(match[1])][match[2]]
                    numbers = of_life.letters if match[4] == "letter" else of_life.notes
                    numbers.append(int(match[3]))
        return found

    def _remove_stale(self, rank: int, ledger: Ledger, lives: Mapping[str, _Found]) -> None:
        current = ledger.peer_life
        for life, found in lives.items():
            if ledger.was_replaced(life) or (current is not None and life < current):
                for kind, numbers in (("letter", found.letters), ("note", found.notes)):
                    for number in numbers:
                        self._remove(self._own(rank, life, number, kind))

    def _read_note(self, rank: int, ledger: Ledger, numbers: list[int]) -> None:
        life = ledger.peer_life
        assert life is not None
        newest = max(numbers, default=0)
        if not numbers or self._notes_read.get(rank) == (life, newest):
            return
        note = self._read(self._own(rank, life, newest, "note"))
        if note is not None:
            self._notes_read[rank] = (life, newest)
            if note.get("life") == self._life and type(note.get("had")) is int:
                ledger.acknowledged(note["had"])
                self.clear(rank, ledger)

    def _take(self, rank: int, ledger: Ledger, numbers: list[int]) -> Iterator[dict[str, Any]]:
        life = ledger.peer_life
        assert life is not None
        expected = ledger.had(life) + 1
        fresh = [number for number in numbers if number >= expected]
        if fresh and (expected == 1 or fresh[0] != expected):
            # Earlier letters were for our predecessor; the newest one has the first number.
            letter = self._read(self._own(rank, life, fresh[-1], "letter"))
            if letter is None:
                return
            expected = max(expected, letter["first"])
        for number in numbers:
            if number > expected:
                return  # the one before is not visible yet
            path = self._own(rank, life, number, "letter")
            letter = None if number < expected else self._read(path)
            if number == expected and letter is None:
                return
            self._remove(path)
            if letter is not None and ledger.take(life, number):
                expected += 1
                yield letter["message"]

    # -- files -------------------------------------------------------------------

    def _folder_of(self, rank: int) -> Path:
        return self._folder / f"to-{rank:05d}"

    def _path(self, to: int, number: int, kind: str) -> Path:
        return self._folder_of(to) / f"from-{self._rank:05d}-{self._life}-{number:09d}.{kind}"

    def _own(self, rank: int, life: str, number: int, kind: str) -> Path:
        return self._folder_of(self._rank) / f"from-{rank:05d}-{life}-{number:09d}.{kind}"

    def _mac(self, path: Path, body: bytes) -> bytes:
        # With its path, or a letter could be copied to another reader or number.
        mac = keyed(self._key, b"mail", f"{path.parent.name}/{path.name}\n".encode())
        mac.update(body)
        return mac.hexdigest().encode()

    def _put(self, to: int, number: int, kind: str, body: bytes) -> bool:
        path = self._path(to, number, kind)
        data = self._mac(path, body) + b"\n" + body
        try:
            try:
                write_atomic(path, data, durable=False)
            except FileNotFoundError:
                # Without parents: a run folder that was deleted is not created again.
                self._folder.mkdir(exist_ok=True)
                path.parent.mkdir(exist_ok=True)
                write_atomic(path, data, durable=False)
        except OSError as error:
            self._complaints.say(f"A message to rank {to} cannot be left as a file: {error}.")
            return False
        return True

    def _read(self, path: Path) -> dict[str, Any] | None:
        """The content of a file; None if it is gone, or not written by a keeper of this run."""
        try:
            data = read_plain(path, _MOST_FILE_BYTES)
        except NotPlain as error:
            self._remove(path)  # it would be found again at each poll
            self._complaints.say(f"The file {path.name} was dropped: it is {error.strerror}.")
            return None
        except OSError:
            return None
        mac, _, body = data.partition(b"\n")
        try:
            if not hmac.compare_digest(mac, self._mac(path, body)):
                raise FrameRefused("it is not signed with the key of this run")
            said = parse(body)
            is_letter = type(said.get("first")) is int and isinstance(said.get("message"), dict)
            if path.suffix == ".letter" and not is_letter:
                raise FrameRefused("it is not a letter")
        except FrameRefused as refused:
            # It would be found again at each poll.
            self._remove(path)
            self._complaints.say(f"The file {path.name} was dropped: {refused}.")
            return None
        return said

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
