"""A small disk of its own for a test, as root: to be filled, emptied and made read-only."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import arena_files


class SmallDisk:
    """A mounted tmpfs."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._filler = place / "filler"

    @property
    def free_bytes(self) -> int:
        room = os.statvfs(self.place)
        return room.f_bavail * room.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Write a file until so many bytes are free; who writes beside it may free more again."""
        with self._filler.open("ab", buffering=0) as file:
            for _ in range(100):
                if (size := self.free_bytes - leave_bytes) <= 0:
                    return
                with contextlib.suppress(OSError):  # somebody has just taken a part of it
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)
        raise AssertionError(f"{self.place} is never full")

    def make_room(self) -> None:
        self._filler.unlink()

    def make_read_only(self) -> None:
        """For whoever opens anything from now on; files that are open would forbid a remount.

        The read-only view is made where nobody looks and then laid over the place in one step:
        a file that somebody opens to write in between would forbid it too.
        """
        aside = self.place.with_name(self.place.name + "-read-only")
        aside.mkdir(exist_ok=True)
        _run("mount", "--bind", str(self.place), str(aside))
        _run("mount", "-o", "remount,ro,bind", str(aside))
        _run("mount", "--bind", str(aside), str(self.place))
        _run("umount", str(aside))

    def make_writable(self) -> None:
        _run("umount", str(self.place))


def mount_small_disk(place: Path, size: str) -> Iterator[SmallDisk]:
    """Mount it, lend it, unmount it; the test is skipped where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root: run the tests as root")
    place.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine does not allow to mount a tmpfs ({error}): needs CAP_SYS_ADMIN")
    try:
        yield SmallDisk(place)
    finally:
        for identity in place.glob("**/run.json"):
            # Beside a full disk the last step stays in memory, for a start that no test makes.
            for arena in arena_files(identity.parent):
                arena.unlink(missing_ok=True)
        while place.is_mount():
            # Lazily: a process that is still being ended must not keep its disk mounted.
            _run("umount", "-l", str(place))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
