"""A place that holds bytes under keys.

Nothing here need be atomic: what a put that was cut leaves does not fit its checksum, and readers
treat it as absent.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast._store.folder.atomic import write_atomic


class StoredObject(NamedTuple):
    """What a store says of one of its objects."""

    size_bytes: int
    md5: str | None = None  # where the store itself has computed one


class MissingPlace(OSError):
    """The parent of a mirror's folder, or the bucket, is missing: its content is unknown."""


class FolderStore:
    """A folder: another disk, a network file system.

    It is made if it is missing; its parent is not. A disk that is not mounted would look like an
    empty mirror, and the copies would fill the disk below.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = str(folder)

    def put(self, key: str, data: bytes) -> None:
        """Store bytes, in place of others."""
        path = self._folder / key
        self._refuse_missing_place()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
        _forget(path)

    def get(self, key: str) -> bytes:
        """What is stored; FileNotFoundError if there is nothing."""
        try:
            return (self._folder / key).read_bytes()
        except FileNotFoundError:
            self._refuse_missing_place()
            raise

    def list(self, prefix: str) -> dict[str, StoredObject]:
        """All keys that begin with a folder's name, and what a killed put has left there."""
        found = {}
        for folder, _, names in os.walk(self._folder / prefix, onerror=_refuse_unlisted):
            for path in (Path(folder) / name for name in names):
                if path.name.startswith(".") and path.suffix != ".part":
                    continue  # of the file system, such as .nfs0001: it may refuse a removal
                with contextlib.suppress(FileNotFoundError):  # removed in between
                    key = path.relative_to(self._folder).as_posix()
                    found[key] = StoredObject(path.stat().st_size)
        return found

    def remove(self, keys: Iterable[str]) -> None:
        """Remove what is there of these."""
        for key in keys:
            path = self._folder / key
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others are in it
                path.parent.rmdir()

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


# These have no folders; making one may make a bucket, which only its owner should do.
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "b2", "r2", "hf")
_MD5 = re.compile(r"[0-9a-f]{32}")
# A store that hangs must not look like one that is busy: botocore would wait minutes by itself.
_S3 = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}}


class RemoteStore:
    """The same in an object store, or behind another address of fsspec, which only it imports."""

    def __init__(self, address: str) -> None:
        import fsspec.config  # slow, and often not installed
        from fsspec.core import url_to_fs

        self.address = address
        protocol = re.split("::|://", address, maxsplit=1)[0]
        self._has_folders = protocol not in _BUCKETS
        options: dict[str, Any] = {}
        if protocol in ("s3", "s3a"):
            chosen = fsspec.config.conf.get("s3", {})
            options = {name: value for name, value in _S3.items() if name not in chosen}
        # Another process writes there too: a cached listing may be wrong.
        self._files, root = url_to_fs(
            address, use_listings_cache=False, skip_instance_cache=True, **options
        )
        self._root = str(root).rstrip("/")

    def put(self, key: str, data: bytes) -> None:
        path = f"{self._root}/{key}"
        if self._has_folders:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(path, data)

    def get(self, key: str) -> bytes:
        try:
            return bytes(self._files.cat_file(f"{self._root}/{key}"))
        except FileNotFoundError as error:
            # A missing object is normal; a missing bucket is a typo.
            answer = getattr(error.__cause__, "response", None)
            if isinstance(answer, dict) and answer.get("Error", {}).get("Code") == "NoSuchBucket":
                raise MissingPlace("there is no such bucket") from error
            raise

    def list(self, prefix: str) -> dict[str, StoredObject]:
        self._files.invalidate_cache()
        top = f"{self._root}/{prefix}".rstrip("/")
        try:
            found = self._walk(top) if self._has_folders else self._files.find(top, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._files._strip_protocol(self._root).rstrip("/")) + 1
        return {
            self._files._strip_protocol(path)[start:]: StoredObject(
                int(info["size"] or 0), _md5_of(info)
            )
            for path, info in found.items()
            if info.get("type") == "file"
        }

    def _walk(self, folder: str) -> dict[str, dict[str, Any]]:
        """All files; `find` would treat a folder that cannot be listed as empty."""
        found: dict[str, dict[str, Any]] = {}
        for info in self._files.ls(folder, detail=True):
            if info["type"] == "directory":
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    found |= self._walk(info["name"])
            else:
                found[info["name"]] = info
        return found

    def remove(self, keys: Iterable[str]) -> None:
        paths = [f"{self._root}/{key}" for key in keys]
        if not paths:
            return
        try:
            self._files.rm(paths)
        except FileNotFoundError:  # one is missing: remove the others one by one
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(path)


def _md5_of(info: dict[str, Any]) -> str | None:
    """S3 reports the MD5 of an object as its tag, Google in a field of its own."""
    if isinstance(coded := info.get("md5Hash"), str):
        return base64.b64decode(coded).hex()
    tag = str(info.get("ETag") or "").strip('"')
    return tag if _MD5.fullmatch(tag) else None


MirrorStore = FolderStore | RemoteStore


def open_store(address: str) -> MirrorStore:
    """The mirror at an address, which need not be there yet."""
    folder = folder_of(address)
    return RemoteStore(address) if folder is None else FolderStore(folder)
