"""What the environment asks for, what text leaves the cursor, and that nothing heavy is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast._environment.variables import progress_wish, terminal_is_dumb
from holdfast._run.progress.terminal import ends_in_mid_line


@pytest.mark.parametrize(
    ("value", "wish"),
    [
        *((off, "off") for off in ("0", "off", "no", "false", " OFF ", "False")),
        *((plain, "plain") for plain in ("plain", "Plain")),
        *((other, "") for other in ("", "1", "on", "yes")),
    ],
)
def test_the_wish_is_read_as_it_is_meant(monkeypatch, value, wish):
    monkeypatch.setenv("HOLDFAST_PROGRESS", value)
    assert progress_wish() == wish


def test_a_dumb_terminal_is_known_by_its_name(monkeypatch):
    for name, is_dumb in [("dumb", True), ("xterm", False), ("", False)]:
        monkeypatch.setenv("TERM", name)
        assert terminal_is_dumb() is is_dumb


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("line\n", True, False),
        ("part", False, True),
        ("two\nparts", False, True),
        ("50%\r", False, True),
        ("\r\n", True, False),
        ("red\x1b[0m", False, True),
        ("red\n\x1b[0m", True, False),
        ("frame\n\r\x1b[1A\x1b[2K", True, False),  # as rich ends what it takes away
        ("\x1b[?25h", True, True),
        ("\x1b[?25h", False, False),
        ("", True, True),
        ("\r", False, False),
    ],
)
def test_it_is_known_whether_the_cursor_is_in_somebodys_line(text, before, after):
    assert ends_in_mid_line(text, before) is after


def test_the_import_does_not_load_tqdm():
    check = "import sys, holdfast._run.progress.line; print('tqdm' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", check], text=True) == "False\n"
