"""The terminal of the README: kill -9, the same command again, and the weights are the same.

Two shells in two terminals: one trains, from the other one it is killed. The two
scripts are those of docs/first_minute, and what the picture shows is what was on
the screens, played faster and with pauses shortened. If the weights are not the same
there is no picture.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from pathlib import Path

import psutil
from tools.pictures.drawn_terminal import Pane, draw
from tools.pictures.recording import Shell

COLUMNS = 96
_HASH = re.compile(r"sha256 of the weights: ([0-9a-f]+)")
_STEP = re.compile(r"step (\d+)/2000")
_KILL_FROM = 1100


def make(root: Path, pictures: Path) -> list[Path]:
    """Record it, and draw what was recorded."""
    with tempfile.TemporaryDirectory(prefix="holdfast-pictures-") as place:
        folder = Path(place)
        for name in ("plain.py", "train.py"):
            shutil.copy(root / "docs" / "first_minute" / name, folder / name)
        panes = record(folder)
    path = pictures / "terminal.svg"
    path.write_text(draw(panes), encoding="utf-8")
    return [path]


def record(folder: Path) -> list[Pane]:
    """The story, as the two terminals showed it."""
    began = time.monotonic()
    trains = Shell(folder, COLUMNS, 15, began)
    kills = Shell(folder, COLUMNS, 3, began)
    try:
        trains.type("python plain.py      # undisturbed, without holdfast")
        trains.wait_for_prompt()
        trains.type("python train.py      # with it")
        trains.wait_for(lambda: _step(trains) > _KILL_FROM, "the middle of the training")
        kills.type(f"kill -9 {_training_of(trains)}")
        trains.wait_for_prompt()
        trains.type("python train.py      # the same command again")
        trains.wait_for_prompt()
    finally:
        trains.close()
        kills.close()
    found = _HASH.findall(trains.text())
    if len(found) != 2 or found[0] != found[1]:
        raise RuntimeError(f"the weights are not the same:\n{trains.text()}")
    return [
        Pane("a terminal", trains.shots, found[0]),
        Pane("another one, meanwhile", kills.shots, ""),
    ]


def _step(shell: Shell) -> int:
    return max((int(number) for number in _STEP.findall(shell.text())), default=0)


def _training_of(shell: Shell) -> int:
    """The training's process: the one child of the shell."""
    (child,) = psutil.Process(shell.pid).children()
    return child.pid
