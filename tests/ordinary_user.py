"""Commands as a user that is not root, for tests that run as root."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support import wait_for_keeper_gone

UID = 65534
_BECOME = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--")


def _closed_folder() -> Path | None:
    """The folder above the interpreter that only root may enter, if there is one."""
    real = Path(sys.executable).resolve()
    closed = [p for p in real.parents if not p.stat().st_mode & stat.S_IXOTH]
    return closed[-1] if closed else None


def as_user() -> tuple[str, ...]:
    """The words that run a command as the ordinary user, who can read the interpreter."""
    closed = _closed_folder()
    if closed is None:
        return _BECOME
    # Python lies in root's home: show it there to this one process, in mounts of its own.
    inside = Path(sys.base_prefix).resolve()
    program = (
        'set -e; hold=$(mktemp -d); mount --bind "$2" "$hold"; '
        'mount -t tmpfs -o mode=755 tmpfs "$1"; mkdir -p "$2"; mount --move "$hold" "$2"; '
        'rmdir "$hold"; shift 2; exec "$@"'
    )
    private = ("unshare", "--mount", "--propagation", "private", "sh", "-c", program, "sh")
    return (*private, str(closed), str(inside), *_BECOME)


@functools.cache
def why_no_user() -> str | None:
    """Why nothing can be run as the ordinary user here; None if it can."""
    if os.getuid() != 0:
        return "only root can become another user; as an ordinary user all other tests show it"
    if shutil.which("setpriv") is None:
        return "setpriv is missing: apt install util-linux"
    command = [*as_user(), sys.executable, "-c", "import numpy, holdfast"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"uid {UID} cannot run this Python: {tried.stderr.strip()[-200:]}"
    return None


@contextlib.contextmanager
def home_of_user() -> Iterator[Path]:
    """A folder of the ordinary user, who cannot enter pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="holdfast-user-"))
    os.chown(path, UID, UID)
    try:
        yield path
    finally:
        wait_for_keeper_gone(path)
        shutil.rmtree(path)
