"""What the modules of a script do outside of their own process while they are imported.

A module that writes a file, starts a process or connects at its import would do so in the spare,
which may never be used. Python's audit events are raised before the act: the first act of this kind
is refused, and with it the spare. So the act never happens here.

Installed packages may do so. They have done the same in the first process, for caches of their own
mostly, and their code is not the script's. Whatever still runs or is open after the imports is
found by `found_alive`, independent of what started it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from types import FrameType
from typing import Any

_ACTS = {
    "_thread.start_joinable_thread": "starts a thread",
    "_thread.start_new_thread": "starts a thread",
    "builtins.input": "asks for input",
    "os.chdir": "changes the working folder",
    "os.chmod": "changes a file",
    "os.exec": "starts a program",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.kill": "sends a signal",
    "os.killpg": "sends a signal",
    "os.link": "makes a file",
    "os.mkdir": "makes a folder",
    "os.posix_spawn": "starts a process",
    "os.remove": "removes a file",
    "os.rename": "moves a file",
    "os.rmdir": "removes a folder",
    "os.symlink": "makes a link",
    "os.system": "starts a program",
    "os.truncate": "changes a file",
    "os.utime": "changes a file",
    "socket.bind": "listens on a socket",
    "socket.connect": "connects to another process",
    "socket.sendmsg": "sends to another process",
    "socket.sendto": "sends to another process",
    "subprocess.Popen": "starts a program",
}
_READS = ("os.listdir", "os.scandir")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_IMPORTING = "<frozen importlib"
_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120  no pathlib before the script's
_HERE = __file__.rpartition("_supervise")[0]
_WORK_SECONDS = 0.01  # of imports, then a pause
_PAUSE_RATIO = 1.0


class SpareRefused(BaseException):
    """The spare cannot be used. Not an Exception: the module may catch those."""


class ImportAudit:
    """Watches the imports of a spare; `close` before the script goes on."""

    def __init__(self) -> None:
        self.why = ""  # it was refused, even if the module has caught that
        self.files: dict[str, tuple[int, ...] | None] = {}  # that the script's modules have read
        self._is_open = True
        self._paused_at = time.process_time()
        sys.addaudithook(self._observe)  # cannot be removed

    def close(self) -> None:
        self._is_open = False

    def _observe(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_open:
            return
        if event == "import":
            self._pause()
        elif event == "open":
            self._observe_open(*arguments)
        elif event in _ACTS and (frame := _responsible()) is not None:
            self._refuse(frame, _ACTS[event])
        elif event in _READS and _responsible() is not None:
            self._add_file(arguments[0])

    def _observe_open(self, path: object, mode: object, flags: object) -> None:
        writes = isinstance(flags, int) and bool(flags & _WRITING)
        if path == os.devnull or (frame := _responsible()) is None:
            return
        if writes or (isinstance(mode, str) and set(mode) & set("wax+")):
            self._refuse(frame, f"writes to {path}")
        self._add_file(path)

    def _add_file(self, path: object) -> None:
        if isinstance(path, str | os.PathLike):
            name = os.path.abspath(path)  # noqa: PTH100  as above
            self.files.setdefault(name, signature(name))

    def _refuse(self, frame: FrameType, act: str) -> None:
        place = os.path.basename(frame.f_code.co_filename)  # noqa: PTH119  as above
        self.why = self.why or f"{place}, line {frame.f_lineno}, {act} while it is imported"
        raise SpareRefused(self.why)

    def _pause(self) -> None:
        """Leave the processors to the training.

        A higher nice value could not be lowered again, and native threads inherit it.
        """
        spent = time.process_time() - self._paused_at
        if spent > _WORK_SECONDS:
            time.sleep(min(1.0, spent * _PAUSE_RATIO))
            self._paused_at = time.process_time()


def is_installed(path: str) -> bool:
    """Whether a file belongs to Python or to an installed package, and not to the script."""
    inside = path.startswith((_STANDARD, _HERE)) and "/site-packages/" not in path
    return inside or "/site-packages/" in path or "/dist-packages/" in path


def signature(path: str) -> tuple[int, ...] | None:
    """Changes with the content of a file or folder; None if it is not there, or no such."""
    with contextlib.suppress(OSError, ValueError):
        found = os.stat(path)  # noqa: PTH116  as above
        if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
            return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
    return None


def found_alive(before: dict[int, str]) -> str:
    """What the imports have left running or open, in words; empty if nothing."""
    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
        names = [each.name for each in threading.enumerate()[1:]]
        return f"a thread is left running by the imports ({', '.join(names)})"
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "a process is left running by the imports"
    for number, name in open_files().items():
        if before.get(number) != name and (name.startswith("socket:") or _is_written(number)):
            return f"{name} is left open by the imports"
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "the imports have initialized CUDA"
    jax = sys.modules.get("jax._src.xla_bridge")
    if jax is not None and getattr(jax, "_backends", None):
        return "the imports have initialized the devices of JAX"
    return ""


def open_files() -> dict[int, str]:
    """What each descriptor is open on."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  as above
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115  as above
    return found


def _is_written(number: int) -> bool:
    import fcntl

    with contextlib.suppress(OSError):
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
        mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
        return is_file and mode != os.O_RDONLY and os.fstat(number).st_nlink > 0
    return False


def _responsible() -> FrameType | None:
    """The frame of the script's own module that acts; None if an installed package does so while
    it is imported itself."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_IMPORTING):
            return None
        if not name.startswith("<") and not is_installed(name):
            return frame
        frame = frame.f_back
    return None
