"""A small program that prints facts about the machine as JSON; `check.Question` starts it.

    python -I -S machine_facts.py place PATH
    python -I -S machine_facts.py speed FOLDER BYTES SECONDS
    python -I -S machine_facts.py gpus

It imports nothing of holdfast, so it starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# -- place: what a path is, and what its file system has -------------------------------------------


def describe_place(path: str) -> dict[str, Any]:
    """A small file is made in the folder and removed."""
    found: dict[str, Any] = {"kind": "missing", "error": None}
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
    # The nearest folder that exists: the rest of the path would be made in it.
    places = (whole, *whole.parents)
    base = next((each for each in places if os.path.isdir(each)), Path("/"))  # noqa: PTH112  never raises
    found["base"] = str(base.resolve())
    with contextlib.suppress(OSError, AttributeError):
        room = os.statvfs(base)
        found["free"] = room.f_bavail * room.f_frsize
        found["free_inodes"] = room.f_favail if room.f_files else None
        found["is_read_only"] = bool(room.f_flag & getattr(os, "ST_RDONLY", 1))
    return found | _try_to_write(base)


def _part_name(folder: Path) -> Path:
    return folder / f".doctor.{os.getpid()}-{os.urandom(4).hex()}.part"


def _try_to_write(folder: Path) -> dict[str, Any]:
    """Whether a file can be made there."""
    name = _part_name(folder)
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, b"x")
        finally:
            os.close(descriptor)
            name.unlink()
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "")
        return {"is_writable": False, "refusal": error.strerror or str(error), "code": code}
    return {"is_writable": True}


# -- speed: how fast the file system takes a checkpoint --------------------------------------------
_CHUNK = 1 << 20
# fsync after the first part, then after twice as much each time: a slow disk gives a result in
# time, and a fast one is not slowed down.
_FIRST_PART, _LARGEST_PART = 1 << 20, 64 << 20


def measure_speed(folder: str, most_bytes: str, seconds: str) -> Iterator[dict[str, Any]]:
    """The durable bytes and the time so far, after each part.

    The file is unlinked before its first byte is written, so nothing is left however this ends.
    """
    name, most = _part_name(Path(folder)), int(most_bytes)
    # Random bytes: a file system that compresses would store zeros for free.
    chunk = os.urandom(min(_CHUNK, most))
    written, part = 0, _FIRST_PART
    descriptor = -1
    began = time.perf_counter()
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # some file systems refuse it while the file is open
            name.unlink()
        while written < most and time.perf_counter() - began < float(seconds):
            until = min(most, written + part)
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


# -- gpus: what NVIDIA's library says --------------------------------------------------------------
_UNCORRECTED, _SINCE_REBOOT = 1, 0


class _GpuMemory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def describe_gpus() -> dict[str, Any]:
    """{"driver", "gpus": [{"index", "name", "used", "total", …}], "error"}."""
    found: dict[str, Any] = {"driver": None, "gpus": []}
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        status = library.nvmlInit_v2()
        if status:
            return {**found, "error": _nvml_error(library, status)}
        text = ctypes.create_string_buffer(96)
        if not library.nvmlSystemGetDriverVersion(text, 96):
            found["driver"] = text.value.decode(errors="replace")
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        found["gpus"] = [_describe_gpu(library, index) for index in range(count.value)]
    except OSError:
        return found  # there is no such library
    except AttributeError:
        return {"driver": None, "gpus": [], "error": "too old"}
    return found


def _describe_gpu(library: Any, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "name": "", "used": None, "total": None, "ecc": None}
    device = ctypes.c_void_p()
    status = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
    if status:
        return {**found, "error": _nvml_error(library, status)}
    text = ctypes.create_string_buffer(96)
    if not library.nvmlDeviceGetName(device, text, 96):
        found["name"] = text.value.decode(errors="replace")
    memory = _GpuMemory()
    if not library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        found["used"], found["total"] = memory.used, memory.total
    errors = ctypes.c_ulonglong()
    count_errors = library.nvmlDeviceGetTotalEccErrors
    if not count_errors(device, _UNCORRECTED, _SINCE_REBOOT, ctypes.byref(errors)):
        found["ecc"] = errors.value
    return found


def _nvml_error(library: Any, status: int) -> str:
    library.nvmlErrorString.restype = ctypes.c_char_p
    return bytes(library.nvmlErrorString(status) or b"").decode(errors="replace")


def _main(kind: str, *words: str) -> None:
    found: Any = {"place": describe_place, "gpus": describe_gpus, "speed": measure_speed}
    facts = found[kind](*words)
    for each in facts if kind == "speed" else [facts]:
        print(json.dumps(each), flush=True)


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
