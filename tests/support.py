"""Real processes for the tests: start, watch, signal, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

if TYPE_CHECKING:
    from tests.fork_server import Forked, ForkServer

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = SCRIPTS / "train.py"
SHM = Path("/dev/shm")
T = TypeVar("T")
#: Of this session. A fixture in tests/conftest.py sets it, and ends the server.
fork_server: ForkServer | None = None


# A deadline is for what never comes, and a machine may be slow: what must be prompt is measured.
SLACK = 2.5


def wait_until(look: Callable[[], T], seconds: float = 30.0, what: str = "it") -> T:
    """Poll until `look` returns something true; fail long after it should have come."""
    deadline = time.monotonic() + seconds * SLACK
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {seconds * SLACK} s")
        time.sleep(0.005)
    return found


class Trainer:
    """One process of a training script, with its output as it comes."""

    def __init__(
        self,
        *arguments: Any,
        script: Path = TRAIN,
        prefix: tuple[str, ...] = (),
        real: bool = False,
        **popen: Any,
    ) -> None:
        """With `real` it is a child of this process, started by its own command line.

        Otherwise the fork server starts it, unless it needs more than the server can give.
        """
        # Ours flush line by line. Unbuffered, a line would go out in pieces, and what holdfast says
        # meanwhile could come in between.
        unbuffered = script.parent != SCRIPTS
        popen = {"env": environment(), **popen}
        self.process: subprocess.Popen[str] | Forked
        if real or prefix or fork_server is None or not fork_server.can_start(popen):
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *["-u"] * unbuffered, str(script), *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                # A shell that started the tests in the background has made Ctrl-C ignored.
                preexec_fn=_default_interrupt,
                **popen,
            )
            assert self.process.stdout is not None
            self._output = self.process.stdout
        else:
            reading, writing = os.pipe()
            self._output = os.fdopen(reading)
            imports_torch = re.search(r"^ *(import|from) torch\b", script.read_text(), re.MULTILINE)
            self.process = fork_server.start(
                *(script, *arguments),
                output=writing,
                unbuffered=unbuffered,
                framework="torch" if imports_torch else "numpy",
                **popen,
            )
            os.close(writing)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Wait for a line that contains `text`, and return it."""

        def look() -> str | None:
            found = next((line for line in list(self.lines) if text in line), None)
            if found is None and self.process.poll() is not None:
                self._reader.join(10)
                if text not in self.output:
                    raise AssertionError(f"ended without {text!r}:\n{self.output}")
            return found

        return wait_until(look, seconds, f"{text!r} in:\n{self.output}\n")

    def ready(self) -> int:
        """Wait for the loop to begin, and return the step it begins at."""
        return int(self.wait_for("ready ").split()[1])

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the end and return the exit status as subprocess gives it."""
        status = self.process.wait(seconds * SLACK)
        self._reader.join(10)
        return status

    def state_hash(self) -> str:
        """Wait for the end of a training that succeeds, and return its hash."""
        status = self.wait(120)
        assert status == 0, self.output
        return next(line.split()[1] for line in self.lines if line.startswith("hash "))

    def end(self) -> None:
        """End it if it still runs; for clean-up only."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)

    def _read(self) -> None:
        with self._output:
            for line in self._output:
                self.lines.append(line)


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def train_to_the_end(folder: Path, *arguments: Any, **popen: Any) -> str:
    """Run the training undisturbed and return the hash of its final state."""
    return Trainer(folder, *arguments, **popen).state_hash()


def journal_events(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    path = folder / "journal.jsonl"
    # A line that is being written has no end yet.
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    events = [json.loads(line) for line in whole.splitlines()]
    return [e for e in events if event in (None, e["event"])]


def run_id(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["run_id"])


def arena_files(folder: Path) -> list[Path]:
    """What the run has left in shared memory."""
    return sorted(SHM.glob(f"holdfast-*-{run_id(folder)}-*"))


def remove_arenas(below: Path) -> None:
    """Remove what runs below a folder have left: memory that no next attempt will use."""
    inside = f"{os.path.realpath(below)}/".encode()
    for path in SHM.glob("holdfast-*"):
        # An arena names the folder of its run in its first page. Others may be removed meanwhile.
        with contextlib.suppress(OSError), path.open("rb") as arena:
            if inside in arena.read(mmap.PAGESIZE):
                path.unlink()


def words_of(process: psutil.Process) -> str:
    """Its command line; empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def keepers(folder: Path) -> list[psutil.Process]:
    """The keeper processes that work for this run folder."""
    found = {}
    for process in psutil.process_iter():
        try:
            words, parent = process.cmdline(), process.ppid()
        except psutil.Error:
            continue
        if any("holdfast._keeper" in word for word in words) and str(folder) in " ".join(words):
            found[process.pid] = process, parent
    # A keeper that starts a program looks like two, until the new one is executed.
    return [process for process, parent in found.values() if parent not in found]


def wait_for_keeper_gone(folder: Path, seconds: float = 30.0) -> None:
    wait_until(lambda: not keepers(folder), seconds, "the keeper's end")


def copy_living(folder: Path, copy: Path) -> None:
    """Copy a folder whose run goes on: files that are being written have names of their own."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.part"))


def kill_both(folder: Path, trainer: Trainer) -> None:
    """Kill trainer and keeper at one instant: neither can answer the other's death."""
    (keeper,) = keepers(folder)
    keeper.suspend()
    trainer.send(signal.SIGSTOP)
    keeper.kill()
    trainer.kill()
    trainer.wait()
    wait_until(lambda: is_gone(keeper), what="the keeper's end")  # its command line goes first


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(p.name.split("-")[1]) for p in (folder / "checkpoints").glob("step-*"))


def traced_steps(trace: Path) -> list[int]:
    """The steps that the training completed, in order, over all its lives."""
    return [int(line.split()[0]) for line in trace.read_text().splitlines() if " " in line]


def environment(**extra: str) -> dict[str, str]:
    """As ours; but unbuffered, a line would go out in pieces (see Trainer)."""
    # A machine of CI is often one of a cloud, which must not have a say in what is tested.
    ours = {**os.environ, "PYTHONUNBUFFERED": "", "HOLDFAST_NOTICES": "off"}
    # The fork server has one thread, and the bits of a sum may depend on their number.
    return {**ours, "OMP_NUM_THREADS": "1", **extra}
