"""Prints what a path is and what the file system below it has.

A program of its own, see `doctor_question`:

    python -I -S tell_place.py PATH [write]

With `write` a small file is made beside what is there, and removed.
"""

import contextlib
import errno
import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any


def look(path: str, wants_write: bool) -> dict[str, Any]:
    """One object, whatever the path is."""
    found: dict[str, Any] = {"path": path, "kind": "missing", "error": None}
    try:
        mode = Path(path).stat().st_mode
        found["kind"] = "folder" if stat.S_ISDIR(mode) else "file"
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        found["kind"] = "file"
    except (OSError, ValueError) as error:
        found["kind"], found["error"] = "closed", getattr(error, "strerror", None) or str(error)
    whole = Path(path).absolute()
    # The folder that is there, and would get the rest.
    base = next((each for each in (whole, *whole.parents) if _is_folder(each)), Path("/"))
    found["base"] = str(base.resolve())
    with contextlib.suppress(OSError, AttributeError):
        room = os.statvfs(base)
        found["free"] = room.f_bavail * room.f_frsize
        found["total"] = room.f_blocks * room.f_frsize
        found["free_inodes"] = room.f_favail if room.f_files else None
        found["is_read_only"] = bool(room.f_flag & getattr(os, "ST_RDONLY", 1))
    if wants_write:
        found.update(try_to_write(base))
    return found


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def try_to_write(folder: Path) -> dict[str, Any]:
    """Whether a file can be made there, and how the clock of the file system stands to ours."""
    name = folder / f".doctor.{os.getpid()}-{os.urandom(4).hex()}.part"
    try:
        before = time.time()
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, b"x")
            written = os.fstat(descriptor).st_mtime
            after = time.time()
        finally:
            os.close(descriptor)
            name.unlink()
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "")
        return {"is_writable": False, "refusal": error.strerror or str(error), "code": code}
    # A file system keeps times in ticks, and may take the last one.
    skew = 0.0 if before - 0.1 <= written <= after + 0.1 else written - (before + after) / 2
    return {"is_writable": True, "skew_seconds": skew}


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1], "write" in sys.argv[2:])))
