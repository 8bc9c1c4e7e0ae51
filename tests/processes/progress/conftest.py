"""Fixtures: a script in a terminal, with a training that the test moves by hand."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes.progress.watched import Watched
from tests.support import SCRIPTS, environment

_HEADER = "import os, sys, time\nfrom progress_training import progress, training, wait\n"


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """Write a script; what is returned runs it."""

    def write(body: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text(_HEADER + textwrap.dedent(body))
        return [sys.executable, str(path), str(tmp_path)]

    return write


@pytest.fixture
def surroundings() -> Callable[..., dict[str, str]]:
    """The environment for a script."""

    def make(**extra: str) -> dict[str, str]:
        whole = {"TERM": "xterm-256color", "PYTHONPATH": str(SCRIPTS), "PYTHONUTF8": "1", **extra}
        # Unbuffered, a line of another process comes in pieces, and ours may fall between them.
        return environment(**{"HOLDFAST_PROGRESS": "", "PYTHONUNBUFFERED": "", **whole})

    return make


@pytest.fixture
def watch(
    tmp_path: Path,
    script: Callable[[str], list[str]],
    surroundings: Callable[..., dict[str, str]],
) -> Iterator[Callable[..., Watched]]:
    """Run a script in a terminal; `shell` is a command line with SCRIPT in it."""
    opened: list[Watched] = []

    def begin(body: str, *, columns: int = 120, shell: str = "SCRIPT", **extra: str) -> Watched:
        command = ["sh", "-c", shell.replace("SCRIPT", "exec " * (shell == "SCRIPT") + _join(body))]
        opened.append(Watched(command, tmp_path, columns, surroundings(**extra)))
        return opened[-1]

    def _join(body: str) -> str:
        return " ".join(script(body))

    yield begin
    for one in opened:
        one.end()
