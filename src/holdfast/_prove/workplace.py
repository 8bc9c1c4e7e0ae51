"""Where a proof works: a temporary folder, of which nothing is left, or one that stays."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from holdfast._errors import HoldfastError
from holdfast._record.attempts import find_run
from holdfast._record.layout import RunLayout
from holdfast._resume.find import remove_leftovers

_KEEPER_SECONDS = 10.0


@contextlib.contextmanager
def open_workplace(keep: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """A folder to work in, with a short path, and where it is if it stays."""
    if keep is None:
        folder = Path(tempfile.mkdtemp(prefix="holdfast-prove-")).resolve()
        try:
            yield folder, None
        finally:
            _forget_runs(folder)
            shutil.rmtree(folder, ignore_errors=True)
        return
    keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="proof-", dir=keep)).resolve()
    with tempfile.TemporaryDirectory(prefix="holdfast-") as short:
        # The path of a socket has room for about a hundred characters.
        link = Path(short).resolve() / "p"
        link.symlink_to(folder)
        try:
            yield link, folder
        finally:
            for place in (link, folder):  # after this one of the two is no path any more
                _wait_for_keepers(place)


def _forget_runs(folder: Path) -> None:
    """Let the keepers end, and remove what nobody will ever resume from."""
    _wait_for_keepers(folder)
    for path in folder.rglob(RunLayout(Path()).identity.name):
        with contextlib.suppress(HoldfastError, OSError):
            remove_leftovers(find_run(path.parent)[1], sys.maxsize, ())


def _wait_for_keepers(folder: Path) -> None:
    """Wait for the keepers of runs below this folder: they have little to do, and then leave."""
    deadline = time.monotonic() + _KEEPER_SECONDS
    while any(map(_is_keeper_in(folder), psutil.process_iter())):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _is_keeper_in(folder: Path) -> Callable[[psutil.Process], bool]:
    def look(process: psutil.Process) -> bool:
        try:
            text = " ".join(process.cmdline())
        except psutil.Error:
            return False
        return "holdfast._keeper" in text and f"{folder}/" in text

    return look
