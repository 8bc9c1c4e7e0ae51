"""Scripts that are led by `holdfast run`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.command import PROGRAM
from tests.support import Trainer, wait_until

# Restarts are shown elsewhere: here a command has one life.
LEAD = (str(PROGRAM), "run", "--max-restarts", "0", "--")
# A script that counts what it hears; `hear` installs the handlers.
HEADER = """\
import os, signal, subprocess, sys, time
from pathlib import Path

def tell(*words):
    # In one piece, since several write here, and from a handler, where print may fail.
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())

def note(number, frame):
    tell("heard", signal.Signals(number).name)

def hear(*names):
    for name in names:
        signal.signal(getattr(signal, "SIG" + name), note)

def wait_for(path):
    deadline = time.monotonic() + 60  # nobody may be there any more to end it
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.005)

here = Path(sys.argv[1])
"""


def start_led(
    start: Callable[..., Trainer],
    folder: Path,
    body: str,
    prefix: tuple[str, ...] = LEAD,
    **popen: Any,
) -> Trainer:
    """Start a script that a test spells out; `here` is the folder in it."""
    path = folder / "script.py"
    path.write_text(HEADER + textwrap.dedent(body))
    return start(folder, script=path, prefix=prefix, **popen)


def beaten_step(folder: Path, attempt: int = 1) -> int:
    """The step that a run's keeper has last told of; 0 before that."""
    try:
        beat = json.loads((folder / f"attempts/{attempt:04d}/heartbeat.json").read_text())
    except (OSError, ValueError):
        return 0
    return int(beat.get("step") or 0)


def _has_pending(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def send_and_see_it_taken(trainer: Trainer, number: int) -> None:
    """Returns when the leader has heard it: what it does with it, it does at once."""
    trainer.send(number)
    wait_until(lambda: not _has_pending(trainer.pid, number), 10, "the leader's ear")
