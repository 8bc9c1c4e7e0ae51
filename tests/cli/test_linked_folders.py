"""A symbolic link in place of a folder of a run: nothing behind it is removed or written."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import holdfast as api
from holdfast._store.folder.layout import RunLayout
from tests.cli.command import holdfast, succeed
from tests.rank_folders import make_run

NO_PID = 4_000_000_000  # more than any system gives out
PLACES = (
    *("attempts", "checkpoints", "requests", "loggers", "set-aside"),
    *("attempts/0001", "attempts/0007", "attempts/0001/ranks", "attempts/0001/mail"),
    *("attempts/0001/mail/to-00001", "attempts/.meeting-7", f"attempts/.claim-{NO_PID}-0badcafe"),
    *(
        "checkpoints/step-000000000008-a0001",
        f"checkpoints/.partial-step-000000000009-a0001.{NO_PID}",
    ),
)


@pytest.fixture
def whole(tmp_path):
    return make_run(tmp_path / "run", [{"weights": np.ones(4)}])


@pytest.fixture(params=PLACES)
def link(request, whole, tmp_path):
    """A link to a folder of the user, with names that holdfast would remove or read."""
    home, place = tmp_path / "home", whole / request.param
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        place.rename(home)  # what was there still works
    home.mkdir(exist_ok=True)
    for name in (f".thesis.tex.{NO_PID}.part", f".lease.json.{NO_PID}.new", "00001.json"):
        (home / name).touch()
        os.utime(home / name, (time.time() - 7200,) * 2)
    place.symlink_to(home)
    return place


def files(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def test_no_command_and_no_run_goes_through_it(whole, link, tmp_path):
    home = tmp_path / "home"
    before = files(home)
    for name, *more in (("verify",), ("export", "out.safetensors"), ("stop",), ("save",), ("ls",)):
        done = holdfast(name, whole, *more, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert f"{link}: is a symbolic link, and holdfast touches nothing" in done.stderr
    with pytest.raises(api.FolderError, match="is a symbolic link"), api.Run(whole):
        pass
    shown = succeed("clean", whole, "--yes")
    assert f"{link}\n" in shown
    assert "a symbolic link: holdfast touches nothing outside a run folder" in shown
    assert files(home) == before
    assert link.is_symlink()


def test_a_fetch_from_a_mirror_does_not_go_through_it(whole, tmp_path):
    mirror, home = tmp_path / "mirror", tmp_path / "home"
    succeed("mirror", whole, "--push", "--at", mirror)
    checkpoints = RunLayout(whole).checkpoints
    checkpoints.rename(tmp_path / "away")
    home.mkdir()
    checkpoints.symlink_to(home)
    done = holdfast("mirror", whole, "--fetch", "--at", mirror)
    assert f"{checkpoints}: is a symbolic link" in done.stderr
    assert files(home) == {}


def test_a_link_that_holdfast_does_not_follow_is_left_alone(whole):
    checkpoints = RunLayout(whole).checkpoints
    (checkpoints / "latest").symlink_to("step-000000000008-a0001")
    assert "whole" in succeed("verify", whole)
