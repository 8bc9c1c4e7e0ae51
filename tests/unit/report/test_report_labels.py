"""Tags, notes and archive: what is written is what is read, whatever is given."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._errors import FolderError, SettingsError
from holdfast._report.labels import Labels, change_labels, read_labels
from holdfast._store.folder.layout import RunLayout
from tests.unit.report_folder import Book

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=60),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(), inner, max_size=4),
)


@pytest.fixture
def layout(folder: Path) -> RunLayout:
    return Book(folder).layout


def test_a_change_of_one_label_leaves_the_others(layout):
    change_labels(layout, {"tags": ["good", "paper"], "note": "first"})
    assert change_labels(layout, {"is_archived": True}) == Labels(("good", "paper"), "first", True)
    assert read_labels(layout) == Labels(("good", "paper"), "first", True)
    assert change_labels(layout, {"tags": [], "is_archived": False}).note == "first"


def test_a_run_that_was_never_labelled_has_none(layout):
    assert read_labels(layout) == Labels()


@pytest.mark.parametrize("change", [{}, {"name": "x"}, {"tags": [], "run_id": "y"}])
def test_anything_else_is_refused(layout, change):
    with pytest.raises(SettingsError):
        change_labels(layout, change)
    assert not layout.labels.exists()


@given(st.dictionaries(st.sampled_from(["tags", "note", "is_archived"]), anything))
def test_whatever_is_in_the_file_becomes_bounded_labels(record):
    found = Labels.parse(record)
    assert len(found.tags) == len(set(found.tags)) <= 20
    assert all(0 < len(tag) <= 40 and tag.isprintable() for tag in found.tags)
    assert len(found.note) <= 2000
    assert Labels.parse(json.loads(json.dumps(record))) == found


def test_a_link_is_not_written_through(layout, tmp_path):
    target = tmp_path / "target"
    target.write_text("{}")
    layout.labels.symlink_to(target)
    change_labels(layout, {"note": "x"})
    assert target.read_text() == "{}"
    assert not layout.labels.is_symlink()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere: run as an ordinary user")
def test_a_folder_that_cannot_be_written_is_told(layout):
    layout.folder.chmod(0o500)
    try:
        with pytest.raises(FolderError):
            change_labels(layout, {"note": "x"})
    finally:
        layout.folder.chmod(0o700)
