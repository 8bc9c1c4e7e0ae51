"""Where a run folder lies while a proof watches: never where another course has its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._store.folder.errand import Errand


@pytest.fixture
def errand(tmp_path) -> Errand:
    parts = {name: str(tmp_path / "course" / name) for name in ("work", "runs", "end")}
    return Errand(socket="", **parts)


@pytest.mark.parametrize("place", ["work/run", "work/a/b", "runs/run-1", "dir/run"])
def test_what_lies_in_the_folder_of_the_course_stays_there(errand, tmp_path, place):
    """`{dir}` in the command too: its name is part of what courses are compared by."""
    folder = tmp_path / "course" / place
    assert errand.redirected(folder) == folder


def test_what_lies_elsewhere_gets_a_place_of_its_own(errand, tmp_path):
    places = {errand.redirected(tmp_path / name / "run") for name in ("a", "b")}
    assert len(places) == 2
    assert {place.parent for place in places} == {Path(errand.runs)}
