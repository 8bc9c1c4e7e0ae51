"""Where the run folder, the home and the temporary files are: on which file system, and whether
they can be written to."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast._environment.processes.proc import read_bytes
from holdfast._tools.doctor.finding import Check

_REMOTE = frozenset([
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs3", "nfs4",
    "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "virtiofs", "wekafs",
])  # fmt: skip
_IN_MEMORY = frozenset(["tmpfs", "ramfs", "devtmpfs"])
_OF_CONTAINER = frozenset(["overlay", "aufs"])
# The socket of a worker lies in TMPDIR, and its whole name may have 107 characters.
_LONGEST_TEMPORARY = 70


@dataclass(frozen=True)
class Mount:
    """One line of the kernel's table."""

    place: str
    kind: str  # ext4, nfs4, …
    source: str
    options: frozenset[str]

    @property
    def is_remote(self) -> bool:
        return self.kind in _REMOTE or (self.kind.startswith("fuse") and ":" in self.source)


def find_mount(path: str, table: str | None = None) -> Mount | None:
    """The mount that a real path is on; `table` is another one than that of this process."""
    if table is None:
        table = (read_bytes("/proc/self/mountinfo") or b"").decode(errors="replace")
    best: Mount | None = None
    for line in table.splitlines():
        before, _, behind = line.partition(" - ")
        words, kind = before.split(), behind.split()
        if len(words) < 6 or len(kind) < 3:
            continue
        place = words[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        if place != "/" and path != place and not path.startswith(place + "/"):
            continue
        # Of two on one place, the later one lies on top.
        if best is None or len(place) >= len(best.place):
            options = frozenset([*words[5].split(","), *kind[2].split(",")])
            best = Mount(place, kind[0], kind[1], options)
    return best


def judge_folder(name: str, facts: Mapping[str, Any] | None, mount: Mount | None = None) -> Check:
    """Whether a run can be kept there; without facts, the file system did not answer."""
    if facts is None:
        which = "" if mount is None else f" ({mount.kind} from {mount.source})"
        return Check(
            "run folder",
            "fail",
            f"{name}: the file system{which} does not answer, and holds whoever touches it",
            f"df {shlex.quote(name)}   (if that hangs too, have it mounted anew)",
        )
    data = {key: facts.get(key) for key in ("kind", "base", "is_writable")}
    base = shlex.quote(str(facts.get("base")))
    if facts.get("kind") == "closed":
        return Check(
            "run folder",
            "fail",
            f"{name}: cannot be entered ({facts.get('error')})",
            f"ls -ld {base}   (shows who may), or use another folder",
            data,
        )
    if facts.get("is_read_only"):
        return Check(
            "run folder",
            "fail",
            f"{name}: is on a read-only file system",
            f"mount -o remount,rw {base}   (as root), or use another folder",
            data,
        )
    if not facts.get("is_writable"):
        code, said = facts.get("code"), facts.get("refusal")
        remedy = f"chown $USER {base}   (as its owner or root), or use another folder"
        if code in ("ENOSPC", "EDQUOT"):
            remedy = (
                f"holdfast clean {shlex.quote(name)}   (removes what no run needs), or make room"
            )
        return Check("run folder", "fail", f"{name}: cannot be written ({said})", remedy, data)
    if facts.get("kind") == "folder":
        return Check("run folder", "ok", f"{name}: can be written", data=data)
    found = f"{name}: is not there yet; the first start makes it, in {facts.get('base')}"
    return Check("run folder", "ok", found, "", data)


def judge_file_system(name: str, mount: Mount | None) -> Check | None:
    """Whether what is written there stays, and is written in the end."""
    if mount is None:
        return None
    data = {"type": mount.kind, "mount": mount.place, "is_remote": mount.is_remote}
    where = f"{name} is on {mount.kind}"
    if mount.kind in _IN_MEMORY:
        return Check(
            "file system",
            "warn",
            f"{where}, that is in memory: every checkpoint is lost when the machine restarts",
            "choose a run folder on a disk",
            data,
        )
    if mount.kind in _OF_CONTAINER:
        return Check(
            "file system",
            "warn",
            f"{where}, the container's own layer: every checkpoint goes with the container",
            "docker run -v /data/runs:/runs …   (and a run folder below /runs)",
            data,
        )
    if not mount.is_remote:
        return Check("file system", "ok", f"{where}, local", "", data)
    found = f"{where}, from {mount.source}"
    if mount.kind.startswith("nfs") and mount.options & {"soft", "softerr"}:
        return Check(
            "file system",
            "warn",
            f"{found}, mounted soft: when the server is slow, writes fail instead of waiting",
            f"mount -o remount,hard {shlex.quote(mount.place)}   (as root)",
            data,
        )
    if mount.kind.startswith("nfs") and "async" in mount.options and "sync" not in mount.options:
        found += ", mounted async"
    return Check("file system", "ok", f"{found}: seen by all nodes, as fast as measured", "", data)


def judge_home(facts: Mapping[str, Any] | None, mount: Mount | None) -> Check:
    """The home: caches of compilers and records of `holdfast run` are there."""
    if facts is None:
        return Check(
            "home",
            "warn",
            "the home folder does not answer: imports and caches that lie there will hang",
            "export HOME=/tmp/$USER   (for the job), or have it mounted anew",
        )
    free = facts.get("free")
    kind = mount.kind if mount is not None else "unknown"
    is_remote = mount is not None and mount.is_remote
    data = {"type": kind, "is_remote": is_remote, "free": free}
    if facts.get("kind") != "folder":
        return Check(
            "home",
            "warn",
            f"{facts.get('path')}: there is no such folder; `holdfast run` keeps its records there",
            "export HOLDFAST_STATE=/some/folder",
            data,
        )
    if isinstance(free, int) and free < 100 << 20 and not facts.get("is_read_only"):
        return Check(
            "home",
            "warn",
            f"{facts.get('path')}: {free >> 20} MB free; caches of compilers and models go there",
            "export XDG_CACHE_HOME=/a/disk/with/room",
            data,
        )
    where = "remote" if is_remote else "local"
    return Check("home", "ok", f"{facts.get('path')} is on {kind}, {where}", "", data)


def judge_temporary(facts: Mapping[str, Any] | None, mount: Mount | None, name: str) -> Check:
    """TMPDIR: sockets and files of data-loader workers and launchers."""
    kind = mount.kind if mount is not None else "unknown"
    is_remote = mount is not None and mount.is_remote
    data = {"path": name, "type": kind, "is_remote": is_remote}
    remedy = "export TMPDIR=/tmp"
    if facts is None:
        found = f"{name}: the file system does not answer"
        return Check("temporary folder", "fail", found, remedy, data)
    if facts.get("kind") != "folder" or not facts.get("is_writable"):
        why = "is no folder" if facts.get("kind") != "folder" else "cannot be written"
        return Check(
            "temporary folder",
            "fail",
            f"{name}: {why}; workers of data loaders and launchers need it",
            remedy if name != "/tmp" else "chmod 1777 /tmp   (as root)",
            data,
        )
    if len(name) > _LONGEST_TEMPORARY:
        return Check(
            "temporary folder",
            "warn",
            f"its name has {len(name)} characters: sockets below it have names that are too long, "
            "and data-loader workers fail with 'AF_UNIX path too long'",
            remedy,
            data,
        )
    if is_remote:
        return Check(
            "temporary folder",
            "warn",
            f"{name} is on {kind}: sockets and locks of workers are slow there, or fail",
            remedy,
            data,
        )
    free = facts.get("free")
    if isinstance(free, int) and free < 100 << 20:
        found = f"{name}: {free >> 20} MB free"
        return Check(
            "temporary folder",
            "warn",
            found,
            f"du -sh {shlex.quote(name)}/*   (and make room)",
            data,
        )
    return Check("temporary folder", "ok", f"{name} is on {kind}, local", "", data)
