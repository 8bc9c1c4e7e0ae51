"""Which checkpoints stay: the last, the best, and all that is not ours to judge."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._store.commit.retention import Kept, choose_kept, list_checkpoints, remove_others
from holdfast._store.commit.write import begin_checkpoint
from holdfast._store.folder.layout import MANIFEST, RunLayout
from holdfast._store.folder.lineage import is_on_line
from holdfast._store.format.manifest import Manifest

LOSSES = st.one_of(st.none(), st.floats(-10, 10), st.just(3.0))


@st.composite
def folders(draw):
    """Checkpoints as `list_checkpoints` gives them, and a line through them."""
    ids = draw(st.sets(st.tuples(st.integers(1, 4), st.integers(0, 20)), max_size=15))
    found = [
        Kept(
            step,
            attempt,
            Path(f"step-{step}-a{attempt}"),
            {"loss": draw(LOSSES)} if draw(st.booleans()) else {},
        )
        for attempt, step in sorted(ids)
    ]
    line = draw(
        st.dictionaries(st.integers(1, 4), st.one_of(st.none(), st.integers(0, 20)), max_size=4)
    )
    return found, line


modes = st.sampled_from([None, ("min", "loss"), ("max", "loss"), ("min", "absent")])


@given(folders(), st.integers(1, 6), modes)
def test_the_newest_on_the_line_are_never_removed(folder, keep_last, best):
    found, line = folder
    kept = choose_kept(found, line, keep_last, best)
    own = [c for c in found if is_on_line(line, c.attempt, c.step)]
    newest_first = sorted(own, key=lambda c: (-c.attempt, -c.step))
    assert all(c.path in kept for c in newest_first[:keep_last])


@given(folders(), st.integers(1, 6), modes)
def test_what_is_off_the_line_is_never_removed(folder, keep_last, best):
    found, line = folder
    kept = choose_kept(found, line, keep_last, best)
    for checkpoint in found:
        if not is_on_line(line, checkpoint.attempt, checkpoint.step):
            assert kept[checkpoint.path] == "of another line"


@given(folders(), st.integers(1, 6), st.sampled_from(["min", "max"]))
def test_the_best_on_the_line_is_never_removed(folder, keep_last, mode):
    found, line = folder
    kept = choose_kept(found, line, keep_last, (mode, "loss"))
    rated = [
        c
        for c in found
        if is_on_line(line, c.attempt, c.step) and c.metrics.get("loss") is not None
    ]
    if rated:
        best = (min if mode == "min" else max)(c.metrics["loss"] for c in rated)
        chosen = [c for c in rated if f"best {mode}:loss" in kept.get(c.path, "")]
        assert [c.metrics["loss"] for c in chosen] == [best]
        # Of several that are as good, the first: the others only carry its value along.
        assert chosen[0] == next(c for c in rated if c.metrics["loss"] == best)


@given(folders(), st.integers(1, 6), modes)
def test_nothing_more_than_that_is_kept(folder, keep_last, best):
    found, line = folder
    kept = choose_kept(found, line, keep_last, best)
    own = [c for c in found if is_on_line(line, c.attempt, c.step)]
    assert sum(c.path in kept for c in own) <= keep_last + (best is not None)


def plant(layout, step, attempt, **metrics):
    folder = layout.checkpoint(step, attempt)
    folder.mkdir(parents=True)
    written = Manifest("r", attempt, step, "test", 0.0, (), metrics)
    (folder / MANIFEST).write_bytes(written.to_bytes())
    (folder / "rank-00000.safetensors").write_bytes(b"x")
    return folder


@pytest.fixture
def layout(tmp_path):
    return RunLayout(tmp_path)


def test_removal_takes_the_rest_from_the_disk_and_only_that(layout):
    for step, loss in ((10, 0.5), (20, 0.1), (30, 0.4), (40, 0.3), (50, 0.2)):
        plant(layout, step, 1, loss=loss)
    stranger = plant(layout, 60, 2)
    gone = remove_others(layout, {1: None}, 2, ("min", "loss"))
    assert sorted(path.name.split("-")[1] for path in gone) == ["000000000010", "000000000030"]
    left = [(step, attempt) for step, attempt, _ in layout.checkpoint_folders()]
    assert left == [(20, 1), (40, 1), (50, 1), (60, 2)]
    assert stranger.is_dir()
    assert {p.name for p in layout.checkpoints.iterdir()} == {
        layout.checkpoint(s, a).name for s, a in left
    }


def test_a_removal_that_was_cut_short_is_finished(layout):
    plant(layout, 10, 1)
    half = layout.checkpoint(5, 1).with_name(".removing-" + layout.checkpoint(5, 1).name)
    half.mkdir()
    (half / MANIFEST).write_bytes(b"{}")
    remove_others(layout, {1: None}, 3, None)
    assert [p.name for p in layout.checkpoints.iterdir()] == [layout.checkpoint(10, 1).name]


def test_a_damaged_manifest_counts_as_unrated_and_stops_nothing(layout):
    folder = plant(layout, 10, 1, loss=-5.0)
    (folder / MANIFEST).write_bytes(b"\x00garbage")
    plant(layout, 20, 1, loss=0.5)
    plant(layout, 30, 1, loss=0.9)
    assert next(dict(c.metrics) for c in list_checkpoints(layout)) == {}
    remove_others(layout, {1: None}, 1, ("min", "loss"))
    assert [step for step, _, _ in layout.checkpoint_folders()] == [20, 30]


def test_a_checkpoint_that_cannot_be_removed_does_not_stop_the_training(layout, monkeypatch):
    for step in (10, 20, 30):
        plant(layout, step, 1)

    def refuse(self, target):
        raise PermissionError("planted")

    monkeypatch.setattr(Path, "rename", refuse)
    remove_others(layout, {1: None}, 1, None)
    assert [step for step, _, _ in layout.checkpoint_folders()] == [10, 20, 30]


def test_what_a_killed_keeper_has_begun_goes_with_the_next_checkpoint(tmp_path):
    layout = RunLayout(tmp_path)
    layout.checkpoints.mkdir()
    final, killed = layout.checkpoint(40, 2), 999_999_999
    gone = [layout.partial(layout.checkpoint(30, 2), killed), layout.partial(final, killed)]
    stays = [
        layout.partial(
            layout.checkpoint(30, 2, at_epoch_end=True), os.getpid()
        ),  # is written beside
        layout.partial(layout.checkpoint(30, 1), killed),  # of an attempt that may still run
        layout.partial(layout.checkpoint(20, 2), os.getppid()),  # of a process that still writes
        layout.partial(final, os.getppid()),
    ]
    for folder in (*gone, *stays):
        folder.mkdir()
    made = begin_checkpoint(layout, final)
    assert sorted(layout.partial_folders()) == sorted([made, *stays])
