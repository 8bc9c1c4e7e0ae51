"""The run folder: its file system, permission, room and speed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast._environment.processes.cgroup import decode_mount
from holdfast._environment.processes.proc import read_bytes
from holdfast._text import duration, size
from holdfast._tools.doctor.check import Check

_REMOTE = frozenset([
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs3", "nfs4",
    "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "virtiofs", "wekafs",
])  # fmt: skip
_IN_MEMORY = frozenset(["tmpfs", "ramfs", "devtmpfs"])
_OF_CONTAINER = frozenset(["overlay", "aufs"])

Facts = Mapping[str, Any]  # what `probe_program place` has printed


@dataclass(frozen=True)
class Mount:
    place: str
    kind: str  # ext4, nfs4, …
    source: str
    options: frozenset[str]

    @property
    def is_remote(self) -> bool:
        return self.kind in _REMOTE or (self.kind.startswith("fuse") and ":" in self.source)


def find_mount(path: str, table: str | None = None) -> Mount | None:
    """The mount of a real path; `table` replaces that of this process."""
    if table is None:
        table = (read_bytes("/proc/self/mountinfo") or b"").decode(errors="replace")
    best: Mount | None = None
    for line in table.splitlines():
        before, _, behind = line.partition(" - ")
        words, kind = before.split(), behind.split()
        if len(words) < 6 or len(kind) < 3:
            continue
        place = decode_mount(words[4])
        if place != "/" and path != place and not path.startswith(place + "/"):
            continue
        # Of two mounts on one place, the later one hides the earlier one.
        if best is None or len(place) >= len(best.place):
            options = frozenset([*words[5].split(","), *kind[2].split(",")])
            best = Mount(place, kind[0], kind[1], options)
    return best


def judge_folder(name: str, facts: Facts | None, mount: Mount | None = None) -> Check:
    """Whether a run can be stored there; without facts, the file system did not answer."""
    if facts is None:
        which = "" if mount is None else f" ({mount.kind} from {mount.source})"
        found = f"{name}: the file system{which} does not answer; it blocks every process"
        remedy = f"df {shlex.quote(name)}   (if that hangs too, mount it again)"
        return Check("run folder", "fail", found, remedy)
    data = {key: facts.get(key) for key in ("kind", "base", "is_writable")}
    check = partial(Check, "run folder", data=data)
    base = shlex.quote(str(facts.get("base")))
    if facts.get("kind") == "closed":
        remedy = f"ls -ld {base}   (shows who may), or use another folder"
        return check("fail", f"{name}: cannot be entered ({facts.get('error')})", remedy)
    if facts.get("is_read_only"):
        remedy = f"mount -o remount,rw {base}   (as root), or use another folder"
        return check("fail", f"{name}: is on a read-only file system", remedy)
    if not facts.get("is_writable"):
        remedy = f"chown $USER {base}   (as its owner or root), or use another folder"
        if facts.get("code") in ("ENOSPC", "EDQUOT"):
            clean = f"holdfast clean {shlex.quote(name)}"
            remedy = f"{clean}   (removes what no run needs), or make room"
        return check("fail", f"{name}: cannot be written ({facts.get('refusal')})", remedy)
    if facts.get("kind") == "folder":
        return check("ok", f"{name}: can be written")
    first = f"{name}: is not there yet; the first start makes it, in {facts.get('base')}"
    return check("ok", first)


def judge_file_system(name: str, mount: Mount | None) -> Check | None:
    if mount is None:
        return None
    data = {"type": mount.kind, "mount": mount.place, "is_remote": mount.is_remote}
    check = partial(Check, "file system", data=data)
    where = f"{name} is on {mount.kind}"
    if mount.kind in _IN_MEMORY:
        found = f"{where}, that is in memory: every checkpoint is lost when the machine restarts"
        return check("warn", found, "choose a run folder on a disk")
    if mount.kind in _OF_CONTAINER:
        found = f"{where}, the container's own layer: every checkpoint goes with the container"
        remedy = "docker run -v /data/runs:/runs …   (and a run folder below /runs)"
        return check("warn", found, remedy)
    if not mount.is_remote:
        return check("ok", f"{where}, local")
    found = f"{where}, from {mount.source}"
    if mount.kind.startswith("nfs") and mount.options & {"soft", "softerr"}:
        remedy = f"mount -o remount,hard {shlex.quote(mount.place)}   (as root)"
        found += ", mounted soft: when the server is slow, writes fail instead of waiting"
        return check("warn", found, remedy)
    return check("ok", f"{found}: seen by all nodes, as fast as measured")


# -- Room for checkpoints, and the time to write one -----------------------------------------------
MOST_BYTES = 256 << 20
LEAST_BYTES = 32 << 20  # with less, a cache is measured and not the disk
WRITE_SECONDS = 2.0
_LITTLE_ROOM = 1 << 30
_FEW_INODES, _TOO_FEW_INODES = 1000, 50
_SLOW_BYTES_PER_SECOND = 20e6


@dataclass(frozen=True)
class Grace:
    """The time from a signal until SIGKILL, and its source."""

    seconds: float
    by: str
    shorter: Grace | None = None  # of another kind of end, with a shorter warning


def bytes_to_write(state: int | None, free: int | None) -> int:
    """Enough to measure the speed, and never so much that the disk is full."""
    wanted = MOST_BYTES if state is None else min(MOST_BYTES, max(LEAST_BYTES, state))
    return wanted if free is None else max(0, min(wanted, free // 4))


def judge_room(
    free: int | None, inodes: int | None, state: int | None, kept: int, held: int
) -> Check | None:
    """Room for the checkpoints that a run keeps and the one being written.

    `held` is what the run's checkpoints take already: it becomes free as old ones are removed.
    """
    if free is None:
        return None
    data = {"free": free, "free_inodes": inodes, "state": state, "kept": kept, "held": held}
    check = partial(Check, "disk room", data=data)
    left = f"{size(free)} free"
    if inodes is not None and inodes < _FEW_INODES:
        found = f"{inodes} more files can be made, though {size(free)} are free"
        remedy = "df -i .   (many small files use up the inodes)"
        return check("fail" if inodes < _TOO_FEW_INODES else "warn", found, remedy)
    if state is None:
        if free < _LITTLE_ROOM:
            found = f"{left}; how much a checkpoint takes is not known yet"
            return check("warn", found, "holdfast clean   (or make room)")
        most = size(free // (kept + 1))
        return check("ok", f"{left}: {kept + 1} checkpoints of up to {most} fit")
    if free < state:
        remedy = "holdfast clean   (removes what no run needs), or make room"
        return check("fail", f"{left}, and one checkpoint takes {size(state)}", remedy)
    needed = max(0, (kept + 1) * state - held)
    checkpoints = f"{kept} kept checkpoints of {size(state)}"
    if free < needed:
        found = f"{left}, and {checkpoints} and the one being written need {size(needed)}"
        remedy = "holdfast clean   (or make room, or holdfast.Settings(keep_last=1))"
        return check("warn", found, remedy)
    return check("ok", f"{left}: {checkpoints} and the next one fit")


def judge_speed(
    measured: Facts | None, state: int | None, grace: Grace, taken_seconds: float | None = None
) -> Check:
    """A save against the grace; `taken_seconds` is the longest recent save of the run."""
    facts = measured or {}
    written, seconds = int(facts.get("bytes") or 0), float(facts.get("seconds") or 0.0)
    data = {"bytes": written, "seconds": round(seconds, 3), "state": state}
    data |= {"grace_seconds": grace.seconds, "save_seconds": taken_seconds}
    check = partial(Check, "write speed", data=data)
    if facts.get("error"):
        data["error"] = facts["error"]
        found = f"writing failed after {size(written)}: {facts['error']}"
        return check("fail", found, "df -h .   (a quota or a full disk says so there)")
    if not written or seconds <= 0:
        found = f"the disk did not take a file within {WRITE_SECONDS + 1.5:.0f} s"
        return check("fail", found, "use a run folder on another disk")
    speed = written / seconds
    data["bytes_per_second"] = round(speed)
    fast = f"{size(speed)}/s with fsync"
    allowed = f"{duration(grace.seconds)} of grace ({grace.by})"
    if state is None:
        most = speed * grace.seconds
        if speed < _SLOW_BYTES_PER_SECOND:
            found = f"{fast}: in the {allowed} {size(most)} are written"
            return check("warn", found, "use a run folder on a faster disk")
        found = f"{fast}: a state of up to {size(most / 2)} fits well into the {allowed}"
        return check("ok", found)
    needed = state / speed
    how = f"{fast}, so {size(state)} take {duration(needed)}"
    if taken_seconds is not None and taken_seconds > needed:
        needed = taken_seconds
        how = f"{fast}, and a save of this run took {duration(taken_seconds)}"
    data["needed_seconds"] = round(needed, 3)
    found = f"{how}; the grace is {duration(grace.seconds)} ({grace.by})"
    lead = max(30, int(-(-3 * needed // 10) * 10))
    remedy = (
        f"be warned earlier: holdfast submit --lead {lead} …, docker stop -t {lead}, "
        f"terminationGracePeriodSeconds: {lead}; or use a faster disk"
    )
    if needed > grace.seconds:
        return check("fail", f"{found}: a save does not fit", remedy)
    if grace.shorter is not None and needed > grace.shorter.seconds:
        less = f"only {duration(grace.shorter.seconds)} by {grace.shorter.by}"
        return check("warn", f"{found}, but {less}", remedy)
    if needed > grace.seconds / 2:  # the current step has to end first
        return check("warn", f"{found}: a save fits only if the step ends soon", remedy)
    return check("ok", found)
