"""Where a run folder lies while a proof watches: never where another course has its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._store.folder.prove_config import ProveConfig


@pytest.fixture
def prove_config(tmp_path) -> ProveConfig:
    parts = {name: str(tmp_path / "course" / name) for name in ("work", "runs", "end")}
    return ProveConfig(socket="", **parts)


@pytest.mark.parametrize("place", ["work/run", "work/a/b", "runs/run-1", "dir/run"])
def test_what_lies_in_the_folder_of_the_course_stays_there(prove_config, tmp_path, place):
    """`{dir}` in the command too: its name is part of what courses are compared by."""
    folder = tmp_path / "course" / place
    assert prove_config.redirected(folder) == folder


def test_what_lies_elsewhere_gets_a_place_of_its_own(prove_config, tmp_path):
    places = {prove_config.redirected(tmp_path / name / "run") for name in ("a", "b")}
    assert len(places) == 2
    assert {place.parent for place in places} == {Path(prove_config.runs)}
