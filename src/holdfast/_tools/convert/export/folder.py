"""A folder of files that has its name only when all of it is whole and durable."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast._errors import FolderError
from holdfast._store.folder.atomic import publish_folder, remove_folder, sync_folder


def check_folder(out: Path, *, force: bool, what: str, is_ours: Callable[[str], bool]) -> None:
    """Refuse what cannot be before gigabytes are read."""
    if not (out.exists() or out.is_symlink()):
        return
    if not force:
        raise FolderError(
            f"{out}: is there already, and was left as it is.\n"
            "To replace what an export has left there: --force. Or choose another name."
        )
    if not out.is_dir() or not all(is_ours(each.name) for each in out.iterdir()):
        raise FolderError(
            f"{out}: holds what no export to {what} has left there, and was left as it is.\n"
            "Choose another name."
        )


@contextlib.contextmanager
def writing_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder to write into; FileExistsError if its name is taken by then."""
    prepared = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        prepared.mkdir()
        yield prepared
        _make_durable(prepared)
        if force and out.exists():
            remove_folder(out)
        if not publish_folder(prepared, out):
            raise FileExistsError(str(out))
    finally:
        remove_folder(prepared)


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(each.stat().st_size for each in folder.iterdir())


def _make_durable(folder: Path) -> None:
    for each in folder.iterdir():
        with each.open("rb+") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
