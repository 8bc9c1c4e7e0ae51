"""Prints how fast a file system takes a checkpoint.

A program of its own, see `doctor_question`:

    python -I -S tell_speed.py FOLDER BYTES SECONDS

Written as a checkpoint is, and made durable. The file has no name any more before the first byte
is written, so nothing is left however this ends; on NFS the client removes what it calls .nfs….
After each part that is durable a line is printed: whoever has no time for the next has that.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20
# Made durable after this much, then twice as much, up to the last: a slow disk answers in time,
# and a fast one is not slowed down.
_FIRST_PART, _LARGEST_PART = 1 << 20, 64 << 20


def measure(folder: str, most_bytes: int, seconds: float) -> Iterator[dict[str, Any]]:
    """{"bytes", "seconds", "error"}, of all that is durable so far."""
    name = Path(folder, f".doctor.{os.getpid()}-{os.urandom(4).hex()}.part")
    # Noise: some file systems compress, and zeros would cost them nothing.
    chunk = os.urandom(min(_CHUNK, most_bytes))
    written, part = 0, _FIRST_PART
    descriptor = -1
    began = time.perf_counter()
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # some can only do it at the end
            name.unlink()
        while written < most_bytes and time.perf_counter() - began < seconds:
            until = min(most_bytes, written + part)
            while written < until:
                written += os.write(descriptor, chunk[: until - written])
            os.fsync(descriptor)
            part = min(2 * part, _LARGEST_PART)
            yield {"bytes": written, "seconds": time.perf_counter() - began, "error": None}
    except OSError as failure:
        taken = time.perf_counter() - began
        yield {"bytes": written, "seconds": taken, "error": failure.strerror or str(failure)}
    finally:
        if descriptor >= 0:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            name.unlink()


if __name__ == "__main__":
    try:
        for told in measure(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])):
            print(json.dumps(told), flush=True)
    except KeyboardInterrupt:
        sys.exit(130)
