"""`holdfast status` of thousands of runs: little is read of each, and one hides no other."""

from __future__ import annotations

import json
import os
import shutil
import time

import numpy as np
import pytest

from holdfast._store.folder import plain_file
from holdfast._store.folder.layout import RunLayout
from tests.cli.command import succeed
from tests.rank_folders import make_run


@pytest.fixture
def make_many(tmp_path):
    """Copies of a run that has ended, with a journal of some length."""

    def make(count):
        one = make_run(tmp_path / "one", [{"weights": np.ones(4)}])
        events = [{"event": "start", "attempt": 1, "step": 0}]
        events += [{"event": "checkpoint", "attempt": 1, "step": n} for n in range(60)]
        text = "".join(json.dumps({"time": 1.0, **event}) + "\n" for event in events)
        RunLayout(one).journal.write_text(text)
        for number in range(count):
            run = tmp_path / "runs" / f"r{number:04d}"
            shutil.copytree(one, run)
            RunLayout(run).identity.write_text(json.dumps({"run_id": os.urandom(16).hex()}))
        return tmp_path / "runs"

    return make


def test_little_is_read_of_each_of_many_runs(make_many, monkeypatch):
    count = 210  # more than rich lays out
    runs = make_many(count)
    opened, listed = [], []
    open_, listdir = os.open, os.listdir

    def count_open(path, *more, **options):
        opened.append(path)
        return open_(path, *more, **options)

    def count_listdir(path="."):
        listed.append(str(path))
        return listdir(path)

    monkeypatch.setattr(plain_file.os, "open", count_open)
    monkeypatch.setattr(os, "listdir", count_listdir)
    shown = succeed("status", runs)
    assert len(shown.splitlines()) == count + 1
    assert shown.splitlines()[1].split()[:3] == [str(runs / "r0000"), "closed", "0"]
    assert len(opened) < 13 * count  # of a dead run, each record once
    assert listed.count("/dev/shm") == 1


# `make test` has the one before, which counts what takes the time.
@pytest.mark.nightly
def test_the_status_of_two_thousand_runs_takes_two_seconds(make_many):
    runs = make_many(2000)
    began = time.process_time()
    succeed("status", runs)
    # Processor time: about 1.4 s, however many others compute.
    assert time.process_time() - began < 2.0


def test_a_run_that_cannot_be_read_hides_no_other(make_many, tmp_path):
    runs = make_many(3)
    shutil.rmtree(runs / "r0001" / "requests", ignore_errors=True)
    (runs / "r0001" / "requests").symlink_to(tmp_path)
    RunLayout(runs / "r0002").journal.write_text("[" * 100_000 + "\n")
    states = {
        each["folder"]: each["state"] for each in json.loads(succeed("status", runs, "--json"))
    }
    assert [states[str(runs / f"r000{n}")] for n in range(3)] == ["closed", "unreadable", "closed"]
    assert "unreadable" in succeed("status", runs)
    assert "holdfast" in succeed("metrics", runs)
