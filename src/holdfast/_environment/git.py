"""The state of the script's git repository: the commit, and the changes since.

The commit is read from the files of the repository, in microseconds. git itself finds the changes,
which may take seconds in a large repository: the keeper runs it in the background.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._environment.secrets import redact_diff

_MOST_LEVELS = 40
_MOST_REFERENCE_BYTES = 4 << 20  # packed-refs of a large repository
_MOST_DIFF_BYTES = 64 << 10
_ANSWER_SECONDS = 20.0
_HASH = re.compile(r"[0-9a-f]{40,64}")
# Take no lock, and run no program that the repository's settings name.
_ASK = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


def find_repository(folder: Path) -> Path | None:
    for place in (folder, *folder.parents[:_MOST_LEVELS]):
        if (place / ".git").exists():
            return place
    return None


def read_commit(work_tree: Path) -> str | None:
    """The commit that is checked out, from the files of the repository."""
    with contextlib.suppress(OSError, ValueError):
        folder = work_tree / ".git"
        if folder.is_file():  # a linked work tree, or a submodule
            folder = work_tree / _read(folder).removeprefix("gitdir:").strip()
        head = _read(folder / "HEAD").strip()
        if not head.startswith("ref:"):
            return head if _HASH.fullmatch(head) else None
        name = head.removeprefix("ref:").strip()
        shared = folder
        with contextlib.suppress(FileNotFoundError):
            shared = folder / _read(folder / "commondir").strip()
        for place in dict.fromkeys((folder, shared)):
            with contextlib.suppress(FileNotFoundError):
                found = _read(place / name).strip()
                return found if _HASH.fullmatch(found) else None
        for line in _read(shared / "packed-refs").splitlines():
            commit, _, known = line.partition(" ")
            if known == name:
                return commit
    return None


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MOST_REFERENCE_BYTES).decode(errors="replace")


def read_changes(work_tree: Path) -> dict[str, Any]:
    """`dirty`, and the `diff` of tracked files if it is small; empty if git does not answer.

    Lines that may hold a secret are left out of the diff.
    """
    words = ("-C", str(work_tree), "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        with subprocess.Popen(
            [*_ASK, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**variables.child_environment(), "GIT_PAGER": "cat"},
        ) as git:
            timer = threading.Timer(_ANSWER_SECONDS, git.kill)
            timer.daemon = True
            timer.start()
            try:
                assert git.stdout is not None
                found = git.stdout.read(_MOST_DIFF_BYTES + 1)
                if len(found) > _MOST_DIFF_BYTES:
                    git.kill()
                    return {"dirty": True, "diff": None}
                if git.wait(_ANSWER_SECONDS) != 0:
                    return {}
            finally:
                timer.cancel()
        diff = found.decode(errors="replace")
        return {"dirty": bool(diff), "diff": redact_diff(diff) if diff else None}
    return {}
