"""How much room there is on a disk and in shared memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_SHM = "/dev/shm"


def room(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Of the file system that a path is on, or would be.

    {"path", "free", "total", "free_inodes"}: what is free for an ordinary user. An inode is what
    a new file needs; where they cannot run out, `free_inodes` is None. On a dead NFS this waits.
    """
    place = Path(path)
    for each in (place, *place.absolute().parents):
        try:
            found = os.statvfs(each)
        except (OSError, ValueError, AttributeError):
            continue
        return {
            "path": str(path),
            "free": found.f_bavail * found.f_frsize,
            "total": found.f_blocks * found.f_frsize,
            "free_inodes": found.f_favail if found.f_files else None,
        }
    return None


def shm_room(path: str = _SHM) -> dict[str, int] | None:
    """{"free", "total"} of /dev/shm."""
    try:
        found = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return {"free": found.f_bavail * found.f_frsize, "total": found.f_blocks * found.f_frsize}
