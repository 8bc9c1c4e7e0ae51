"""A small /dev/shm of its own for a command, as in a container."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def small_shm(size: str) -> tuple[str, ...]:
    """The words before a command that is to have one of this size."""
    program = 'mount -t tmpfs -o "size=$1" tmpfs /dev/shm && shift && exec "$@"'
    private = ("unshare", "--mount", "--propagation", "private")
    return (*private, "sh", "-c", program, "sh", size)


def _why_not() -> str | None:
    if shutil.which("unshare") is None:
        return "unshare is missing: apt install util-linux"
    if subprocess.run([*small_shm("1m"), "true"], capture_output=True, check=False).returncode != 0:
        return f"no private mounts for uid {os.getuid()}: run the tests as root"
    return None


needs_namespace = pytest.mark.skipif(_why_not() is not None, reason=_why_not() or "")
