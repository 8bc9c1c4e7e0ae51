"""The series of real trainings: every step is in it, however the training ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast._store.folder import series
from holdfast._store.folder.layout import RunLayout
from holdfast._store.memory.control import STEP
from tests.control_words import SharedWords
from tests.crash.small_disk import SmallDisk, mount_small_disk
from tests.support import journal_events, keepers, wait_for_keeper_gone, wait_until

# Each step takes a little, and every tenth is followed by a phase.
TRAIN = """
with holdfast.Run(folder, w=(w := make_weights())) as run:
    print("ready", run.step)
    for step in run.steps(int(sys.argv[2])):
        train_one(w)
        time.sleep(0.002)
        odd = float("nan") if step % 2 else step
        run.log(loss=1.0 / (step + 1), **{"</script> \\u2028": odd})
        if step % 10 == 9:
            with run.phase("validate"):
                time.sleep(0.01)
"""
LONG = 10**6


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    yield from mount_small_disk(tmp_path / "disk", "3m")


def rows_of(folder: Path, attempt: int = 1) -> list[series.Row]:
    return list(series.read(RunLayout(folder).series(attempt)))


def has_rows(folder: Path, attempt: int = 1, *, count: int = 3) -> bool:
    """Whether there are so many rows, and metrics in one of them."""
    rows = rows_of(folder, attempt)
    return len(rows) >= count and any("m" in row for row in rows)


def made(rows: list[series.Row]) -> int:
    return sum(row["n"] for row in rows)


def test_all_that_a_whole_training_does_is_in_its_series(script, folder):
    trainer = script(folder, TRAIN, 150)
    assert trainer.wait() == 0, trainer.output
    rows = rows_of(folder)
    assert (rows[-1]["s"], made(rows)) == (150, 150)
    assert rows[-1]["disk_step"] == 150
    histogram: dict[int, int] = {}
    for row in rows:
        series.add_buckets(histogram, row.get("h", []))
    assert sum(histogram.values()) == 150
    # Phases are none of it: a step with one would have taken 10 ms more.
    assert 0.002 <= (series.quantile(histogram, 0.5) or 0.0) < 0.012
    assert sum(row.get("phases", {}).get("validate", 0.0) for row in rows) >= 0.14
    assert sum(row.get("snaps", 0) for row in rows) >= 1
    assert sum(row.get("save", 0.0) for row in rows) > 0.0
    assert any(row.get("mem", {}).get("rss", 0) > 1e6 for row in rows)
    # Of each metric: last, low, high, how many, how many not finite, and the step.
    folds = [fold for row in rows for fold in row.get("m", {}).items()]
    loss = [fold for name, fold in folds if name == "loss"]
    assert sum(count for _, _, _, count, _, _ in loss) == 150
    assert (loss[-1][0], loss[-1][5]) == (pytest.approx(1 / 150), 149)
    odd = [fold for name, fold in folds if name == "</script> \u2028"]
    assert sum(bad for _, _, _, _, bad, _ in odd) == 75
    assert max(high or 0.0 for _, _, high, _, _, _ in odd) == 148


def test_a_kill_loses_no_step_of_it_and_the_next_life_has_its_own(script, folder):
    trainer = script(folder, TRAIN, LONG)
    wait_until(lambda: has_rows(folder), what="rows")
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    (death,) = journal_events(folder, "death")
    rows = rows_of(folder)
    assert rows[-1]["s"] == made(rows) == death["step"]
    trainer = script(folder, TRAIN, LONG)
    resumed = trainer.ready()
    wait_until(lambda: has_rows(folder, 2), what="rows of the next life")
    trainer.send(signal.SIGTERM)
    trainer.wait()
    wait_for_keeper_gone(folder)
    rows, (stop,) = rows_of(folder, 2), journal_events(folder, "stop")
    assert rows[-1]["s"] == resumed + made(rows) == stop["step"]
    assert stop["attempt"] == 2
    # The end of it was sent before it left, which may have been in a step that is made again.
    assert rows[-1]["m"]["loss"][5] in (stop["step"] - 1, stop["step"])
    assert "SIGTERM" in stop["reason"]
    # A keeper that gets no turn may look at the signal when the loop is over, and then notes none.
    assert {event["attempt"] for event in journal_events(folder, "signal")} <= {2}
    start = journal_events(folder, "start")[1]
    assert start["host"]
    assert start["settings"]["keep_last"] == 3


@pytest.mark.nightly
def test_another_keeper_goes_on_with_it(script, folder):
    trainer = script(folder, TRAIN, LONG)
    wait_until(lambda: has_rows(folder), what="rows")
    (keeper,) = keepers(folder)
    keeper.kill()
    trainer.wait_for("started another")
    before = len(rows_of(folder))
    wait_until(lambda: has_rows(folder, count=before + 2), what="rows of the other keeper")
    trainer.send(signal.SIGTERM)
    trainer.wait()
    wait_for_keeper_gone(folder)
    rows = rows_of(folder)
    assert rows[-1]["s"] == made(rows) == journal_events(folder, "stop")[0]["step"]


@pytest.mark.nightly  # tests/crash/test_full_disk.py: a full disk costs no step
def test_a_full_disk_costs_rows_and_no_steps(script, disk):
    folder = disk.place / "run"
    trainer = script(folder, TRAIN, LONG)
    wait_until(lambda: has_rows(folder), what="rows")
    disk.fill()
    words = SharedWords(trainer.pid).words
    seen = words[STEP]
    # So many steps take longer than a row does.
    wait_until(lambda: words[STEP] > seen + 700, what="steps while the disk is full")
    disk.make_room()
    before = len(rows_of(folder))
    wait_until(lambda: has_rows(folder, count=before + 2), what="rows after that")
    trainer.send(signal.SIGTERM)
    trainer.wait()
    wait_for_keeper_gone(folder)
    rows = rows_of(folder)
    assert rows[-1]["s"] == made(rows)
    assert "Traceback" not in RunLayout(folder).keeper_log(1).read_text()


def test_listeners_hear_what_is_logged_as_it_is_held(script, folder):
    body = """
    heard = []
    with holdfast.Run(folder, w=(w := make_weights())) as run:
        from holdfast._run.driver import session_of
        session_of(run).log._listeners.append(lambda step, metrics: heard.append((step, metrics)))
        for step in run.steps(3):
            run.log(loss=w[:1])
            w += 1.0
    print("heard", heard)
    """
    trainer = script(folder, body)
    assert trainer.wait() == 0, trainer.output
    heard = [(0, {"loss": 0.0}), (1, {"loss": 1.0}), (2, {"loss": 2.0})]
    assert f"heard {heard}" in trainer.output
