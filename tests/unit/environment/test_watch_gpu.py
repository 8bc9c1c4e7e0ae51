"""GPU memory is asked for by a program of its own, which may hang or crash and harm nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast._environment.processes import gpu
from holdfast._environment.processes.gpu import Gpus
from holdfast._environment.processes.tree import children
from tests.support import wait_until

_THERE = ("/dev/null",)
Make = Callable[[str], Gpus]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(gpu, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(gpu, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(gpu, "_BUDGET", 1e9)

    def make(program: str) -> Gpus:
        path = tmp_path / "asks.py"
        path.write_text(program)
        return Gpus(path, _THERE)

    return make


def test_what_it_says_is_what_is_given(made: Make) -> None:
    gpus = made("import sys; print([[0, 5, 10, int(sys.argv[2])]])")
    assert gpus.memory([7, 8]) is None  # it has only just been asked
    assert wait_until(lambda: gpus.memory([7, 8])) == [[0, 5, 10, 8]]


def test_nobody_waits_for_one_that_hangs_and_it_is_killed(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_PATIENCE_SECONDS", 0.2)
    gpus = made("import signal; signal.pause()")
    others = set(children(os.getpid()))  # of tests before this one
    began = time.monotonic()
    assert gpus.memory([]) is None
    assert time.monotonic() - began < 10  # it hangs for ever
    first = set(children(os.getpid())) - others
    assert first
    wait_until(lambda: gpus.memory([]) is None and not first & set(children(os.getpid())))
    gpus.close()


@pytest.mark.parametrize("program", ["import os; os.abort()", "print('nonsense')", "1 / 0"])
def test_one_that_crashes_is_asked_again(made: Make, program: str, tmp_path: Path) -> None:
    gpus = made(program)
    assert gpus.memory([]) is None
    wait_until(lambda: gpus.memory([]) is None and gpus._asked is None)
    (tmp_path / "asks.py").write_text("print([[0, 1, 2, None]])".replace("None", "3"))
    assert wait_until(lambda: gpus.memory([])) == [[0, 1, 2, 3]]


def test_without_the_library_it_is_asked_once(made: Make) -> None:
    gpus = made("print('null')")
    gpus.memory([])
    wait_until(lambda: gpus.memory([]) is None and not gpus._is_there)
    assert gpus.memory([]) is None
    assert gpus._asked is None


def test_without_a_driver_nothing_is_started(tmp_path: Path) -> None:
    gpus = Gpus(drivers=(str(tmp_path / "none"),))
    assert gpus.memory([]) is None
    assert gpus._asked is None


def test_the_program_knows_the_gpus_of_this_machine() -> None:
    command = [sys.executable, "-I", "-S", str(gpu._PROGRAM), str(os.getpid())]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[list[Any]] | None = json.loads(run.stdout)
    if not found:
        pytest.skip("there is no NVIDIA GPU here")
    for index, used, total, mine, busy, watts, celsius in found:
        assert 0 <= used <= total
        assert index >= 0
        assert mine is None or mine <= used
        assert busy is None or 0 <= busy <= 100
        assert watts is None or 0 < watts < 5000
        assert celsius is None or 0 < celsius < 150
