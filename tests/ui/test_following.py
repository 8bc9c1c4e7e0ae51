"""What a list of thousands rests on: rows by revision, journals read on, looks that hang."""

from __future__ import annotations

import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import wait_until
from tests.ui.made_runs import beat, make_live, make_run
from tests.ui.server import INSTALL

pytest.importorskip("starlette", reason=INSTALL)

from holdfast._report import json_lines
from holdfast._report.server import index
from holdfast._report.server.index import RunFollower, RunIndex, RunTable
from holdfast._report.status.gather import read_history
from holdfast._store.folder import journal


def row(number: int) -> dict[str, object]:
    return {"name": f"run {number}", "at": number, "live": False, "troubled": False}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 3))), st.integers(1, 4))
def test_whoever_asks_piece_by_piece_has_the_whole_table_in_the_end(changes, limit):
    table, known, revision = RunTable(), {}, 0

    def ask_on(revision: int) -> int:
        text, reached, _, starts_over = table.since(revision, limit)
        if starts_over:
            known.clear()
        for each in json.loads(text):
            key = each.pop("key")
            if each.pop("gone", False):
                known.pop(key, None)
            else:
                known[key] = each
        return reached

    truth: dict[str, object] = {}
    for run, number in changes:
        key = f"k{run}"
        if number < 0:
            table.remove(key)
            truth.pop(key, None)
        else:
            table.put(key, row(number))
            truth[key] = row(number)
        revision = ask_on(revision)
    while revision < table.revision:
        revision = ask_on(revision)
    assert known == truth
    assert len(table) == len(truth)
    assert table.since(revision, limit)[0] == "[]"


def test_a_row_that_says_nothing_new_costs_no_revision():
    table = RunTable()
    assert table.put("a", row(1))
    assert not table.put("a", row(1))
    assert table.revision == 1


def test_a_journal_is_read_on_and_from_its_start_when_it_is_another(tmp_path):
    layout = make_run(tmp_path / "a")
    followed = RunFollower(layout.folder)
    assert followed.read_journal() == read_history(layout)
    with layout.journal.open("a") as file:
        file.write('{"event": "loop", "tot')
    assert followed.read_journal().total == 100
    with layout.journal.open("a") as file:
        file.write('al": 5}\nnonsense "event": "loop"\n["event": "loop"]\n')
    assert followed.read_journal() == read_history(layout)
    assert followed.history.total == 5
    layout.journal.write_text('{"event": "loop", "total": 6}\n')
    assert followed.read_journal().total == 6
    assert followed.history.attempt is None


def test_a_long_journal_is_read_in_slices_and_a_giant_line_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_PIECE_BYTES", 2048)
    monkeypatch.setattr(json_lines, "_LONGEST_LINE_BYTES", 2048)
    layout = make_run(tmp_path / "a")
    for number in range(300):
        journal.append(layout.journal, "checkpoint", step=number, said='"event": "loop"')
    with layout.journal.open("a") as file:
        file.write('{"event": "loop", "total": 1, "x": "' + "y" * 20_000 + '"}\n')
    journal.append(layout.journal, "finished", step=300, total=300)
    followed, reads = RunFollower(layout.folder), 1
    followed.read_journal()
    while followed.is_behind:
        followed.read_journal()
        reads += 1
    assert reads > 10
    assert followed.history.finished_step == followed.history.total == 300


def test_whether_a_far_run_lives_is_known_after_some_looks_and_none_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "SILENT_SECONDS", 0.3)
    layout = make_live(tmp_path / "a")
    follower = RunFollower(layout.folder)
    began = time.monotonic()
    assert not follower.look().is_live
    assert follower.is_watched
    beat(layout, 11)
    assert follower.look().is_live
    assert time.monotonic() - began < 5
    wait_until(lambda: not follower.look().is_live, what="silence")
    assert not follower.is_watched


def test_a_look_that_hangs_holds_only_its_own_run_up(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_HUNG_SECONDS", 0.5)
    names = [f"run-{number}" for number in range(12)]
    for name in names:
        make_run(tmp_path / name)
    gate, look = threading.Event(), RunFollower.look
    # More than there are threads: each of them is held once.
    held = set(names[:6])

    def maybe_hang(self):
        if self.folder.name in held:
            gate.wait()
        return look(self)

    monkeypatch.setattr(RunFollower, "look", maybe_hang)
    runs = RunIndex(tmp_path)
    runs.start()
    try:

        def states():
            rows = json.loads(runs.table.since(0, 100)[0])
            found = {each["name"]: each["state"] for each in rows}
            return found if len(found) == len(names) else None

        found = wait_until(states, 60, what="all rows")
        assert {name for name, state in found.items() if state == "unreadable"} == held
        gate.set()
        wait_until(lambda: set(states().values()) == {"stopped"}, 60, what="the end of the hang")
    finally:
        gate.set()
        runs.close()


@pytest.mark.nightly  # tests/ui/test_list.py has a few
def test_a_thousand_runs_are_listed_while_requests_are_answered_quickly(tmp_path, serve):
    for number in range(1200):
        make_run(tmp_path / f"group-{number % 7}" / f"run-{number:04d}", step=number)
    ui = serve(tmp_path)
    known, revision, times, is_done = {}, 0, [], False
    deadline = time.monotonic() + 200
    while not is_done and time.monotonic() < deadline:
        began = time.monotonic()
        found = ui.see(f"runs?since={revision}").json()
        times.append(time.monotonic() - began)
        assert len(found["rows"]) <= 1000
        known |= {each["name"]: each["step"] for each in found["rows"]}
        revision, is_done = found["revision"], found["done"] and not found["more"]
    assert len(known) == 1200
    assert sorted(known.values()) == list(range(1200))
    # A bound for an event loop that is starved, on any machine; no figure of how quick it is.
    assert sorted(times)[len(times) // 2] < 0.5
