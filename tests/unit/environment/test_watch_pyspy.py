"""How long the readers of stacks are waited for; py-spy is a script here."""

from __future__ import annotations

import time

import pytest

from holdfast._environment.processes.stacks import dump_stacks
from holdfast._report.status import ask

_THREADS = '[{"thread_id": 1, "os_thread_id": 1, "frames": []}]'


@pytest.fixture
def reader(tmp_path):
    """A py-spy that takes so many seconds."""

    def make(seconds: float) -> str:
        path = tmp_path / "py-spy"
        path.write_text(f"#!/bin/sh\nsleep {seconds}\necho '{_THREADS}'\n")
        path.chmod(0o700)
        return str(path)

    return make


@pytest.mark.nightly
def test_every_reader_has_the_time_for_itself_however_many_processes_there_are(reader):
    pids = list(range(1, 13))  # four at once
    found = dump_stacks(pids, 2.5, reader(1.0))
    assert not any(each.is_late for each in found.values())


def test_of_readers_that_do_not_answer_only_the_first_are_waited_for(reader):
    began = time.monotonic()
    found = dump_stacks(list(range(1, 65)), 0.5, reader(60.0))
    assert all(each.is_late for each in found.values())
    assert time.monotonic() - began < 20


class _Looker:
    """Looks for a second, and says in between that it gets on, or does not."""

    def __init__(self, pid: int) -> None:
        self.gets_on = pid == 1
        self.alive_at = 0.0

    def look(self):
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            if self.gets_on:
                self.alive_at = time.monotonic()
            time.sleep(0.01)
        return {"processes": [{}]}


def test_a_look_from_here_is_waited_for_as_long_as_it_gets_on(monkeypatch):
    monkeypatch.setattr(ask, "Looker", _Looker)
    monkeypatch.setattr(ask, "_OWN_SECONDS", 1.0)
    monkeypatch.setattr(ask, "ranks_below", lambda pid: {})  # others may train on this machine
    assert ask.look_at_process(1) != []
    assert ask.look_at_process(2) == []
