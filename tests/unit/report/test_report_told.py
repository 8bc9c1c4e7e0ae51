"""What a report says is what happened: cases in which it once said something else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from holdfast._report import html, openmetrics
from holdfast._report.model import RunModel
from holdfast._report.status.parts import Stuck, describe_stuck, tell_duration
from holdfast._report.view import View
from tests.unit.report_folder import BEGIN, Book, killed_and_resumed


def view_of(folder: Path) -> View:
    model = RunModel(folder)
    model.update()
    return model.view()


def evaluated(book: Book, number: int, at: float, step: int) -> None:
    """A row with what an evaluation after the last step has logged."""
    book.row(number, at, step, 0, m={"val_loss": [0.5, 0.5, 0.5, 1, 0, step]})


def test_the_evaluation_after_the_last_step_of_a_finished_run_is_not_lost(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 10)
    evaluated(book, 1, 13, 10)
    book.checkpoint(1, 13, 10)
    book.note(13, "finished", step=10, total=10, attempt=1)
    book.end(1, 14, status=0, how="closed", step=10, durable_step=10)
    found = {metric["name"]: metric for metric in view_of(folder)["metrics"]}
    assert found["val_loss"]["step"] == [10]
    assert found["val_loss"]["lost"]["step"] == []


def test_the_value_that_a_rule_has_stopped_a_run_for_is_marked(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 10)
    book.row(1, 13, 11, m={"loss": [None, None, None, 1, 1, 10]})
    book.note(13, "rule", attempt=1, step=11, void_from=11, outcome="failure", reason="loss is nan")
    how = "NotFinite: loss is nan (step 11)"
    book.end(1, 14, status=65, how=how, step=11, durable_step=10)
    found = view_of(folder)
    assert found["metrics"][0]["bad"] == [10]
    assert found["attempts"][0]["outcome"] == "bad"
    assert found["attempts"][0]["how"] == f"A rule called the training bad: {how}."
    assert how in found["run"]["headline"]


def test_work_of_which_nothing_is_safe_is_no_progress(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 10)
    book.end(1, 12, "death", status=None, how="was killed by SIGKILL", step=10, durable_step=None)
    found = view_of(folder)["goodput"]
    assert found["progress_seconds"] == pytest.approx(0.0, abs=1e-3)
    assert "work to be made again" in found["sentence"]


def test_what_is_done_between_opening_and_the_first_loop_is_starting(folder):
    book = Book(folder)
    book.begin(1, 0)  # opened after 2 s, and
    book.note(7, "loop", attempt=1, step=0, total=10)
    journal = book.layout.journal
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text(lines[0] + lines[2])  # in its loop after 7 s
    book.rows(1, 7, 0, 10)
    book.end(1, 17, status=0, how="closed", step=10, durable_step=10)
    parts = {part["kind"]: part["seconds"] for part in view_of(folder)["goodput"]["parts"]}
    assert parts["starting"] == pytest.approx(7)
    assert parts["progress"] == pytest.approx(10)


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), float("nan"), float("inf"), [1], {"a": 1}, "x", True],
    ids=["huge", "-huge", "nan", "inf", "list", "dict", "text", "bool"],
)
@pytest.mark.parametrize(
    "name", ["exit.json", "heartbeat.json", "lease.json", "origin.json", "journal", "series"]
)
def test_no_value_of_any_record_breaks_it(folder, name, value):
    killed_and_resumed(folder)
    attempt = folder / "attempts/0002"
    if name in ("journal", "series"):
        path = folder / "journal.jsonl" if name == "journal" else attempt / "series.jsonl"
        last = json.loads(path.read_text().splitlines()[-1])
        lines = [json.dumps({**last, key: value}) for key in last]
        lines.append(json.dumps({**last, "h": [[5, value], [value, 1]]}))
        path.write_text(path.read_text() + "\n".join(lines) + "\n")
    elif name == "origin.json":
        (attempt / name).write_text(json.dumps({"attempt": value, "step": value}))
    elif name == "lease.json":
        lease = json.loads((attempt / name).read_text())
        lease = {"since": value, "process": {**lease["process"], "host": value, "pid": value}}
        (attempt / name).write_text(json.dumps(lease))
    else:
        keys = ("time", "step", "status", "how", "durable_step", "boundary_age_seconds")
        keys += ("memory_step", "memory_time", "epoch", "slots", "step_seconds")
        record = {**dict.fromkeys(keys, value), "slurm": {"job": "7", "end": value}}
        record["ranks"] = [dict.fromkeys(("host", "pid", "step", "heard_seconds"), value)]
        (attempt / name).write_text(json.dumps(record))
    model = RunModel(folder, look=lambda layout, number: name == "heartbeat.json")
    model.update()
    text = html.to_json(model.view())
    assert len(max(text.replace(",", " ").split(), key=len)) < 300  # no number of 400 digits
    openmetrics.render([model.summary()])


@pytest.mark.skipif(os.name == "nt", reason="links there need rights that few have")
def test_a_link_puts_no_foreign_file_into_a_report(folder, tmp_path):
    killed_and_resumed(folder)
    secret = tmp_path / "id_rsa"
    secret.write_text("TOP SECRET")
    for name in ("stacks.txt", "hang.txt"):
        (folder / "attempts/0001" / name).symlink_to(secret)
    (folder / "attempts/0001/hang.json").write_text('{"began": 1.0, "sentence": "it stands"}')
    found = view_of(folder)
    assert found["deaths"]
    assert "TOP SECRET" not in html.render(found)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
@pytest.mark.parametrize("name", ["journal.jsonl", "attempts/0001/series.jsonl"])
def test_a_fifo_holds_no_report_up(folder, name):
    killed_and_resumed(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert len(view_of(folder)["attempts"]) == 2


def test_one_that_stands_still_does_so_until_now(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 10)
    book.note(20, "hang", attempt=1, step=10, stood=8.0, sentence="it waits for a lock")
    record = {"began": BEGIN + 12, "found": BEGIN + 20, "sentence": "it waits for a lock"}
    (folder / "attempts/0001/hang.json").write_text(json.dumps(record))
    stuck = {"hang": {"since": BEGIN + 12, "sentence": "it waits"}, "time": BEGIN + 20, "step": 10}
    (folder / "attempts/0001/heartbeat.json").write_text(json.dumps(stuck))
    model = RunModel(folder, look=lambda layout, number: True)
    model.update()
    found = model.view()
    assert found["run"]["state"] == "stuck"
    assert found["attempts"][0]["how"] == "It stands still."
    (hang,) = found["hangs"]
    assert hang["seconds"] == pytest.approx(found["made_at"] - BEGIN - 12)


def test_ranks_of_a_finished_run_are_where_it_ended(folder):
    killed_and_resumed(folder)
    beat = {"time": BEGIN + 321, "step": 198, "ranks": [{"step": 198}, {"step": 199}]}
    (folder / "attempts/0002/heartbeat.json").write_text(json.dumps(beat))
    assert [rank["step"] for rank in view_of(folder)["ranks"]] == [200, 200]


@pytest.mark.parametrize(
    "sentence",
    [
        "No step for 28 s: it waits for a lock.",
        "No step for 1.5 h: it waits for a lock.",
        "No step for 2.3 days: it waits for a lock.",
        "it waits for a lock.",
    ],
)
def test_a_hang_is_told_with_the_time_that_it_has_lasted_until_now(sentence):
    found = Stuck(since=time.time() - 15 * 60, cause="hang-lock", sentence=sentence)
    told = describe_stuck(found, Path("runs/a"))
    assert told.startswith("No step for 15 min: it waits for a lock. More: holdfast why ")


def test_a_command_without_steps_is_told_by_its_output():
    said = "No output and no work for 28 s: it sleeps."
    assert tell_duration(said, 900) == "No output and no work for 15 min: it sleeps."


def test_a_post_mortem_has_one_duration_of_its_hang(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 10)
    book.note(40, "hang", attempt=1, step=10, stood=28.0, sentence="No step for 28 s: it waits.")
    record = {"began": BEGIN + 12, "found": BEGIN + 40, "sentence": "No step for 28 s: it waits."}
    book.layout.hang(1).write_text(json.dumps({**record, "cause": "hang-lock", "looks": []}))
    book.end(1, 912, status=77, how="no step", step=10, durable_step=10)
    (hang,) = view_of(folder)["hangs"]
    assert hang["seconds"] == pytest.approx(900)
    assert hang["sentence"] == "No step for 15 min: it waits."
