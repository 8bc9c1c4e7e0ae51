"""Out of GPU memory: how much, by what, and whether it was fragments. And errors of the device."""

from __future__ import annotations

import re

from holdfast import _text
from holdfast._diagnose import advice
from holdfast._diagnose.evidence.case import Case, Finding, Trouble
from holdfast._diagnose.evidence.evidence import Record
from holdfast._diagnose.evidence.memory import tell_graphs
from holdfast._diagnose.verdict import Cause, Sure

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "bytes": 1}
_FIGURES = {
    "tried": r"Tried to allocate ([\d.]+) (\w+)",
    "total": r"total capacity of ([\d.]+) (\w+)|; ([\d.]+) (\w+) total capacity",
    "free": r"of which ([\d.]+) (\w+) is free|; ([\d.]+) (\w+) free",
    "allocated": r"([\d.]+) (\w+) is allocated by PyTorch|([\d.]+) (\w+) already allocated",
    "reserved_unallocated": r"([\d.]+) (\w+) is reserved by PyTorch but unallocated",
}
_FRAGMENTED = 0.15  # of all memory, reserved and not used


def judge_cuda_oom(case: Case, trouble: Trouble) -> Finding:
    """The GPU's memory was full, for PyTorch."""
    noted = _text.record(trouble.record.get("gpu"))
    figures = _figures(trouble, noted)
    tried, total = figures.get("tried"), figures.get("total")
    allocated, free = figures.get("allocated"), figures.get("free")
    idle = figures.get("reserved_unallocated")
    evidence = trouble.evidence(case)
    parts = []
    if allocated is not None and total:
        parts.append(f"PyTorch had {_text.size_of(allocated, total)} allocated")
    if idle is not None:
        parts.append(f"{_text.size(idle)} were reserved and not in use")
    if free is not None:
        parts.append(f"{_text.size(free)} were free")
    if parts:
        evidence.append(", ".join(parts))
    evidence += _largest(noted)
    is_fragmented = bool(
        idle and ((tried and idle >= tried) or (total and idle > _FRAGMENTED * total))
    )
    if is_fragmented:
        evidence.append("so there was room, but in pieces: fragmentation")
    graphs = tell_graphs(_text.records(trouble.record.get("graphs")))
    evidence += graphs
    device = noted.get("device")
    which = f" {device}" if isinstance(device, int) and not isinstance(device, bool) else ""
    asked = f": {_text.size(tried)} more did not fit" if tried else ""
    of = f" into its {_text.size(total)}" if total and tried else ""
    sentence = f"{case.opening} ran out of memory of its GPU{which}{asked}{of}."
    advised = advice.cuda_memory(case, is_fragmented=is_fragmented, keeps_graphs=bool(graphs))
    return Finding(Cause.CUDA_OOM, sentence, _how_sure(case, trouble), evidence, advised)


def _how_sure(case: Case, trouble: Trouble) -> Sure:
    """A line in a log may be about anything; an exception, or a line before a failure, is not."""
    is_only_a_line = trouble.fault is None and case.end.status is None
    return Sure.LIKELY if is_only_a_line else Sure.CERTAIN


def _figures(trouble: Trouble, noted: Record) -> dict[str, int]:
    """In bytes: as the trainer noted them, else as the message has them."""
    found: dict[str, int] = {}
    for key, shape in _FIGURES.items():
        match = re.search(shape, trouble.message)
        groups = [g for g in match.groups() if g] if match else []
        if len(groups) == 2 and groups[1] in _UNITS and re.fullmatch(r"\d+(\.\d+)?", groups[0]):
            found[key] = int(float(groups[0]) * _UNITS[groups[1]])
    for source in (trouble.details, noted):
        for key in _FIGURES:
            value = _text.whole(source.get(key))
            if value is not None and value >= 0:
                found[key] = value
    cached = _text.whole(noted.get("cached_free"))
    allocated, reserved = _text.whole(noted.get("allocated")), _text.whole(noted.get("reserved"))
    if cached is not None and cached >= 0:
        found["reserved_unallocated"] = cached
    elif allocated is not None and reserved is not None and reserved >= allocated:
        found["reserved_unallocated"] = reserved - allocated
    return found


def _largest(noted: Record) -> list[str]:
    told = []
    for each in _text.records(noted.get("largest"))[:5]:
        size, number = _text.whole(each.get("bytes")), _text.whole(each.get("count")) or 1
        if size is None or size < 0:
            continue
        shape = each.get("shape")
        shown = "×".join(map(str, shape[:8])) if isinstance(shape, list) else ""
        name = _text.one_line(str(each.get("name") or "without a name"), 60)
        times = f"{number} of " if number > 1 else ""
        kind = _text.one_line(str(each.get("dtype") or ""), 20).removeprefix("torch.")
        told.append(f"{times}{name} {shown} {kind}".strip() + f": {_text.size(size)}")
    return [f"the largest tensors: {'; '.join(told)}"] if told else []


def judge_cuda_error(case: Case, trouble: Trouble) -> Finding:
    """The device itself failed, or was made to."""
    sentence = f"The GPU of {case.who} reported an error: {_text.one_line(trouble.said, 160)}."
    sure = _how_sure(case, trouble)
    return Finding(
        Cause.CUDA_ERROR, sentence, sure, trouble.evidence(case), advice.cuda_error(case)
    )
