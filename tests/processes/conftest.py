"""Fixtures for processes: a light training, small scripts, and a hash to compare with."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.processes.looking import below
from tests.support import SCRIPTS, Trainer, environment

if TYPE_CHECKING:
    from tests.processes.notebook import Notebook

LIGHT = SCRIPTS / "light.py"
# Snapshots as often as they can be, whatever they cost.
EAGER = '{"max_overhead": 1.0}'
_PATH = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
_HEADER = """\
import os, signal, sys, threading, time
from pathlib import Path

from light import make_weights, show_hash, show_holding, stick_in_c, train_one, wait_for

import holdfast

folder = Path(sys.argv[1])
gate = Path(sys.argv[1] + ".gate")


def print(*words, flush=True):
    # In one piece: what holdfast says meanwhile could come in between.
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
"""


@pytest.fixture
def gate(folder: Path) -> Path:
    """The file that a held step waits for."""
    return Path(f"{folder}.gate")


@pytest.fixture
def light(start: Callable[..., Trainer], gate: Path) -> Callable[..., Trainer]:
    """Start the training that needs no framework."""

    def begin(folder: Path, *arguments: Any, **options: Any) -> Trainer:
        return start(folder, "--gate", gate, *arguments, script=LIGHT, **options)

    return begin


@pytest.fixture
def script(start: Callable[..., Trainer], tmp_path: Path) -> Callable[..., Trainer]:
    """Start a script that a test spells out; `folder` and `gate` are its variables too."""
    numbers = itertools.count(1)

    def begin(folder: Path, body: str, *arguments: Any) -> Trainer:
        path = tmp_path / f"script{next(numbers)}.py"
        path.write_text(_HEADER + textwrap.dedent(body))
        return start(folder, *arguments, script=path, env=environment(PYTHONPATH=_PATH))

    return begin


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a script of the test's own; it has begun when it has said so by `print("ready")`."""
    started: list[subprocess.Popen[str]] = []

    def begin(body: str, **popen: Any) -> subprocess.Popen[str]:
        path = tmp_path / f"child{len(started)}.py"
        path.write_text(textwrap.dedent(body))
        command = [*popen.pop("prefix", ()), sys.executable, "-u", str(path)]
        process = subprocess.Popen(command, **{"stdout": subprocess.PIPE, "text": True, **popen})
        started.append(process)
        if process.stdout is not None:
            assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        for pid in [*below(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="session")
def light_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The final hash of an undisturbed light training, made once for each length and size."""
    known: dict[tuple[int, int], str] = {}

    def find(total: int, size: int = 1000) -> str:
        if (total, size) not in known:
            folder = tmp_path_factory.mktemp("light") / "run"
            trainer = Trainer(folder, "--total", total, "--size", size, script=LIGHT)
            known[total, size] = trainer.state_hash()
        return known[total, size]

    return find


@pytest.fixture
def open_notebook(tmp_path: Path) -> Iterator[Callable[[], Notebook]]:
    """Open a notebook with a kernel of its own; it is ended at the end of the test."""
    from tests.processes.notebook import Notebook  # slow to import

    opened: list[Notebook] = []

    def begin() -> Notebook:
        opened.append(Notebook(tmp_path / f"notebook{len(opened)}"))
        return opened[-1]

    yield begin
    for notebook in opened:
        notebook.end()


@pytest.fixture(scope="module")
def one_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    from tests.processes.notebook import Notebook  # slow to import

    notebook = Notebook(tmp_path_factory.mktemp("kernel") / "notebook")
    yield notebook
    notebook.end()


@pytest.fixture
def notebook(one_kernel: Notebook) -> Notebook:
    """A kernel in which other runs have been before, as in a long day."""
    assert one_kernel.manager.is_alive()
    return one_kernel
