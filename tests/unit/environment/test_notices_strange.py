"""Metadata services that answer as no document says: what is announced is heard all the same."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast._environment.cloud import aws, azure, gcp, metadata
from holdfast._environment.cloud.metadata import Metadata
from holdfast._environment.cloud.notice import NoAnswer, Notice
from holdfast._keeper.cloud_notices import NoticeWatch
from tests.clouds import Reply, in_gmt, in_utc, of_aws, of_azure, of_gcp, serve

_NESTED = "[" * 100_000


def _end(**changed: object) -> str:
    return json.dumps({"action": "terminate", "time": in_utc(90), **changed})


def _event(**changed: object) -> dict[str, object]:
    told = {"EventId": "a", "EventType": "Preempt", "EventStatus": "Scheduled", "Resources": []}
    return {**told, "NotBefore": in_gmt(30), **changed}


@pytest.mark.parametrize("rebalance", [Reply(500), Reply(200, "<html>"), Reply(200, _NESTED)])
def test_an_interruption_is_heard_though_the_other_question_has_no_answer(rebalance):
    def answer(cloud, asked):
        return rebalance if "rebalance" in asked.path else of_aws(cloud, asked)

    with serve(answer) as cloud:
        cloud.set(action=_end())
        (notice,) = aws.AwsSource(Metadata(cloud.address), "host-a").look()
    assert notice.stops


@pytest.mark.parametrize("maintenance", [Reply(500), Reply(404), Reply(200, "<html>")])
def test_a_preemption_is_heard_though_the_maintenance_has_no_answer(maintenance):
    def answer(cloud, asked):
        if "maintenance" not in asked.path:
            return of_gcp(cloud, asked)
        return Reply(maintenance.status, maintenance.text, {"Metadata-Flavor": "Google"})

    with serve(answer) as cloud:
        cloud.set(preempted="TRUE")
        (notice,) = gcp.GcpSource(Metadata(cloud.address), "host-a").look()
    assert notice.stops


@pytest.mark.parametrize(
    "strange", [None, 7, {}, _event(EventId="b", EventType="Reboot", NotBefore="")]
)
def test_one_event_that_is_not_understood_hides_no_other(strange):
    with serve(of_azure) as cloud:
        cloud.set(events=json.dumps({"Events": [strange, _event()]}))
        (notice,) = azure.AzureSource(Metadata(cloud.address), "host-a").look()
    assert (notice.key, notice.stops) == ("a", True)


@pytest.mark.parametrize("told", ["", "soon", "Mon, 31 Feb 99999 10:00:00 GMT"])
def test_an_eviction_without_a_time_is_one_in_half_a_minute(told):
    with serve(of_azure) as cloud:
        cloud.set(events=json.dumps({"Events": [_event(NotBefore=told)]}))
        (notice,) = azure.AzureSource(Metadata(cloud.address), "host-a").look()
    assert notice.ends_at is not None
    assert 20 < notice.ends_at - time.monotonic() <= 30


@pytest.mark.parametrize("kind", ["\x1b[2J", "a\nb", "x" * 1000, 7])
def test_words_that_no_terminal_should_show_are_not_understood(kind):
    with serve(of_azure) as cloud:
        cloud.set(events=json.dumps({"Events": [_event(EventType=kind)]}))
        with pytest.raises(NoAnswer):
            azure.AzureSource(Metadata(cloud.address), "host-a").look()
    with serve(of_aws) as cloud:
        cloud.set(action=_end(action=kind))
        with pytest.raises(NoAnswer):
            aws.AwsSource(Metadata(cloud.address), "host-a").look()


def test_a_time_without_a_zone_is_that_of_greenwich(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        with serve(of_aws) as cloud:
            cloud.set(action=_end(time=in_utc(90).rstrip("Z")))
            (notice,) = aws.AwsSource(Metadata(cloud.address), "host-a").look()
    finally:
        monkeypatch.undo()
        time.tzset()
    assert notice.ends_at is not None
    assert 80 < notice.ends_at - time.monotonic() <= 91


def test_a_clock_that_is_none_leaves_our_own():
    def answer(cloud, asked):
        reply = of_aws(cloud, asked)
        return Reply(reply.status, reply.text, {"Date": "Mon, 31 Feb 99999 10:00:00 GMT"})

    with serve(answer) as cloud:
        cloud.set(action=_end())
        (notice,) = aws.AwsSource(Metadata(cloud.address), "host-a").look()
    assert notice.ends_at is not None
    assert 80 < notice.ends_at - time.monotonic() <= 91


def test_an_answer_without_a_bottom_is_not_understood():
    for source, document in ((aws.AwsSource, of_aws), (azure.AzureSource, of_azure)):
        with serve(document) as cloud:
            cloud.set(action=_NESTED, events=_NESTED)
            with pytest.raises(NoAnswer):
                source(Metadata(cloud.address), "host-a").look()


@pytest.mark.parametrize(
    "address", ["", "garbage", "http://127.0.0.1:99999", "http://[::1", "file:///etc/passwd"]
)
def test_an_address_that_is_none_is_said_and_raises_nothing(address):
    watch = NoticeWatch(aws.AwsSource(Metadata(address), "host-a"))
    watch.look()
    assert "is no address" in watch.trouble


@contextmanager
def _dripping(beginning: bytes) -> Iterator[str]:
    """Somebody who sends a byte now and then, and never comes to an end."""
    is_over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(beginning)
            while not is_over.wait(0.02):
                try:
                    connection.sendall(b"a")
                except OSError:
                    return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        is_over.set()
        thread.join(10)
        listener.close()


@pytest.mark.parametrize(
    "beginning",
    [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 ", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"],
)
def test_an_answer_that_drips_is_given_up_in_time(beginning):
    with _dripping(beginning) as address:
        began = time.monotonic()
        with pytest.raises(NoAnswer, match="no answer in time"):
            Metadata(address).ask("/", seconds=0.3)
        assert time.monotonic() - began < 5


def test_what_came_instead_of_http_is_shown_in_plain_letters():
    words = metadata._words(ValueError("\x1b[2J" * 1000))
    assert words.isprintable()
    assert len(words) < 200


def test_the_thread_goes_on_whatever_a_source_raises():
    class Broken:
        cloud, interval_seconds = "AWS", 0.01
        looks = 0

        def look(self) -> list[Notice]:
            self.looks += 1
            raise KeyError("never thought of")

    watch = NoticeWatch(Broken())
    watch.look()
    assert watch.trouble
    assert not watch.is_closed
