"""Letters between keepers: taken once and in order, and only if a keeper of the run wrote them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._keeper.network import file_mailbox as mails
from holdfast._keeper.network.connection import Complaints
from holdfast._keeper.network.endpoint import Ledger, new_life
from holdfast._keeper.network.file_mailbox import Mail


class Keeper:
    """One life of a keeper as far as letters go."""

    def __init__(self, folder: Path, rank: int, other: int, key: bytes = b"key") -> None:
        self.other = other
        self.ledger = Ledger(new_life())
        self.mail = Mail(folder / "mail", key, rank, self.ledger.life, Complaints())
        self.heard: list[Any] = []

    def say(self, *values: Any) -> None:
        for value in values:
            self.ledger.post(json.dumps({"value": value}).encode())

    def write(self) -> None:
        self.mail.post(self.other, self.ledger)

    def look(self, connected: bool = False) -> None:
        known = {self.other} if connected else set()
        for _, message in self.mail.look({self.other: self.ledger}, known):
            self.heard.append(message["value"])

    def connect(self, other: Keeper, arriving: int) -> None:
        """Say what waits over a connection that is cut after so many messages."""
        if not (self.ledger.meet(other.ledger.life) and other.ledger.meet(self.ledger.life)):
            return
        self.ledger.acknowledged(other.ledger.had(self.ledger.life))
        self.mail.clear(self.other, self.ledger)
        for number in range(self.ledger.first, min(self.ledger.first + arriving, self.ledger.next)):
            if other.ledger.take(self.ledger.life, number):
                other.heard.append(json.loads(self.ledger.kept(number))["value"])


@pytest.fixture
def pair(tmp_path):
    return Keeper(tmp_path, 0, 3), Keeper(tmp_path, 3, 0)


def files(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted((folder / "mail").glob(f"to-*/{pattern}"))


def test_letters_are_taken_once_and_acknowledged_by_a_note(tmp_path, pair):
    sender, receiver = pair
    receiver.look()
    assert not (tmp_path / "mail").exists()
    sender.say(1, 2, 3)
    sender.write()
    names = [path.name for path in files(tmp_path)]
    life = sender.ledger.life
    assert names == [f"from-00000-{life}-{number:09d}.letter" for number in (1, 2, 3)]
    receiver.look()
    receiver.look()
    assert receiver.heard == [1, 2, 3]
    assert [path.suffix for path in files(tmp_path)] == [".note"]
    sender.look()
    assert sender.ledger.first == 4
    sender.say(4)
    sender.write()
    receiver.look()
    assert receiver.heard == [1, 2, 3, 4]
    sender.mail.close()
    receiver.mail.close()
    assert not (tmp_path / "mail").exists()


def test_a_letter_waits_for_the_one_before_it(tmp_path, pair):
    sender, receiver = pair
    sender.say(1, 2, 3)
    sender.write()
    second = files(tmp_path)[1]
    second.rename(tmp_path / "late")
    receiver.look()
    assert receiver.heard == [1]
    (tmp_path / "late").rename(second)
    receiver.look()
    assert receiver.heard == [1, 2, 3]


def test_letters_that_no_keeper_of_the_run_wrote_are_dropped(tmp_path, pair, capfd):
    sender, receiver = pair
    sender.say(1)
    sender.write()
    (letter,) = files(tmp_path)
    whole = letter.read_bytes()
    second = letter.with_name(letter.name.replace("1.letter", "2.letter"))
    for path, data in [
        (letter, whole.replace(b'"value": 1', b'"value": 7')),
        (letter, b"garbage"),
        (letter, b""),
        (second, whole),  # copied to another number
    ]:
        letter.unlink(missing_ok=True)
        path.write_bytes(data)
        receiver.look()
        receiver.look()
        assert receiver.heard == []
        assert not path.exists()
    assert "was dropped: it is not signed" in capfd.readouterr().out
    letter.write_bytes(whole)
    receiver.look()
    assert receiver.heard == [1]


def test_another_rank_cannot_read_letters_that_were_copied_to_it(tmp_path, pair):
    sender, _ = pair
    sender.say(1)
    sender.write()
    (letter,) = files(tmp_path)
    elsewhere = tmp_path / "mail" / "to-00004"
    elsewhere.mkdir()
    (elsewhere / letter.name).write_bytes(letter.read_bytes())
    fourth = Keeper(tmp_path, 4, 0)
    fourth.look()
    assert fourth.heard == []


def test_a_new_life_of_the_receiver_gets_what_the_former_had_not_acknowledged(tmp_path, pair):
    sender, receiver = pair
    sender.say(1, 2, 3)
    sender.write()
    receiver.look()
    sender.look()  # 1 to 3 are acknowledged
    sender.say(4, 5, 6)
    sender.write()
    files(tmp_path, "*4.letter")[0].unlink()  # as if the former had taken it, and died
    successor = Keeper(tmp_path, 3, 0)
    successor.look()
    assert successor.heard == []
    sender.look()
    sender.write()
    successor.look()
    assert successor.heard == [4, 5, 6]


def test_letters_of_a_life_that_was_replaced_are_removed(tmp_path, pair):
    former, receiver = pair
    former.say(1)
    former.write()
    successor = Keeper(tmp_path, 0, 3)
    successor.connect(receiver, 0)
    receiver.look(connected=True)
    assert receiver.heard == []
    assert files(tmp_path) == []


def test_letters_of_the_dead_are_no_reason_to_refuse_the_living(tmp_path, pair):
    """Clocks of two hosts may differ: then a dead life looks newer than its successor."""
    sender, receiver = pair
    dead = Keeper(tmp_path, 0, 3)
    dead.say(-1)
    dead.write()
    sender.say(1, 2)
    sender.connect(receiver, 1)
    receiver.look()
    sender.say(3)
    sender.connect(receiver, 9)
    assert [value for value in receiver.heard if value > 0] == [1, 2, 3]


def test_a_disk_that_takes_no_letter_is_said_and_tried_again(tmp_path, pair, capfd, monkeypatch):
    sender, receiver = pair
    sender.say(1)
    (tmp_path / "mail").write_bytes(b"in the way")
    sender.write()
    assert "A message to rank 3 cannot be left as a file" in capfd.readouterr().out
    (tmp_path / "mail").unlink()
    sender.write()
    receiver.look()
    assert receiver.heard == [1]


def test_a_deleted_run_folder_is_not_made_anew(tmp_path):
    sender = Keeper(tmp_path / "deleted", 0, 3)
    sender.say(1)
    sender.write()
    assert not (tmp_path / "deleted").exists()


def test_many_letters_are_taken_in_turns(tmp_path, pair, monkeypatch):
    sender, receiver = pair
    monkeypatch.setattr(mails, "_BUDGET_SECONDS", 0.0)
    sender.say(1, 2, 3)
    for _ in range(3):
        sender.write()
    assert len(files(tmp_path)) == 3
    receiver.look()
    assert receiver.mail.is_behind
    receiver.look()
    receiver.look()
    receiver.look()
    assert receiver.heard == [1, 2, 3]
    assert not receiver.mail.is_behind


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["say", "write", "look", "delay", "replace"]), st.booleans()),
        st.tuples(st.integers(0, 3), st.booleans()),  # a connection for so many messages
    ),
    max_size=40,
)


class World:
    """Two keepers, either of which may be replaced, and a file system that shows files late."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends = [Keeper(folder, 0, 3), Keeper(folder, 3, 0)]
        self.lives = [0, 0]
        self.said = [0, 0]  # by this life
        self.owed_from = [1, 1]  # the first that this life of the receiver must hear of it
        self.late: list[tuple[Path, Path]] = []

    def act(self, action: str | int, index: int) -> None:
        end, other = self.ends[index], self.ends[1 - index]
        if action == "say":
            self.said[index] += 1
            end.say([self.lives[index], self.said[index]])
        elif action == "write":
            end.write()
        elif action == "look":
            end.look()
        elif action == "delay":
            for path in files(self.folder)[:1]:
                self.late.append((path, self.folder / f"late-{len(self.late)}"))
                path.rename(self.late[-1][1])
        elif action == "replace":
            self.lives[index] += 1
            self.said[index], self.owed_from[index] = 0, 1
            # What the former had may be acknowledged yet, by a note that it has left.
            had = end.ledger.had(other.ledger.life)
            self.owed_from[1 - index] = max(self.owed_from[1 - index], had + 1)
            self.ends[index] = Keeper(self.folder, *((3, 0) if index else (0, 3)))
        else:
            end.connect(other, action)

    def settle(self) -> None:
        """Mail as far as it goes, and then a connection that lasts."""
        for path, hidden in self.late:
            hidden.rename(path)
        for _ in range(4):
            for end in self.ends:
                end.write()
                end.look()
        for _ in range(2):
            self.ends[0].connect(self.ends[1], 999)
            self.ends[1].connect(self.ends[0], 999)

    def check(self) -> None:
        for index in (0, 1):
            heard = self.ends[1 - index].heard
            assert [life for life, _ in heard] == sorted(life for life, _ in heard)
            for life in range(self.lives[index] + 1):
                numbers = [number for which, number in heard if which == life]
                assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True
                if life == self.lives[index] and numbers:
                    assert numbers[0] <= self.owed_from[index]

    def check_all_heard(self) -> None:
        for index in (0, 1):
            heard = self.ends[1 - index].heard
            for number in range(self.owed_from[index], self.said[index] + 1):
                assert [self.lives[index], number] in heard
            assert self.ends[index].ledger.first == self.ends[index].ledger.next


@settings(max_examples=150)
@given(ACTIONS)
def test_by_mail_and_by_connection_each_message_comes_once_and_in_order(actions):
    with tempfile.TemporaryDirectory() as name:
        world = World(Path(name))
        for action, which in actions:
            world.act(action, int(which))
            world.check()
        world.settle()
        world.check()
        world.check_all_heard()
