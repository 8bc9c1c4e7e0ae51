"""The folder in which `holdfast prove` and `holdfast demo` train, and what must end with it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil

from holdfast._errors import FolderError, HoldfastError
from holdfast._store.folder.attempts import find_run
from holdfast._store.folder.layout import RunLayout
from holdfast._store.read.find import remove_leftovers

_KEEPER_SECONDS = 30.0


def check_is_new(keep: Path) -> None:
    """FolderError if a folder that is to be kept has something in it."""
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise FolderError(f"{keep}: exists already.\nChoose a folder that does not exist yet.")


@contextlib.contextmanager
def open_workplace(prefix: str, keep: Path | None) -> Iterator[Path]:
    """The folder to keep, or a temporary one that is removed at the end."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        folder = keep.resolve()
    else:
        folder = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
    try:
        yield folder
    finally:
        _wait_for_keepers(folder)
        if keep is None:
            # The memory that waits for another attempt of these runs: none will come.
            for path in folder.rglob(RunLayout(Path()).identity.name):
                with contextlib.suppress(HoldfastError, OSError):
                    remove_leftovers(find_run(path.parent)[1], sys.maxsize, ())
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the context as Ctrl-C does."""

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave files behind
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    former = {name: signal.getsignal(getattr(signal, name)) for name in names}
    for name, handler in former.items():
        if handler != signal.SIG_IGN:  # as it is for SIGINT in a background job
            signal.signal(getattr(signal, name), leave)
    try:
        yield
    finally:
        for name, handler in former.items():
            signal.signal(getattr(signal, name), handler)


def _wait_for_keepers(folder: Path) -> None:
    """A keeper outlives its training for a moment, and writes into the run's folder."""
    deadline = time.monotonic() + _KEEPER_SECONDS
    while any(_is_keeper(process, folder) for process in psutil.process_iter()):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _is_keeper(process: psutil.Process, folder: Path) -> bool:
    try:
        text = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "holdfast._keeper" in text and f"{folder}/" in text
