"""When the keeper raises an alarm, when not again, and what is said and kept of it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from holdfast._environment.processes.cgroup import MemoryCgroup
from holdfast._environment.processes.memory_growth import Forecast
from holdfast._keeper.memory_alarm import Alarm, Episodes, MemoryWatch
from holdfast._run.keeper_events import sentence_of
from holdfast._store.commit.retention import Kept, choose_kept
from tests.unit.tables import ATTEMPT, Table


def _forecast(seconds: float, bytes_per_second: float = 41e6) -> Forecast:
    return Forecast(seconds, bytes_per_second, 1_200_000_000, 2_000_000_000, "cgroup")


def _alarms(
    course: list[tuple[float, float | None]], needed: float = 0.1, *, is_busy: bool = False
) -> list[tuple[float, bool]]:
    """At which times there is an alarm, and whether it begins an episode."""
    episodes = Episodes()
    found = []
    for now, left in course:
        forecast = None if left is None else _forecast(left)
        alarm = episodes.alarm(now, forecast, needed, is_busy=is_busy)
        if alarm is not None:
            found.append((now, alarm.is_first))
    return found


def test_the_closer_the_limit_the_sooner_the_next_alarm():
    course = [(float(now), 60.0 - now) for now in range(60)]
    assert _alarms(course) == [(30, True), (45, False), (53, False), (57, False), (59, False)]


def test_a_limit_that_is_far_or_unknown_is_no_danger():
    assert _alarms([(float(now), 31.0) for now in range(100)]) == []
    assert _alarms([(float(now), None) for now in range(100)]) == []


def test_the_alarm_comes_earlier_where_saving_takes_longer():
    course = [(float(now), 200.0 - now) for now in range(200)]
    assert _alarms(course, needed=20.0)[0] == (130, True)


def test_a_forecast_that_trembles_begins_no_second_episode():
    course = [(float(now), 29.0 if now % 2 else 40.0) for now in range(30)]
    assert [first for _, first in _alarms(course)] == [True]


def test_after_ten_quiet_seconds_a_new_danger_is_told_again():
    course = [(0.0, 20.0), (5.0, None), (9.0, None), (10.0, 20.0)]
    assert _alarms(course) == [(0, True)]
    course += [(15.0, None), (21.0, None), (22.0, 20.0)]
    assert _alarms(course) == [(0, True), (22, True)]


def test_while_a_checkpoint_is_written_no_other_is_asked_for():
    course = [(0.0, 28.0), (20.0, 8.0), (24.0, 4.0)]
    assert _alarms(course, is_busy=True) == [(0, True)]


def test_what_is_full_without_growing_is_no_news():
    found = Episodes().alarm(0.0, _forecast(0.0, 0.0), 0.1, is_busy=False)
    assert found is None


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("cgroup", "memory grows by 41 MB/s: the limit of 2.0 GB (cgroup) is reached"),
        ("machine", "memory grows by 41 MB/s: the machine's 2.0 GB are used up"),
        ("shm", "/dev/shm fills by 41 MB/s: its 2.0 GB are full"),
    ],
)
def test_what_is_said(what, said):
    forecast = Forecast(21.4, 41e6, 1_200_000_000, 2_000_000_000, what)
    message = {"kind": "memory", **Alarm(forecast, is_first=True).figures()}
    now = " in about 21 s. Step 1240 is made durable now."
    assert sentence_of({**message, "step": 1240}) == said + now
    next_one = " in about 21 s. The next step is made durable."
    assert sentence_of({**message, "step": None}) == said + next_one
    of_rank = {**message, "step": 1240, "of_rank": 3, "host": "node2"}
    assert sentence_of(of_rank) == f"rank 3 on node2: {said}{now}"


def _danger(table: Table, rank: int, mark: int, *, first: bool = True, host: str = "a") -> None:
    figures = Alarm(_forecast(20.0), is_first=first).figures()
    table.say(rank, "danger", first=first, host=host, mark=mark, figures=figures)


def test_of_several_ranks_what_all_hold_is_durable_first_and_then_the_next_boundary():
    table = Table()
    table.hold(4)
    _danger(table, 1, 5)
    assert table.shelf.begun == [(ATTEMPT, 4)]
    assert table.all_told("hold") == [0, 1]
    (told,) = table.told(0, "memory")
    assert (told["of_rank"], told["step"], told["what"]) == (1, 2, "cgroup")
    assert table.told(1, "memory") == []
    (noted,) = table.shelf.noted("memory")
    assert (noted["rank"], noted["seconds"]) == (1, 20.0)
    for rank in range(2):
        table.at(rank, 6)
    assert table.decisions() == [(0, 6, "save"), (1, 6, "save")]
    assert table.told(0, "decide")[0]["wish"]["reason"] == "memory"


def test_ranks_of_one_host_see_the_same_and_it_is_said_once():
    table = Table(3)
    table.hold(4)
    _danger(table, 0, 4)
    _danger(table, 1, 4)
    _danger(table, 2, 4, host="b")
    assert [each["host"] for each in table.told(0, "memory")] == ["a", "b"]
    assert len(table.shelf.noted("memory")) == 3
    assert len(table.told(1, "hold")) == 1  # one boundary is enough for all


def test_checkpoints_made_in_a_hurry_count_as_one_among_those_to_keep():
    reasons = ["cadence", "cadence", "memory", "memory", "memory", "death"]
    found = [Kept(step, 1, Path(f"step-{step}"), {}, reason) for step, reason in enumerate(reasons)]
    kept = choose_kept(found, {1: None}, 3, None)
    assert sorted(path.name for path in kept) == ["step-1", "step-4", "step-5"]


def _watch_of(cgroup: Path, monkeypatch) -> MemoryWatch:
    (cgroup / "memory.max").write_text("1000\n")
    found = MemoryCgroup(2, "/job", [str(cgroup)])
    monkeypatch.setattr(MemoryCgroup, "find", lambda *_: found)
    watch = MemoryWatch(os.getpid())
    watch.sample(time.monotonic())
    return watch


def test_what_cannot_be_observed_at_the_start_neither_ends_the_keeper_nor_stays_unknown(
    monkeypatch, capsys
):
    def refuse(*_: object) -> None:
        raise PermissionError("/sys is closed")

    with monkeypatch.context() as closed:
        closed.setattr(MemoryCgroup, "find", refuse)
        watch = MemoryWatch(os.getpid())
        watch.sample(time.monotonic())
        watch.wait_for_room()
        assert watch.at_death() == {"counters": {}, "memory": [], "children": []}
        assert (watch.before, watch.newest) == (None, None)
    assert "/sys is closed" in capsys.readouterr().err
    watch.sample(time.monotonic())
    assert watch.newest["rss"]


def test_after_a_death_the_keeper_waits_until_a_full_cgroup_has_room(tmp_path, monkeypatch):
    used = tmp_path / "memory.current"
    used.write_text("990\n")
    watch = _watch_of(tmp_path, monkeypatch)
    thread = threading.Thread(target=watch.wait_for_room)
    monkeypatch.setattr("holdfast._keeper.memory_alarm._FREED_SECONDS", 20.0)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    used.write_text("100\n")
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("used", [100, 990])
def test_it_waits_for_no_room_that_is_there_and_for_none_that_does_not_come(
    used, tmp_path, monkeypatch
):
    (tmp_path / "memory.current").write_text(f"{used}\n")
    watch = _watch_of(tmp_path, monkeypatch)
    naps = []
    monkeypatch.setattr("holdfast._keeper.memory_alarm._FREED_SECONDS", 0.1)
    monkeypatch.setattr("holdfast._keeper.memory_alarm.time.sleep", naps.append)
    watch.wait_for_room()
    assert bool(naps) == (used == 990)
