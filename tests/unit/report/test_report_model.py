"""A run folder becomes a view, whatever is missing, and however it was read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from holdfast._errors import NotARun
from holdfast._report import view as shape
from holdfast._report.html import to_json
from holdfast._report.model import RunModel
from holdfast._report.series import read_gpus
from tests.unit.report_folder import BEGIN, Book, killed_and_resumed


def view_of(folder: Path, **options: Any) -> dict[str, Any]:
    model = RunModel(folder, **options)
    model.update()
    found = model.view()
    assert set(found) - {"reading"} == set(shape.View.__annotations__) - {"reading"}
    return json.loads(to_json(found))


def parts(view: dict[str, Any]) -> dict[str, float]:
    return {part["kind"]: part["seconds"] for part in view["goodput"]["parts"]}


def test_a_run_that_was_killed_and_resumed(folder):
    killed_and_resumed(folder)
    view = view_of(folder)
    assert [(each["number"], each["outcome"]) for each in view["attempts"]] == [
        (1, "killed"),
        (2, "finished"),
    ]
    assert view["attempts"][1]["origin"] == {"attempt": 1, "step": 80, "source": "disk"}
    assert view["run"]["state"] == "finished"
    assert view["time"] == {"start": BEGIN, "end": BEGIN + 323}
    assert parts(view) == pytest.approx(
        {"progress": 80 + 120, "lost": 21, "starting": 4, "leaving": 1, "down": 97}
    )
    assert view["goodput"]["share"] == pytest.approx(200 / 323)
    (death,) = view["deaths"]
    assert death["attempt"] == 1
    assert death["sentence"]
    assert death["evidence"]
    assert death["advice"]


def test_values_of_steps_that_were_made_again_are_kept_apart(folder):
    killed_and_resumed(folder)
    (metric,) = view_of(folder)["metrics"]
    assert metric["name"] == "loss"
    assert metric["step"] == [*range(80), *range(80, 200)]
    assert metric["attempt"] == [1] * 80 + [2] * 120
    assert metric["lost"]["step"] == list(range(80, 100))
    assert len(metric["lost"]["value"]) == 20
    assert metric["value"][79:81] == pytest.approx([20.1, 19.2])


def test_step_times_have_their_percentiles(folder):
    killed_and_resumed(folder)
    times = view_of(folder)["step_time"]
    assert times["percentiles"]["count"] == 220
    assert times["percentiles"]["p50"] == pytest.approx(1.0, rel=0.06)
    assert [each["number"] for each in times["attempts"]] == [1, 2]
    assert times["p50"].count(None) == 1  # the gap between the two


def test_a_run_without_series_is_told_from_its_journal(folder):
    book = killed_and_resumed(folder)
    for number in (1, 2):
        book.layout.series(number).unlink()
    view = view_of(folder)
    assert view["metrics"] == []
    assert view["step_time"]["percentiles"] is None
    # Between what the journal notes, steps are taken to be even.
    assert parts(view)["lost"] == pytest.approx(21, abs=1)
    assert view["goodput"]["share"] == pytest.approx(200 / 323, abs=0.01)


def test_reading_in_pieces_gives_what_reading_at_once_gives(folder, tmp_path):
    killed_and_resumed(folder)
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "journal.jsonl").write_text("")
    rows = {path: path.read_text() for path in copy.glob("attempts/*/series.jsonl")}
    for path in rows:
        path.write_text("")
    model = RunModel(copy)
    for at, line in enumerate(lines):
        with (copy / "journal.jsonl").open("a") as file:
            file.write(line)
        for path, text in rows.items():  # one attempt after the other
            share = 2 * (at + 1) / len(lines) - (path.parent.name == "0002")
            size = int(len(text) * min(1.0, max(0.0, share)))
            path.write_text(text[:size])  # which may end within a line
        model.update()
        model.view()
    piece, whole = model.view(), view_of(folder)
    for key in ("segments", "attempts", "goodput", "metrics", "step_time", "events"):
        assert json.loads(to_json(piece[key])) == whole[key], key


def test_nothing_new_is_said_to_be_nothing_new(folder):
    book = killed_and_resumed(folder)
    model = RunModel(folder)
    assert model.update()
    assert not model.update()
    book.note(400, "request", kind="save", attempt=2)
    assert model.update()
    assert not model.update()


def test_the_age_of_what_a_mirror_holds_is_no_change(folder):
    book = killed_and_resumed(folder)
    mirror = {"address": "mirror", "checkpoints": [{"step": 5}], "newest_saved_at": 1e9 + 0.5}
    (book.folder / "mirror.json").write_text(json.dumps(mirror))
    model = RunModel(folder)
    assert model.update()
    assert model.summary().safe.mirror.age_seconds > 0
    assert not model.update()


def test_a_long_journal_can_be_left_in_the_middle(folder, monkeypatch):
    monkeypatch.setattr("holdfast._report.json_lines._PIECE_BYTES", 300)
    killed_and_resumed(folder)
    model = RunModel(folder)
    model.update(seconds=0)
    assert 0 < model.reading < 1
    assert model.view()["reading"] == model.reading
    for _ in range(100):  # each goes on by a piece, or by an attempt
        model.update(seconds=0)
    assert model.reading == 1
    assert "reading" not in model.view()
    assert [each["outcome"] for each in model.view()["attempts"]] == ["killed", "finished"]


def test_a_folder_that_was_replaced_starts_over(folder, tmp_path):
    killed_and_resumed(folder)
    model = RunModel(folder)
    model.update()
    model.view()
    other = Book(tmp_path / "other")
    other.begin(1, 0)
    other.rows(1, 2, 0, 10)
    shutil.rmtree(folder)
    shutil.copytree(other.folder, folder)
    assert model.update()
    assert [each["number"] for each in model.view()["attempts"]] == [1]
    # It has died, and nothing of it is safe.
    assert model.view()["metrics"][0]["lost"]["step"] == list(range(10))


@pytest.mark.parametrize(
    ("status", "how", "outcome"),
    [
        (0, "closed", "closed"),
        (130, "Ctrl-C", "stopped"),
        (75, "SIGUSR2", "interrupted"),
        (65, "the loss is NaN", "bad"),
        (74, "the disk is full", "failed"),
        (1, "ValueError: x", "failed"),
        (77, "no step", "hung"),
        (None, "was killed by SIGKILL", "killed"),
        (None, "was killed by SIGSEGV", "crashed"),
    ],
)
def test_how_an_attempt_ended(folder, status, how, outcome):
    book = Book(folder)
    book.begin(1, 0)
    book.end(1, 50, "exit" if status is not None else "death", status=status, how=how, step=9)
    (attempt,) = view_of(folder)["attempts"]
    assert attempt["outcome"] == outcome
    assert attempt["outcome"] in get_args(shape.Outcome)
    assert attempt["how"]


def test_an_attempt_of_which_nothing_was_heard_again_is_lost(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 10)
    book.begin(2, 100)
    book.end(2, 150, status=130, how="stop", step=9, durable_step=9)
    view = view_of(folder)
    assert view["attempts"][0]["outcome"] == "lost"
    assert view["attempts"][0]["end"] == BEGIN + 12


def test_a_rank_that_died_is_a_death_though_the_job_was_to_come_back(folder):
    book = Book(folder)
    book.begin(1, 0, ranks=4)
    book.note(40, "rank-died", rank=3, how="was killed by SIGKILL", host="n2", step=20, attempt=1)
    book.end(1, 50, status=75, how="rank 3 on n2 was killed by SIGKILL", step=20, durable_step=20)
    view = view_of(folder)
    assert view["attempts"][0]["outcome"] == "killed"
    assert view["run"]["ranks"] == 4
    assert [death["attempt"] for death in view["deaths"]] == [1]


@pytest.mark.parametrize("status", [143, 130, 129])
def test_ranks_that_were_ended_after_a_death_were_not_stopped(folder, status):
    book = Book(folder)
    book.begin(1, 0, ranks=4)
    book.note(40, "rank-died", rank=3, how="was killed by SIGKILL", host="n2", step=20, attempt=1)
    book.end(1, 50, status=status, how="SIGTERM", step=20, durable_step=20)
    view = view_of(folder)
    assert view["run"]["state"] == "died"
    assert view["attempts"][0]["outcome"] == "killed"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGQUIT", "SIGHUP", "SIGINT"])
def test_a_death_by_a_signal_that_nothing_answered_is_no_stop(folder, name):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 10)
    book.end(1, 13, "death", status=None, how=f"was killed by {name}", step=10, durable_step=10)
    view = view_of(folder)
    assert view["run"]["state"] == "died"
    assert view["attempts"][0]["outcome"] == "killed"


def test_a_death_after_a_request_to_stop_is_no_stop(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 10)
    book.note(12, "signal", attempt=1, name="SIGINT")
    book.end(1, 13, "death", status=None, how="was killed by SIGKILL", step=10, durable_step=10)
    assert view_of(folder)["attempts"][0]["outcome"] == "killed"


_NIGHT = 9 * 3600.0


def _stopped_for_a_night(folder, status, how="Ctrl-C", **start):
    book = Book(folder)
    book.begin(1, 0, **start)
    book.rows(1, 2, 0, 100)
    book.end(1, 102, status=status, how=how, step=100, durable_step=100)
    book.begin(2, _NIGHT, 100, origin=1, **start)
    book.rows(2, _NIGHT + 2, 100, 200)
    book.end(2, _NIGHT + 102, status=0, how="closed", step=200, durable_step=200)
    return view_of(folder)["goodput"]


@pytest.mark.parametrize("status", [130, 143, 0])
def test_a_night_for_which_the_user_had_stopped_the_run_is_not_lost(folder, status):
    goodput = _stopped_for_a_night(folder, status)
    assert goodput["share"] == pytest.approx(200 / 204)
    assert goodput["stopped_seconds"] == pytest.approx(_NIGHT - 102)
    assert "down" not in goodput["sentence"]
    assert sum(part["seconds"] for part in goodput["parts"]) == pytest.approx(
        goodput["wall_seconds"]
    )


@pytest.mark.parametrize(("status", "how"), [(129, "SIGHUP"), (1, "ValueError"), (75, "SIGUSR2")])
def test_a_night_after_any_other_end_is_lost(folder, status, how):
    goodput = _stopped_for_a_night(folder, status, how)
    assert goodput["share"] < 0.01
    assert goodput["stopped_seconds"] == 0


def test_a_job_that_slurm_ended_was_not_stopped_by_its_user(folder):
    goodput = _stopped_for_a_night(folder, 143, "SIGTERM", job="7")
    assert goodput["stopped_seconds"] == 0


def test_a_hang_and_a_pause_have_their_time(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 10)
    book.note(60, "hang", attempt=1, step=10, stood=40.0, sentence="it waits", cause="hang-lock")
    book.note(70, "hang-over", attempt=1, step=11, seconds=50.0)
    book.note(80, "paused", attempt=1, step=12, by="gdb (pid 7)")
    book.note(95, "resumed", attempt=1, step=12, by="gdb (pid 7)")
    book.end(1, 120, status=130, how="stop", step=30, durable_step=30)
    found = parts(view_of(folder))
    assert found["stuck"] == pytest.approx(50)
    assert found["paused"] == pytest.approx(15)


def test_what_a_rule_called_bad_is_lost_before_it_was_made_again(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 100)
    book.note(102, "rule", attempt=1, step=100, void_from=61, reason="NaN", outcome="bad")
    book.end(1, 102, status=65, how="NaN", step=100, durable_step=60)
    assert parts(view_of(folder))["lost"] == pytest.approx(40, abs=1.1)


def test_a_new_folder_has_a_view_too(folder):
    Book(folder)
    view = view_of(folder)
    assert (view["run"]["state"], view["attempts"], view["segments"]) == ("new", [], [])
    assert view["goodput"]["sentence"] == "no time has passed yet"


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(NotARun):
        RunModel(tmp_path)


def test_a_live_run_is_told_up_to_now(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 50)
    view = view_of(folder, look=lambda layout, attempt: True)
    assert view["attempts"][0]["outcome"] == "running"
    assert view["attempts"][0]["end"] is None
    assert view["run"]["is_live"]
    assert view["time"]["end"] == pytest.approx(view["made_at"])
    assert view["segments"][-1]["kind"] == "training"


def test_odd_values_in_the_files_do_no_harm(folder):
    book = killed_and_resumed(folder)
    odd: list[Any] = [None, "x", -1, 1e400, True, [], {}, [[]], {"a": {}}]
    for value in odd:
        for kind in ("start", "exit", "hang", "paused", "checkpoint", "signal", "memory", "rule"):
            fields = ("attempt", "step", "how", "status", "stood", "reason", "size_bytes", "rank")
            book.note(500, kind, **dict.fromkeys(fields, value))
        book.note(501, "straggler", attempt=2, rank=value, host=value, seconds=value)
        with book.layout.series(2).open("a") as file:
            keys = ("h", "m", "mem", "waits", "phases", "rest", "save", "snaps", "phase", "epoch")
            row = {"t": BEGIN + 323, "s": 200, "n": 0, **dict.fromkeys(keys, value)}
            file.write(json.dumps(row) + "\n")
            file.write(json.dumps({"t": value, "s": value, "n": value}) + "\n")
            nested = {"loss": value, "b": [value] * 6, "c": [value, 1]}
            file.write(json.dumps({"t": BEGIN + 323, "s": 200, "n": 0, "m": nested}) + "\n")
            file.write(
                json.dumps({"t": BEGIN + 323, "s": 200, "n": 0, "mem": {"limit": value}}) + "\n"
            )
    view = view_of(folder)
    assert len(view["attempts"]) >= 2


def test_events_are_in_order_and_have_words(folder):
    book = killed_and_resumed(folder)
    book.note(250, "something-new", attempt=2, why="because", step=3)
    events = view_of(folder)["events"]
    assert [each["t"] for each in events] == sorted(each["t"] for each in events)
    kinds = {each["kind"] for each in events}
    assert {"start", "resume", "death", "finished", "exit", "checkpoint", "something-new"} <= kinds
    for each in events:
        assert each["title"]
        assert each["level"] in ("info", "good", "warn", "bad")


def test_memory_is_told_against_its_limit(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.row(1, 5, 1, mem={"rss": 10, "cgroup": 50, "limit": 100, "total": 900, "available": 1})
    book.row(
        1,
        6,
        2,
        mem={"rss": 10, "cgroup": 60, "limit": 100, "gpu": [[0, 7, 80, 5], [1, 9, 80, None]]},
    )
    memory = view_of(folder)["memory"]
    assert (memory["used"], memory["limit"], memory["gpu"]) == ([50, 60], [100, 100], [None, 14])
    assert memory["limit_name"] == "the limit of its cgroup"


def test_ranks_have_their_waits(folder):
    book = Book(folder)
    book.begin(1, 0, ranks=2)
    book.row(1, 5, 1, h=[[100, 5]], waits={"0": 0.2, "1": 0.0})
    beat = {"time": BEGIN + 5, "ranks": [{"host": "n1", "step": 1}, {"host": "n2", "step": 1}]}
    book.layout.heartbeat(1).write_text(json.dumps(beat))
    found = view_of(folder)["ranks"]
    assert [(each["rank"], each["host"], each["wait_seconds"]) for each in found] == [
        (0, "n1", 0.2),
        (1, "n2", 0.0),
    ]


def test_time_without_a_step_is_no_progress(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.row(1, 30, 0, n=0)
    book.end(1, 60, "death", status=None, how="was killed by SIGKILL", step=0)
    view = view_of(folder)
    assert view["goodput"]["progress_seconds"] == 0
    assert [each["kind"] for each in view["segments"]] == ["starting"]


def test_checkpoints_tell_how_far_it_was_where_there_is_no_series(folder):
    """Slow at first, then fast: by start and end alone the lost time would be wrong."""
    book = Book(folder)
    book.begin(1, 0)
    book.checkpoint(1, 102, 10)
    book.end(1, 112, "death", status=None, how="was killed by SIGKILL", step=100, durable_step=10)
    book.begin(2, 200, 10, origin=1)
    book.end(2, 300, status=130, how="stop", step=50, durable_step=50)
    assert parts(view_of(folder))["lost"] == pytest.approx(10, abs=0.5)


def test_work_that_nobody_has_made_again_is_said_to_be_so(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 100)
    book.end(1, 102, "death", status=None, how="was killed by SIGKILL", step=100, durable_step=50)
    (lost,) = [each for each in view_of(folder)["goodput"]["parts"] if each["kind"] == "lost"]
    assert lost["label"] == "work to be made again"
    assert lost["seconds"] == pytest.approx(50, abs=0.5)


def test_one_that_fell_silent_has_a_mark_at_its_end(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 10)
    marks = [each for each in view_of(folder)["events"] if each["kind"] == "death"]
    assert [(each["t"], each["step"]) for each in marks] == [(BEGIN + 12, 10)]


def test_memory_of_the_run_is_told_beside_that_of_the_machine(folder):
    book = Book(folder)
    book.begin(1, 0)
    sample = {"rss": 10, "workers": 5, "total": 100, "available": 30}
    book.row(1, 3, 1, mem=sample)
    memory = view_of(folder)["memory"]
    assert (memory["run"], memory["used"], memory["limit"]) == ([15], [70], [100])


def test_gpus_of_the_run_have_their_load_memory_power_and_temperature(folder):
    book = Book(folder)
    book.begin(1, 0)
    busy = [[0, 70, 80, 50, 90, 300, 60], [1, 70, 80, 40, 70, 250, 71], [2, 9, 80, None, 5, 60, 30]]
    book.row(1, 3, 1, mem={"rss": 10, "gpu": busy})
    gpus = view_of(folder)["gpus"]
    # The third one belongs to another user.
    assert (gpus["busy"], gpus["used"], gpus["total"]) == ([80.0], [90.0], 160.0)
    assert (gpus["watts"], gpus["celsius"]) == ([550.0], [71.0])


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        (None, None),
        (61, None),
        ([], None),
        ([[0, 1]], None),
        ([[0, 7, 80, 5]], (None, 5.0, 80.0, None, None)),  # of an earlier version
        ([[0, 7, 80, None]], (None, 7.0, 80.0, None, None)),  # a container shows no processes
        ([[0, 7, 80, None, "x", None, float("nan")], "y"], (None, 7.0, 80.0, None, None)),
    ],
)
def test_a_sample_of_gpus_may_say_little(sample, told):
    assert read_gpus(sample) == told
