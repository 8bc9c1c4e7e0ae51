"""A real memory cgroup with a limit, for processes that are to meet their end in it."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ENTER = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'


@dataclass(frozen=True)
class LimitedMemory:
    """A cgroup below our own, and what the kernel says of it."""

    folder: Path
    version: int

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words before a command that is to run in it from its first instruction on."""
        return ("sh", "-c", _ENTER, "sh", str(self.folder))

    def enter(self, pid: int) -> None:
        """Move a process in; what it has used before stays charged where it was."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def allow_swap(self) -> None:
        """What does not fit goes to swap, where there is some."""
        name = "memory.memsw.limit_in_bytes" if self.version == 1 else "memory.swap.max"
        (self.folder / name).write_text("-1" if self.version == 1 else "max")

    def pids(self) -> list[int]:
        return [int(word) for word in (self.folder / "cgroup.procs").read_text().split()]

    def used_bytes(self) -> int:
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int((self.folder / name).read_text())

    def oom_kills(self) -> int:
        """How many processes in it the kernel has killed for want of memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        lines = (self.folder / name).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])


@contextlib.contextmanager
def limited_memory(limit_bytes: int) -> Iterator[LimitedMemory]:
    """Make such a cgroup, without swap; it is removed at the end, when its processes are gone."""
    found = _parent()
    assert found is not None, why_not()
    parent, version = found
    group = LimitedMemory(parent / f"holdfast-test-{os.getpid()}-{uuid.uuid4().hex[:8]}", version)
    group.folder.mkdir()
    try:
        if version == 1:
            (group.folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
            with contextlib.suppress(OSError):  # of a kernel that does not count swap
                (group.folder / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
        else:
            (group.folder / "memory.max").write_text(str(limit_bytes))
            with contextlib.suppress(OSError):
                (group.folder / "memory.swap.max").write_text("0")
        yield group
    finally:
        _remove(group.folder)


def why_not() -> str | None:
    """The reason for a skip: why no such cgroup can be made here; None if it can."""
    if os.getuid() != 0:
        return "only root can make a memory cgroup here"
    if _parent() is None:
        return "there is no memory cgroup (v1, or v2 with the controller on) to write to"
    return None


def _parent() -> tuple[Path, int] | None:
    """The folder in which a cgroup with a limit can be made, and the version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            own = Path("/sys/fs/cgroup/memory") / path.lstrip("/")
            return (own, 1) if _can_write(own) else None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if not line.startswith("0::"):
            continue
        top = Path("/sys/fs/cgroup")
        own = top / line[3:].lstrip("/")
        # Not always in our own: a cgroup of v2 that has processes has no controlled children.
        for folder in (own, *own.parents):
            with contextlib.suppress(OSError):
                on = (folder / "cgroup.subtree_control").read_text().split()
                if "memory" in on and _can_write(folder):
                    return folder, 2
            if folder == top:
                break
    return None


def _can_write(folder: Path) -> bool:
    return (folder / "cgroup.procs").exists() and os.access(folder / "cgroup.procs", os.W_OK)


def _remove(folder: Path, seconds: float = 20.0) -> None:
    # The kernel takes a moment to let go of a cgroup whose last process was killed.
    deadline = time.monotonic() + seconds
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


# -- freezing ---------------------------------------------------------------------------


@contextlib.contextmanager
def freezer() -> Iterator[Freezer]:
    """A cgroup whose processes can be frozen; at the end they are let go, and it is removed."""
    found = _freezing_parent()
    assert found is not None, why_no_freezer()
    parent, version = found
    group = Freezer(parent / f"holdfast-test-{os.getpid()}-{uuid.uuid4().hex[:8]}", version)
    group.folder.mkdir()
    try:
        yield group
    finally:
        group.thaw()
        for pid in (group.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (parent / "cgroup.procs").write_text(pid)
        _remove(group.folder)


@dataclass(frozen=True)
class Freezer:
    """A cgroup below our own."""

    folder: Path
    version: int

    def freeze(self, pid: int) -> None:
        """Move a process in, alone, and let it do nothing any more."""
        (self.folder / "cgroup.procs").write_text(str(pid))
        self._write("FROZEN", "1")

    def thaw(self) -> None:
        self._write("THAWED", "0")

    def _write(self, first: str, second: str) -> None:
        name, word = ("freezer.state", first) if self.version == 1 else ("cgroup.freeze", second)
        (self.folder / name).write_text(word)


def why_no_freezer() -> str | None:
    """The reason for a skip: why nothing can be frozen here; None if it can."""
    if os.getuid() != 0:
        return "only root can freeze a cgroup here"
    if _freezing_parent() is None:
        return "there is no cgroup (v1 with a freezer, or v2) to write to"
    return None


def _freezing_parent() -> tuple[Path, int] | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own = Path("/sys/fs/cgroup/freezer") / path.lstrip("/")
        if "freezer" in controllers.split(",") and _can_write(own):
            return own, 1
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        own = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
        # The topmost of all cannot be frozen, but what is made below it can.
        if line.startswith("0::") and _can_write(own):
            return own, 2
    return None
