"""Where the page finds what a run printed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast._environment.slurm.controller import output_file, read_batch
from holdfast._report.output import read_output
from tests.unit.report_folder import Book

LINE = (
    "JobId=12 JobName=StdOut=/no UserId=me(0) Command=/j.sh WorkDir={place} StdErr={out} "
    "StdIn=/dev/null StdOut={out} TresPerNode=gres/gpu:1"
)


@pytest.fixture(autouse=True)
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scontrol that knows job 12, until its file is gone."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    line = LINE.format(place=tmp_path, out=tmp_path / "my logs" / "slurm-12.out")
    program.write_text(f"#!/bin/sh\necho '{line}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def submitted_run(place: Path, **start: object) -> Path:
    """A run of job 12, whose output is in a folder with a space in its name."""
    log = place / "my logs" / "slurm-12.out"
    log.parent.mkdir()
    log.write_text("first\nlast\n")
    book = Book(place / "run")
    book.begin(1, 0)
    lease = json.loads(book.layout.lease(1).read_text())
    book.layout.lease(1).write_text(json.dumps({**lease, "job": {"number": "12"}}))
    book.layout.start(1).write_text(json.dumps(start))
    return book.folder


def test_the_output_of_a_job_is_shown_while_the_controller_knows_it(tmp_path):
    assert read_output(submitted_run(tmp_path))["text"] == "first\nlast"


def test_the_output_of_a_job_is_shown_when_the_controller_has_forgotten_it(tmp_path, controller):
    folder = submitted_run(tmp_path, batch=read_batch("12"))
    controller.unlink()
    assert read_output(folder) == {
        "attempt": 1,
        "where": str(tmp_path / "my logs" / "slurm-12.out"),
        "text": "first\nlast",
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away: run it as root")
def test_a_record_names_no_file_of_another_user(tmp_path, controller):
    folder = submitted_run(tmp_path, batch=read_batch("12"))
    controller.unlink()
    os.chown(folder / "attempts/0001/start.json", 12345, 12345)
    assert read_output(folder)["text"] == ""


@pytest.mark.parametrize("rest", ["", " Power=", " MailUser=a b"])
def test_the_file_of_a_line_may_have_spaces(rest):
    line = f"JobId=1 JobName=a StdOut=/x UserId=me(0) StdOut=/a b/c-1.out{rest}"
    assert output_file(line) == "/a b/c-1.out"
