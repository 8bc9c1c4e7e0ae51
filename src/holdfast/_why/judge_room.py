"""No room: in /dev/shm, or on a disk, which `torch.save` never says."""

from __future__ import annotations

import re

from holdfast._why import advice, words
from holdfast._why.case import Case, Finding
from holdfast._why.evidence import Record
from holdfast._why.memory import last_use
from holdfast._why.trouble import Trouble
from holdfast._why.verdict import Cause, Sure

_FULL_BYTES = 64 << 20
_FULL_SHARE = 0.01
_PATH = re.compile(r"'([^'\n]{1,400})'")


def judge_shm(case: Case, trouble: Trouble) -> Finding:
    """/dev/shm has no room for another batch."""
    use = last_use(case.end.memory)
    noted = words.record(trouble.record.get("shm"))
    free, total = words.whole(noted.get("free")), words.whole(noted.get("total"))
    evidence = trouble.evidence(case)
    size = ""
    if total:
        size = f" (it has {words.size(total)})"
    if free is not None and total:
        evidence.append(f"/dev/shm had {words.size_of(free, total)} free then")
    if use.shm_free is not None:
        evidence.append(
            f"at the last look it had {words.size(use.shm_free)} free"
            + (f", {words.size(use.shm)} were in use" if use.shm is not None else "")
        )
    evidence.append("the room is free again once the process is gone, so df shows nothing now")
    return Finding(
        Cause.SHM_FULL,
        f"/dev/shm was full{size}, and {case.who} could not hand over a batch.",
        Sure.LIKELY,
        evidence,
        advice.shm_full(case),
    )


def judge_disk(case: Case, trouble: Trouble) -> Finding:
    """A disk, a quota or the inodes are used up."""
    said = trouble.message
    disks = words.records(trouble.record.get("disks"))
    full = [disk for disk in disks if _is_full(disk)]
    evidence = trouble.evidence(case)
    for disk in full or disks[:3]:
        evidence.append(_tell(disk))
    told = re.search(r"No space left|quota exceeded|Errno (?:28|122)\b", said, re.IGNORECASE)
    is_quota = "quota" in said.lower() or "Errno 122" in said
    named = _PATH.search(said)
    path = words.text(full[0].get("path")) if full else (named[1] if named else "")
    where = f" ({path})" if path else ""
    what = "A quota" if is_quota else "A disk"
    if told:
        sentence, sure = f"{what} was full{where}, and {case.who} could not write.", Sure.CERTAIN
        if trouble.fault is None and case.end.status is None:
            sure = Sure.LIKELY  # a line in a log may be about anything
    elif full:
        sentence = f"A disk was full{where}: what {case.who} wrote was cut short."
        sure = Sure.LIKELY
    else:
        sentence = (
            f"A file that {case.who} wrote was cut short, as on a full disk or beyond a quota."
        )
        sure = Sure.LIKELY
        evidence.append(
            "torch.save never says that a disk is full; that room was short could not be seen"
            if not disks
            else "there is room on the disks now: it may have been freed, or be another one"
        )
    return Finding(Cause.DISK_FULL, sentence, sure, evidence, advice.disk_full(case, path))


def _is_full(disk: Record) -> bool:
    free, total = words.whole(disk.get("free")), words.whole(disk.get("total"))
    if words.whole(disk.get("free_inodes")) == 0:
        return bool(total)
    if free is None:
        return False
    return free < min(_FULL_BYTES, _FULL_SHARE * total if total else _FULL_BYTES) or free == 0


def _tell(disk: Record) -> str:
    free, total = words.whole(disk.get("free")), words.whole(disk.get("total"))
    path = words.one_line(str(disk.get("path")), 120)
    room = f"{words.size_of(free, total)} free" if free is not None and total else "room unknown"
    inodes = words.whole(disk.get("free_inodes"))
    return f"{path} had {room}" + (", and no inode left" if inodes == 0 and total else "")
