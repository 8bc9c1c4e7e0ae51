"""A real kernel, as a notebook server starts one, with cells to run and a button to interrupt."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

from tests.support import SCRIPTS

_START_SECONDS = 60.0
_BETWEEN_PRESSES_SECONDS = 0.25
TOTAL = 40

_TRAIN = """
import time
from pathlib import Path
from light import make_weights, show_hash, show_holding, stick_in_c, train_one
import holdfast

weights = make_weights()
with holdfast.Run({folder!r}, settings=holdfast.Settings({settings}), weights=weights) as run:
    print("ready", run.step)
    for step in run.steps({total}):
        train_one(weights)
        if step == {hold_at}:
            show_holding(run)
            {held}
        time.sleep({sleep})
show_hash(weights)
"""
# A cell that leaves its run open.
_WITHOUT_WITH = """
from light import make_weights, show_hash, train_one
import holdfast, time

weights = make_weights()
run = holdfast.Run({folder!r}, weights=weights).__enter__()
print("ready", run.step)
for step in run.steps({total}):
    train_one(weights)
    if step == {hold_at}:
        print("holding")
        time.sleep(60)
show_hash(weights)
"""


class Cell:
    """One execution of a cell, with its output as it comes."""

    def __init__(self, message_id: str) -> None:
        self.message_id = message_id
        self.output = ""  # both streams
        self.error: dict[str, Any] | None = None  # what the notebook shows in red
        self.is_idle = False
        self.status: str | None = None  # ok, error or aborted

    @property
    def shown(self) -> str:
        """All that a person reads below the cell."""
        return self.output + ("" if self.error is None else "\n".join(self.error["traceback"]))


class Notebook:
    """One notebook: its kernel and the cells that were run in it."""

    def __init__(self, place: Path) -> None:
        path = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
        place.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "IPYTHONDIR": str(place),  # not the profile and history of whoever runs the tests
            "JUPYTER_RUNTIME_DIR": str(place),
        }
        self.manager = KernelManager(connection_file=str(place / "kernel.json"))
        self._log = log = (place / "kernel.log").open("ab")  # a restarted kernel uses it too
        self.manager.start_kernel(env=environment, cwd=str(place), stdout=log, stderr=log)
        self._cells: dict[str, Cell] = {}
        self._connect()

    def _connect(self) -> None:
        self._client = self.manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_START_SECONDS)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def begin(self, code: str) -> Cell:
        """Run a cell and do not wait for it; more than one are queued, as by "run all"."""
        cell = Cell(self._client.execute(code))
        self._cells[cell.message_id] = cell
        return cell

    def wait_for(self, cell: Cell, text: str, seconds: float = 30.0) -> None:
        """Wait until a cell has shown `text`."""
        self._until(lambda: text in cell.shown, seconds, f"{text!r}", cell)

    def finish(self, cell: Cell, seconds: float = 30.0) -> Cell:
        """Wait for the end of a cell."""
        self._until(lambda: cell.is_idle and cell.status is not None, seconds, "the end", cell)
        return cell

    def run(self, code: str, seconds: float = 30.0) -> Cell:
        return self.finish(self.begin(code), seconds)

    def interrupt(self) -> None:
        """Press the stop button."""
        self.manager.interrupt_kernel()

    def interrupt_again(self, cell: Cell | None = None) -> None:
        """Press it a second time, once the first is answered."""
        if cell is not None:
            self.wait_for(cell, "interrupted: step ")
        time.sleep(_BETWEEN_PRESSES_SECONDS)
        self.interrupt()

    def restart(self, *, now: bool = False) -> None:
        """Restart the kernel, as from the menu."""
        self._client.stop_channels()
        self.manager.restart_kernel(now=now)
        self._connect()

    def end(self) -> None:
        self._client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self._log.close()

    def _until(self, look: Any, seconds: float, what: str, cell: Cell) -> None:
        deadline = time.monotonic() + seconds
        while not look():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come within {seconds} s:\n{cell.shown}")
            assert self.manager.is_alive(), f"the kernel died:\n{cell.shown}"
            self._receive()

    def _receive(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._hear(self._client.get_iopub_msg(timeout=0.05))
        try:
            reply = self._client.get_shell_msg(timeout=0)
        except queue.Empty:
            return
        if cell := self._cells.get(reply["parent_header"].get("msg_id")):
            cell.status = reply["content"]["status"]
            cell.is_idle = cell.is_idle or cell.status == "aborted"

    def _hear(self, message: dict[str, Any]) -> None:
        cell = self._cells.get(message["parent_header"].get("msg_id"))
        content = message["content"]
        if cell is None:
            return
        if message["msg_type"] == "stream":
            cell.output += content["text"]
        elif message["msg_type"] == "error":
            cell.error = content
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            cell.is_idle = True


def train(
    folder: Path, hold_at: int = -1, held: str = "time.sleep(60)", sleep: float = 0.0, **settings
) -> str:
    """The text of a cell that trains."""
    return _TRAIN.format(
        folder=str(folder),
        hold_at=hold_at,
        held=held,
        sleep=sleep,
        total=TOTAL,
        settings=", ".join(f"{name}={value!r}" for name, value in settings.items()),
    )


def without_with(folder: Path, hold_at: int = -1) -> str:
    return _WITHOUT_WITH.format(folder=str(folder), hold_at=hold_at, total=TOTAL)


def line_of(cell: Cell, word: str) -> str:
    """What follows a word at the beginning of a line of the output."""
    lines = [line for line in cell.output.splitlines() if line.startswith(word + " ")]
    assert lines, cell.shown
    return lines[-1].split()[1]
