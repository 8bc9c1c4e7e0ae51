"""Log files of every length and encoding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast._diagnose.evidence.gather import gather_log
from holdfast._diagnose.texts import log_file
from holdfast._diagnose.texts.log_file import read_log

DEATH = (
    "Traceback (most recent call last):\n"
    '  File "/home/u/train.py", line 3, in step\n'
    "ValueError: bad batch\n"
)


def test_a_log_tells_by_its_end(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("step 1\n" * 100 + DEATH)
    evidence = gather_log(path)
    assert (evidence.kind, evidence.subject, evidence.files) == ("log", str(path), [path])
    (sign,) = evidence.signs
    assert (sign.kind, sign.line, sign.details["from_end"]) == ("python_exception", 103, 0)
    assert evidence.output.endswith("ValueError: bad batch\n")
    assert not evidence.is_live


def test_of_a_huge_log_only_the_beginning_and_the_end_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    line = "step 1234 loss 0.5 " + "." * 80 + "\n"
    lines = (12 << 20) // len(line)
    middle = "Killed\n"
    path.write_text("Killed\n" + line * lines + middle + line * lines + DEATH)
    signs, tail = read_log(path)
    assert [sign.kind for sign in signs] == ["killed_line", "python_exception"]
    total = 2 * lines + 5
    assert [sign.line for sign in signs] == [1, total]
    assert [sign.details["from_end"] for sign in signs] == [total - 1, 0]
    assert len(tail) <= log_file.OUTPUT_CHARACTERS


def test_a_log_that_is_too_long_to_count_is_quick_to_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    with path.open("wb") as file:
        file.truncate(3 << 30)  # a hole: it takes no room
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + DEATH.encode())
    before = psutil.Process().io_counters().read_chars
    signs, _ = read_log(path)
    assert psutil.Process().io_counters().read_chars - before < 300 << 20
    assert [sign.details["from_end"] for sign in signs] == [0]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1"])
def test_any_encoding_will_do(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(("Zeit für Schritt 1: schön\r\n" * 50 + DEATH).encode(encoding))
    (sign,) = gather_log(path).signs
    assert sign.details["message"] == "bad batch"


def test_what_is_no_text_at_all_is_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(os.urandom(200_000))
    assert gather_log(path).kind == "log"


def test_the_end_of_a_log_is_as_the_screen_showed_it(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(b"\x1b[32mok\x1b[0m\r\n 1%|#\r 2%|##\r 3%|###\nlast")
    assert gather_log(path).output == "ok\n 3%|###\nlast"


def test_a_missing_or_empty_log_is_said_and_not_raised(tmp_path: Path) -> None:
    missing = gather_log(tmp_path / "none.log")
    assert "cannot be read" in missing.notes[0]
    path = tmp_path / "empty.log"
    path.touch()
    assert "is empty" in gather_log(path).notes[0]


@pytest.mark.skipif(sys.platform != "linux", reason="who has a file open is asked of /proc")
def test_a_log_that_is_still_written_is_of_a_living_process(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    with path.open("wb") as file:
        writer = subprocess.Popen(["sleep", "60"], stdout=file)
    try:
        path.write_text("step 1\n")
        evidence = gather_log(path)
        assert evidence.is_live
        assert f"Process {writer.pid} (sleep)" in evidence.notes[0]
        path.write_text(DEATH)  # a shell around it may live on
        assert not gather_log(path).is_live
    finally:
        writer.kill()
        writer.wait()
    path.write_text("step 1\n")
    assert not gather_log(path).is_live
