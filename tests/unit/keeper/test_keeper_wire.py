"""Keepers hear each other: every message once, in order, whatever happens to the network."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast._keeper.network.connection import MOST_BYTES
from tests.support import wait_until
from tests.unit.posts import QUICK, End, Proxy, hub, member

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ends():
    """Whatever is put in here is closed after the test, the last one first."""
    opened = []
    yield opened
    for end in reversed(opened):
        end.close()


@pytest.fixture
def begin(ends):
    def start(end):
        ends.append(end)
        return end

    return start


@pytest.fixture
def mail(tmp_path):
    return tmp_path / "mail"


def test_a_message_with_wrong_fields_does_not_end_the_keeper(begin, mail, capsys):
    center = begin(hub(mail, 2))
    other = begin(member(mail, 1, center.post.port))

    def refuse(rank, message):
        if message["kind"] == "strange":
            message["mark"]

    center.answer = refuse
    other.send(0, "strange", value=1)
    other.send(0, "known", value=2)
    assert center.wait_for_values(2, 1) == [1, 2]
    wait_until(lambda: not other.post.unacknowledged(), 5)
    assert "KeyError: 'mark'" in capsys.readouterr().err


def test_a_thousand_messages_arrive_in_order_both_ways(begin, mail):
    center = begin(hub(mail, 2))
    other = begin(member(mail, 1, center.post.port))
    for number in range(1000):
        center.send(1, "down", value=number)
        other.send(0, "up", value=number)
    assert other.wait_for_values(1000, 0) == list(range(1000))
    assert center.wait_for_values(1000, 1) == list(range(1000))
    assert center.heard[0] == (1, {"kind": "up", "value": 0})
    wait_until(lambda: not center.post.unacknowledged() and not other.post.unacknowledged(), 5)
    assert center.events == [("found", 1)]
    assert other.events == [("found", 0)]
    assert not mail.exists()


def test_a_message_may_be_long_but_not_too_long(begin, mail):
    center = begin(hub(mail, 2))
    other = begin(member(mail, 1, center.post.port))
    long = "x" * (MOST_BYTES - 100)
    for value in (long, "short", long):
        other.send(0, "manifest", value=value)
    assert center.wait_for_values(3, 1) == [long, "short", long]
    with pytest.raises(ValueError, match="the most"):
        other.post.send(0, "manifest", value="x" * MOST_BYTES)


def test_64_members_at_once(begin, mail):
    center = begin(hub(mail, 65))
    others = [begin(member(mail, rank, center.post.port)) for rank in range(1, 65)]
    for other in others:
        for number in range(5):
            other.send(0, "up", value=number)
    for rank, other in enumerate(others, 1):
        center.send(rank, "down", value=rank)
        assert other.wait_for_values(1) == [rank]
        assert center.wait_for_values(5, rank) == list(range(5))
    assert center.post.connected() == set(range(1, 65))


def test_what_was_sent_before_the_end_still_arrives(begin, mail):
    center = begin(hub(mail, 2))
    other = member(mail, 1, center.post.port)
    other.wait_connected(0)
    for number in range(100):
        center.send(1, "down", value=number)  # unread bytes must not make a reset of the end
        other.send(0, "up", value=number)
    other.close()
    assert center.wait_for_values(100, 1) == list(range(100))
    wait_until(lambda: center.events[-1] == ("lost", 1), 5)


def test_a_member_tries_one_address_after_the_other(begin, mail):
    deaf = socket.create_server(("127.0.0.1", 0))  # accepts, and says nothing
    center = begin(hub(mail, 2))
    with deaf:
        refusing = socket.create_server(("127.0.0.1", 0))
        addresses = [
            ("not-a-number", 1),
            ("127.0.0.1", refusing.getsockname()[1]),
            ("127.0.0.1", deaf.getsockname()[1]),
            ("127.0.0.1", center.post.port),
        ]
        refusing.close()
        other = begin(member(mail, 1, pace=QUICK, addresses=lambda: addresses))
        other.wait_connected(0)


def start_hub(folder: Path) -> tuple[subprocess.Popen, int]:
    (folder / "port").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.unit.posts", str(folder), "3"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until((folder / "port").exists, 20, "the hub's port")
    return process, int((folder / "port").read_text())


def test_a_killed_hub_is_replaced_and_gets_what_the_first_had_not_acknowledged(begin, tmp_path):
    first, port = start_hub(tmp_path)
    ports = [port]
    others = [
        begin(
            member(
                tmp_path / "mail", rank, addresses=lambda: [("127.0.0.1", port) for port in ports]
            )
        )
        for rank in (1, 2)
    ]
    for number in range(20):
        for other in others:
            other.send(0, "up", value=number)
    for other in others:
        other.wait_for_values(20)
    first.kill()
    for number in range(20, 40):
        for other in others:
            other.send(0, "up", value=number)
    lines, _ = first.communicate()
    second, ports[0] = start_hub(tmp_path)
    try:
        for other in others:
            wait_until(lambda other=other: 39 in other.values(), 20, "the last echo")
            wait_until(lambda other=other: other.events.count(("found", 0)) == 2, 5)
            assert other.events == [("found", 0), ("lost", 0), ("found", 0)]
            echoed = other.values()
            assert echoed[:20] == list(range(20))
            # Only what the first had not acknowledged is said again.
            assert echoed[20:] == list(range(echoed[20], 40))
            assert echoed[20] <= 20
    finally:
        second.kill()
        later, _ = second.communicate()
    for rank in (1, 2):
        told = [int(line.split()[2]) for line in later.splitlines() if f"heard {rank}" in line]
        assert told == list(range(told[0], 40))
    assert lines.count("heard") >= 40


def test_a_connection_that_hangs_is_noticed_and_mail_goes_on(begin, mail):
    center = begin(hub(mail, 2, pace=QUICK))
    proxy = begin(Proxy(center.post.port))
    other = begin(member(mail, 1, proxy.port, pace=QUICK))
    other.wait_connected(0)
    proxy.hangs = True
    for number in range(100):
        center.send(1, "down", value=number)
        other.send(0, "up", value=number)
    assert other.wait_for_values(100) == list(range(100))
    assert center.wait_for_values(100, 1) == list(range(100))
    assert not center.post.connected()
    assert not other.post.connected()
    assert list(mail.glob("to-*/*.note"))
    wait_until(lambda: not center.post.unacknowledged(), 10, "the note")

    proxy.hangs = False
    for number in range(100, 200):
        center.send(1, "down", value=number)
        other.send(0, "up", value=number)
    assert other.wait_for_values(200) == list(range(200))
    assert center.wait_for_values(200, 1) == list(range(200))
    other.wait_connected(0)
    center.wait_connected(1)
    assert [what for what, _ in other.events][:3] == ["found", "lost", "found"]
    assert [what for what, _ in center.events][:3] == ["found", "lost", "found"]
    wait_until(lambda: not list(mail.glob("to-*/*")), 10, "the end of the mail")


def test_an_acknowledgement_that_empties_the_queue_lets_the_next_messages_follow(begin, mail):
    center, addresses = begin(hub(mail, 2)), []
    other = begin(member(mail, 1, addresses=lambda: addresses))
    for number in range(40):  # more than a connection takes at once
        other.send(0, "up", value=[number, "x" * 300_000])
    may_read = threading.Event()

    def ask_and_read_nothing(rank, message):
        if message["value"][0] == 0:
            center.post.send(1, "down", value=0)
            may_read.wait(30)

    def acknowledge_when_there_is_room(*_):
        may_read.set()
        before = -1
        while len(center.heard) > before:  # until all that was on its way has arrived
            before = len(center.heard)
            time.sleep(0.2)
        other.post.tick(time.monotonic() + 1)

    center.answer, other.answer = ask_and_read_nothing, acknowledge_when_there_is_room
    addresses.append(("127.0.0.1", center.post.port))
    assert [value[0] for value in center.wait_for_values(40, 1)] == list(range(40))


@pytest.mark.parametrize("seed", range(3))
def test_random_cuts_never_lose_double_or_reorder(begin, mail, seed):
    dice = random.Random(seed)
    # On a busy machine these threads may not run for half a second: no connection would last.
    pace = replace(QUICK, silence_seconds=2.0, greet_seconds=2.0)
    center = begin(hub(mail, 3, pace=pace))
    proxies = [begin(Proxy(center.post.port)) for _ in (1, 2)]
    others = [begin(member(mail, rank, proxies[rank - 1].port, pace=pace)) for rank in (1, 2)]
    said = 0
    for _ in range(8):
        for _ in range(dice.choice([1, 5, 40])):
            value = [said, "x" * dice.choice([0, 0, 100, 300_000])]
            for rank, other in enumerate(others, 1):
                center.send(rank, "down", value=value)
                other.send(0, "up", value=value)
            said += 1
        proxy = dice.choice(proxies)
        action = dice.choice(["cut", "hang", "heal", "heal"])
        if action == "cut":
            proxy.cut()
        proxy.hangs = action == "hang"
        time.sleep(dice.choice([0, 0.01, 0.1, 0.4]))  # how long, not what for
    for proxy in proxies:
        proxy.hangs = False
    for rank, other in enumerate(others, 1):
        assert [value[0] for value in other.wait_for_values(said)] == list(range(said))
        heard = center.wait_for_values(said, rank)
        assert [value[0] for value in heard] == list(range(said))
        other.wait_connected(0)
    wait_until(lambda: not center.post.unacknowledged(), 10, "all acknowledgements")


def test_a_new_connection_of_a_rank_replaces_the_older_one(begin, mail, capfd):
    center = begin(hub(mail, 2))
    former = begin(member(mail, 1, center.post.port))
    center.wait_connected(1)
    center.send(1, "down", value="for the former")
    former.wait_for_values(1)
    wait_until(lambda: not center.post.unacknowledged(), 5, "the acknowledgement")
    latter = begin(member(mail, 1, center.post.port))
    wait_until(lambda: center.events == [("found", 1), ("lost", 1), ("found", 1)], 5)
    center.send(1, "down", value="for the latter")
    assert latter.wait_for_values(1) == ["for the latter"]
    # The former tries again, and must not push out its successor.
    wait_until(lambda: "taken the place" in capfd.readouterr().out, 5, "the refusal")
    assert former.values() == ["for the former"]
    assert len(center.events) == 3


def knock(port: int, *parts: bytes) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port), timeout=10)
    for part in parts:
        link.sendall(part)
    return link


def is_dropped(link: socket.socket) -> bool:
    """Whether the hub ends this connection, having said no more than its nonce."""
    said = b""
    try:
        while data := link.recv(4096):
            said += data
    except ConnectionError:
        pass
    finally:
        link.close()
    return len(said) == 24 or said == b""


def recorded(center: End, mail: Path) -> list[bytes]:
    """What a member of rank 2 sends over its whole connection."""
    proxy = Proxy(center.post.port)
    other = member(mail, 2, proxy.port)
    other.send(0, "up", value="once")
    center.wait_for_values(1, 2)
    proxy.close()
    other.close()
    return proxy.from_member


def test_strangers_are_dropped_and_disturb_nobody(begin, mail, capfd):
    center = begin(hub(mail, 3))
    good = begin(member(mail, 1, center.post.port))
    good.wait_connected(0)
    port, magic = center.post.port, b"hf1 mem\n"
    played = b"".join(recorded(center, mail))
    strangers = [
        knock(port, b"GET / HTTP/1.1\r\n\r\n"),
        knock(port, magic, b"n" * 16, bytes(4), bytes(16)),  # an empty frame, not signed
        knock(port, b"hf1 hub\n", b"n" * 16),  # a hub that talks to a hub
        knock(port, played),
    ]
    reflecting = knock(port)
    reflecting.sendall(reflecting.recv(24))
    assert all(map(is_dropped, [*strangers, reflecting]))
    knock(port, played[:50]).close()  # half a frame
    assert center.values(2) == ["once"]

    begin(member(mail, 2, port, key=b"another key"))
    wait_until(lambda: "not signed" in capfd.readouterr().out, 10, "a line about it")
    center.send(1, "down", value="still here")
    good.wait_for_values(1)
    assert good.events == [("found", 0)]
    assert center.post.connected() == {1}


def test_a_stranger_cannot_make_the_hub_wait_for_a_long_frame(begin, mail, capfd):
    center = begin(hub(mail, 2))
    assert is_dropped(knock(center.post.port, b"hf1 mem\n", b"n" * 16, b"\0\0\x10\1", bytes(16)))
    line = wait_until(lambda: capfd.readouterr().out, 5, "the line about it")
    assert "it announces a frame of 4097 bytes" in line


def test_a_keeper_that_did_not_listen_does_not_take_the_others_for_silent(begin, mail):
    center = begin(hub(mail, 2, pace=QUICK))
    other = begin(member(mail, 1, center.post.port))
    other.wait_connected(0)
    patient = replace(QUICK, silence_seconds=60.0)
    other.do(lambda: setattr(other.post, "_pace", patient))
    center.do(lambda: time.sleep(2 * QUICK.silence_seconds))  # a disk that hangs
    center.send(1, "down", value="awake")
    other.wait_for_values(1)
    center.do(lambda: center.heard.append((1, {"value": "swept"})))
    center.wait_for_values(1, 1)
    assert center.events == [("found", 1)]


def test_lines_about_strangers_are_few(begin, mail, capfd):
    center = begin(hub(mail, 2))
    began = time.monotonic()
    for _ in range(50):
        assert is_dropped(knock(center.post.port, b"garbage"))
    lines = capfd.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 2 + time.monotonic() - began
    assert "was dropped: it is not a keeper" in lines[0]


def test_whoever_says_nothing_is_dropped_in_time(begin, mail):
    center = begin(hub(mail, 2, pace=QUICK))
    silent = [knock(center.post.port), knock(center.post.port, b"hf1 mem\n")]
    assert all(map(is_dropped, silent))


def test_there_are_only_so_many_strangers_at_a_time(begin, mail):
    center = begin(hub(mail, 2))
    links = [knock(center.post.port) for _ in range(2 + 64 + 10)]
    assert all(map(is_dropped, links[:10]))
    other = begin(member(mail, 1, center.post.port))
    other.wait_connected(0)
    assert is_dropped(links[10])
    for link in links[11:]:
        link.setblocking(False)
        assert len(link.recv(100)) == 24
        with pytest.raises(BlockingIOError):
            link.recv(100)
        link.close()


def test_bytes_changed_on_the_way_end_the_connection_and_not_the_messages(begin, mail):
    center = begin(hub(mail, 2))
    proxy = begin(Proxy(center.post.port))
    other = begin(member(mail, 1, proxy.port))
    other.wait_connected(0)
    proxy.spoils_next = True
    for number in range(10):
        other.send(0, "up", value=number)
    assert center.wait_for_values(10, 1) == list(range(10))
    wait_until(lambda: center.events == [("found", 1), ("lost", 1), ("found", 1)], 5)
