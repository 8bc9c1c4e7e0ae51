"""Whether somebody has frozen the cgroup of a process: it is not stuck, it is not let run."""

from __future__ import annotations

from holdfast._watch.cgroup import find_folder
from holdfast._watch.proc import field, read_bytes


def is_frozen(pid: int, root: str = "/") -> bool:
    """By the freezer of version 1 or by version 2, its own cgroup or one above."""
    root = root.rstrip("/")
    for version, controller in ((1, "freezer"), (2, "")):
        folder = find_folder(pid, version, controller, root)
        if folder is None:
            continue
        # Both files tell of what holds for this cgroup, even if one above was frozen.
        if version == 1 and (read_bytes(f"{folder}/freezer.state") or b"THAWED")[:6] != b"THAWED":
            return True
        if version == 2 and field(read_bytes(f"{folder}/cgroup.events") or b"", b"frozen ") == 1:
            return True
    return False
