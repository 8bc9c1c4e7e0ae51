"""Memory before an end: which counters moved, and its use in a few moments."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from holdfast import _text
from holdfast._diagnose.evidence.evidence import Record

_MOMENTS_SECONDS = (600.0, 300.0, 60.0, 10.0)
_NEAR = 0.9  # of the limit: it may have been hit between two samples
_FULL = 0.97  # a group that was killed for its limit may have been charged a little less
_SCARCE = 0.05  # of the machine's memory


@dataclass(frozen=True)
class Moved:
    """How far the counters of OOM kills moved; None where they cannot be read."""

    kills: int | None = None  # of processes of the cgroup, since the last sample
    kills_in_life: int | None = None  # since the start
    hits: int | None = None  # of the limit that is hit first, its own or one above
    peak: int | None = None  # the most that was ever in use there, with page cache
    machine_kills: int | None = None
    limit: int | None = None
    path: str = ""
    values: tuple[int | None, int | None] = (None, None)  # of the cgroup's, before and after

    @property
    def has_hit_limit(self) -> bool | None:
        """None if that is not known."""
        if self.hits:
            return True
        if not self.limit:
            return False
        if self.peak is not None:
            return self.peak >= _FULL * self.limit
        return None if self.hits is None else False

    @property
    def is_known(self) -> bool:
        return self.kills is not None


def moved(counters: Record) -> Moved:
    records = [_text.record(counters.get(key)) for key in ("start", "before", "death")]
    first, then, mine = (_text.record(each.get("cgroup")) for each in records)
    then, before, after = then or first, records[1] or records[0], records[2]
    hits = [_moved(mine, then, key) for key in ("oom", "max")]
    return Moved(
        kills=_moved(mine, then, "oom_kill"),
        kills_in_life=_moved(mine, first, "oom_kill"),
        hits=max((each for each in hits if each is not None), default=None),
        machine_kills=_moved(after, before, "vmstat_oom_kill"),
        peak=_text.whole(mine.get("peak")),
        limit=_text.whole(mine.get("limit")),
        path=_text.text(mine.get("path")),
        values=(_text.whole(then.get("oom_kill")), _text.whole(mine.get("oom_kill"))),
    )


def _moved(after: Record, before: Record, key: str) -> int | None:
    new, old = _text.whole(after.get(key)), _text.whole(before.get(key))
    return None if new is None or old is None else max(0, new - old)


@dataclass(frozen=True)
class Use:
    time: float | None = None
    trainer: int | None = None
    workers: int | None = None
    worker_count: int = 0
    shm: int | None = None
    shm_free: int | None = None
    swap: int | None = None
    cache: int | None = None
    used: int | None = None  # by the cgroup
    limit: int | None = None
    available: int | None = None
    total: int | None = None
    cpu_limit: float | None = None  # seconds, by ulimit -t
    cpu_seconds: float | None = None
    space_limit: int | None = None  # by ulimit -v

    @property
    def tree(self) -> int | None:
        return None if self.trainer is None else self.trainer + (self.workers or 0)

    @property
    def is_near_limit(self) -> bool | None:
        """None if that is not known."""
        if not self.used or not self.limit:
            return None
        return self.used >= _NEAR * self.limit

    @property
    def is_machine_full(self) -> bool | None:
        """None if that is not known."""
        if self.available is None or not self.total:
            return None
        return self.available <= _SCARCE * self.total


_KEYS = {"time": "t", "trainer": "rss", "used": "cgroup"}  # of a sample, where they differ
_REAL = ("time", "cpu_limit", "cpu_seconds")


def read_use(sample: Record) -> Use:
    known: dict[str, Any] = {}
    for name in (each.name for each in fields(Use)):
        value = sample.get(_KEYS.get(name, name))
        size = _text.whole(value)
        known[name] = size if size is not None and size >= 0 else None
        if name in _REAL:
            known[name] = _text.real(value)
    return Use(**{**known, "worker_count": known["worker_count"] or 0})


def last_use(samples: list[Record]) -> Use:
    """The last sample; values that quick samples leave out come from earlier ones."""
    if not samples:
        return Use()
    newest = dict(samples[-1])
    for sample in reversed(samples[-30:]):
        for key, value in sample.items():
            if newest.get(key) is None and value is not None:
                newest[key] = value
    return read_use(newest)


def tell_memory(samples: list[Record], ended: float | None) -> list[str]:
    """The last minutes in a few moments, and the parts of the last sample."""
    uses = [use for use in map(read_use, samples) if _shown(use) is not None]
    if not uses:
        return []
    last, end = last_use(samples), ended
    if last.time is not None and (end is None or not 0 <= end - last.time < 3600):
        end = last.time
    moments = _moments(uses, end)
    whose = "memory of its cgroup" if uses[-1].used else "resident memory of it and its workers"
    limit = last.limit if uses[-1].used else None
    final = _shown(uses[-1]) or 0
    told = [f"{_text.duration(seconds)} before: {_text.size(value)}" for seconds, value in moments]
    closing = _text.size_of(final, limit) if limit else _text.size(final)
    told.append(f"at the end: {closing}")
    no_limit = " (no limit)" if uses[-1].used and not limit else ""
    lines = [f"{whose}: {', '.join(told)}{no_limit}"]
    if parts := _parts(last):
        lines.append(f"in the last sample: {', '.join(parts)}")
    if last.available is not None and last.total:
        lines.append(f"the machine had {_text.size_of(last.available, last.total)} available")
    return lines


def tell_space(use: Use) -> list[str]:
    """A limited address space looks like a full memory."""
    limits = [] if use.space_limit is None else [_text.size(use.space_limit)]
    return [f"its address space is limited to {limit} (ulimit -v)" for limit in limits]


def tell_graphs(graphs: list[Record]) -> list[str]:
    """What keeps graphs of autograd, and with them the activations of whole steps."""
    # A graph that a backward pass has used has released its memory.
    held = [each for each in graphs if not each.get("freed") and _text.whole(each.get("count"))]
    return [
        f"`{_text.one_line(str(graph.get('holder')), 80)}` keeps "
        f"{_text.count(_text.whole(graph.get('count')) or 0, 'graph')} alive"
        + (f" ({_text.one_line(str(graph['where']), 120)})" if graph.get("where") else "")
        for graph in held[:3]
    ]


def _moments(uses: list[Use], end: float | None) -> list[tuple[float, int]]:
    """(seconds before the end, bytes) of the samples nearest to a few moments."""
    if end is None:
        return []
    found: dict[float, tuple[float, int]] = {}
    ages = {end - use.time: use for use in uses if use.time is not None and use.time <= end}
    for wanted in _MOMENTS_SECONDS if ages else ():
        seconds = min(ages, key=lambda age: abs(age - wanted))
        if abs(seconds - wanted) <= 0.4 * wanted:
            found[seconds] = (seconds, _shown(ages[seconds]) or 0)
    return [found[seconds] for seconds in sorted(found, reverse=True)]


def _shown(use: Use) -> int | None:
    return use.used if use.used is not None else use.tree


def _parts(use: Use) -> list[str]:
    parts = []
    if use.trainer is not None:
        parts.append(f"the trainer {_text.size(use.trainer)}")
    if use.worker_count and use.workers is not None:
        parts.append(f"{_text.count(use.worker_count, 'worker')} {_text.size(use.workers)}")
    for name, value in (("/dev/shm", use.shm), ("page cache", use.cache), ("swap", use.swap)):
        if value:
            parts.append(f"{name} {_text.size(value)}")
    return parts
