"""A file system that answers everything but a read: as NFS does whose server is gone.

Its one file can be looked up and opened; whoever reads it waits. Like NFS, that survives
SIGKILL: it ends when the server here does.

    dead_disk.py FOLDER
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_MNT_DETACH = 2
_FOLDER, _FILE = 1, 2  # the two that there are
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _INIT = 1, 2, 3, 14, 15, 26
_OPENDIR, _BATCH_FORGET = 27, 42
_SILENT = (_READ, _FORGET, _BATCH_FORGET)  # the last two want no answer
_SIZE_BYTES = 4096


def why_not() -> str | None:
    """The reason for a skip: why there can be no such file system here; None if it can."""
    if os.getuid() != 0:
        return "only root can mount a file system without a helper program"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse"
    return None


@contextlib.contextmanager
def dead_disk(folder: Path) -> Iterator[Path]:
    """Mount it; at the end whoever waits for it gets an error."""
    folder.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-S", __file__, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "mounted\n"
        yield folder
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        ctypes.CDLL(None).umount2(os.fsencode(folder), _MNT_DETACH)


def _serve(folder: str) -> None:
    # Unbuffered and of our own: each read of it is one request.
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(b"dead-disk", os.fsencode(folder), b"fuse", 0, options.encode()) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    while True:
        request = os.read(device, 1 << 17)
        operation, unique, node = struct.unpack_from("=IQQ", request, 4)
        if operation in _SILENT:
            continue
        body = _answer(operation, node, request[40:])
        code = -errno.ENOSYS if body is None else 0
        body = body or b""
        os.write(device, struct.pack("=IiQ", 16 + len(body), code, unique) + body)


def _answer(operation: int, node: int, request: bytes) -> bytes | None:
    """What the kernel's protocol 7.31 has for it; None: it is not known here."""
    if operation == _INIT:
        (read_ahead,) = struct.unpack_from("=I", request, 8)
        return struct.pack("=IIIIHHII", 7, 31, read_ahead, 0, 12, 10, _SIZE_BYTES, 1).ljust(
            64, b"\0"
        )
    if operation == _LOOKUP:
        return struct.pack("=QQQQII", _FILE, 0, 60, 60, 0, 0) + _attributes(_FILE)
    if operation == _GETATTR:
        return struct.pack("=QII", 60, 0, 0) + _attributes(node)
    if operation in (_OPEN, _OPENDIR):
        return struct.pack("=QII", 1, 0, 0)
    return None


def _attributes(node: int) -> bytes:
    mode, size = (0o40755, 0) if node == _FOLDER else (0o100644, _SIZE_BYTES)
    times = (0,) * 6
    return struct.pack("=QQQ3Q3I7I", node, size, 1, *times, mode, 1, 0, 0, 0, _SIZE_BYTES, 0)


if __name__ == "__main__":
    _serve(sys.argv[1])
