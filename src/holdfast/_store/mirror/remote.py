"""Object stores and everything else that fsspec knows: the only file that imports it."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Iterable
from typing import Any

import fsspec
import fsspec.config
from fsspec.core import url_to_fs

from holdfast._store.mirror.store import StoredObject

# These have no folders; making one may make a bucket, which only its owner should do.
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "b2", "r2", "hf")
_MD5 = re.compile(r"[0-9a-f]{32}")
# A store that hangs must not look like one that is busy: botocore would wait minutes by itself.
_S3 = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}}


class MissingBucket(OSError):
    """The whole store is missing, so its content is unknown."""


class RemoteStore:
    """What is behind an address of fsspec."""

    def __init__(self, address: str) -> None:
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
        path = self._path(key)
        if self._has_folders:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(path, data)

    def get(self, key: str) -> bytes:
        try:
            return bytes(self._files.cat_file(self._path(key)))
        except FileNotFoundError as error:
            _refuse_missing_bucket(error)
            raise

    def list(self, prefix: str) -> dict[str, StoredObject]:
        self._files.invalidate_cache()
        top = self._path(prefix).rstrip("/")
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
        paths = [self._path(key) for key in keys]
        if not paths:
            return
        try:
            self._files.rm(paths)
        except FileNotFoundError:  # one is missing: remove the others one by one
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(path)

    def tidy(self, prefix: str) -> None:
        """Nothing: an object store keeps no half of an object."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


def _refuse_missing_bucket(error: FileNotFoundError) -> None:
    """A missing object is normal; a missing bucket is a typo."""
    answer = getattr(error.__cause__, "response", None)
    if isinstance(answer, dict) and answer.get("Error", {}).get("Code") == "NoSuchBucket":
        raise MissingBucket("NoSuchBucket") from error


def _md5_of(info: dict[str, Any]) -> str | None:
    """S3 reports the MD5 of an object as its tag, Google in a field of its own."""
    if isinstance(coded := info.get("md5Hash"), str):
        return base64.b64decode(coded).hex()
    tag = str(info.get("ETag") or "").strip('"')
    return tag if _MD5.fullmatch(tag) else None
