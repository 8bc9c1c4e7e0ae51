"""A place that holds bytes under keys.

Nothing here need be atomic: what a put that was cut leaves does not fit its checksum, and readers
treat it as absent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from holdfast._store.folder.atomic import write_atomic


class StoredObject(NamedTuple):
    """What a store says of one of its objects."""

    size_bytes: int
    md5: str | None = None  # where the store itself has computed one


class MirrorStore(Protocol):
    """One mirror."""

    @property
    def address(self) -> str: ...

    def put(self, key: str, data: bytes) -> None:
        """MirrorStore bytes, in place of others."""

    def get(self, key: str) -> bytes:
        """What is stored; FileNotFoundError if there is nothing."""

    def list(self, prefix: str) -> dict[str, StoredObject]:
        """All keys that begin with a folder's name."""

    def remove(self, keys: Iterable[str]) -> None:
        """Remove what is there of these."""

    def tidy(self, prefix: str) -> None:
        """Remove what a killed put has left, which `list` does not show."""


class MissingPlace(OSError):
    """The parent of a mirror's folder is missing, so its content is unknown."""


class FolderStore:
    """A folder: another disk, a network file system.

    It is made if it is missing; its parent is not. A disk that is not mounted would look like an
    empty mirror, and the copies would fill the disk below.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def address(self) -> str:
        return str(self._folder)

    def put(self, key: str, data: bytes) -> None:
        path = self._folder / key
        self._refuse_missing_place()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
        _forget(path)

    def get(self, key: str) -> bytes:
        try:
            return (self._folder / key).read_bytes()
        except FileNotFoundError:
            self._refuse_missing_place()
            raise

    def list(self, prefix: str) -> dict[str, StoredObject]:
        found = {}
        for folder, _, names in os.walk(self._folder / prefix, onerror=_refuse_unlisted):
            for name in names:
                path = Path(folder) / name
                if not name.startswith("."):  # else it is being written
                    with contextlib.suppress(FileNotFoundError):
                        key = path.relative_to(self._folder).as_posix()
                        found[key] = StoredObject(path.stat().st_size)
        return found

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._folder / key
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others are in it
                path.parent.rmdir()

    def tidy(self, prefix: str) -> None:
        for path in (self._folder / prefix).glob(".*.part"):
            path.unlink(missing_ok=True)

    def _refuse_missing_place(self) -> None:
        if not self._folder.parent.exists():
            raise MissingPlace(
                f"there is no folder {self._folder.parent}: mount its disk, or make the folder"
            )


def _refuse_unlisted(error: OSError) -> None:
    """A folder that cannot be listed is not empty: else its content would count as lost."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _forget(path: Path) -> None:
    """Drop a file from the page cache: what is read back for a check must come from the disk."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def folder_of(address: str) -> Path | None:
    """The folder that an address names; None if it names something else."""
    if "://" not in address and "::" not in address:
        return Path(address)
    return Path(address.removeprefix("file://")) if address.startswith("file://") else None


def open_store(address: str) -> MirrorStore:
    """The mirror at an address, which need not be there yet."""
    folder = folder_of(address)
    if folder is not None:
        return FolderStore(folder)
    from holdfast._store.mirror.remote import RemoteStore  # loads fsspec

    return RemoteStore(address)
