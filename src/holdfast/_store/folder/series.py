"""The series: steps, metrics and memory of an attempt, rows of JSON, only appended to.

    {"t": 1717171717.2, "s": 1240, "n": 20, "h": [[113, 18], [121, 2]], "save": 0.004, "snaps": 1,
     "mem_step": 1236, "disk_step": 1200, "m": {"loss": [0.61, 0.6, 0.7, 20, 0, 1239]},
     "mem": {"rss": 1073741824, "limit": 4294967296}}

There is one row about every second, and fewer in an old attempt: see `period_seconds`.

t           the clock at the end of the row; it begins where the one before it ended
s, n        completed steps then, and how many of them in this row
h           how long they took: [bucket, count]…; if steps are very short, of a sample
save, agree seconds that saving, or waiting for other ranks, has held the main thread in this row
snaps       snapshots taken in this row
mem_step    the newest step in memory, and on disk as `disk_step`
phase       the phase at the end of the row
rest        seconds of this row in phases that make no steps, and by name in `phases`
epoch       the current one, from 1 on
m           by metric: last, least and greatest value, how many, how many were not finite, and how
            many steps were complete when the last one was logged
mem         bytes, as the keeper's last sample had them
waits       by rank: the seconds that it waits for the others in one step

Empty fields are left out, and readers ignore names that they do not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from holdfast._store.folder import journal

_RATIO = math.log(1.1)
_LEAST_SECONDS = 1e-6
_LONGEST_ROW_BYTES = 2048  # longer rows come less often


class Row(TypedDict, total=False):
    """One row; all but the first three fields may be missing."""

    t: float
    s: int
    n: int
    h: list[list[int]]
    save: float
    agree: float
    rest: float
    snaps: int
    mem_step: int
    disk_step: int
    phase: str
    phases: dict[str, float]
    epoch: int
    m: dict[str, list[Any]]
    mem: dict[str, int]
    waits: dict[str, float]


def bucket_of(seconds: float) -> int:
    """The bucket of the histogram whose time is nearest: at most 5% off.

    >>> 0.95 < seconds_of(bucket_of(0.25)) / 0.25 < 1.05
    True
    """
    return round(math.log(max(seconds, _LEAST_SECONDS) / _LEAST_SECONDS) / _RATIO)


def seconds_of(bucket: int) -> float:
    return _LEAST_SECONDS * math.exp(_RATIO * bucket)


def add_buckets(histogram: dict[int, int], pairs: Iterable[Any]) -> None:
    """Add what a row has in `h`."""
    for pair in pairs:
        bucket, count = pair
        histogram[bucket] = histogram.get(bucket, 0) + count


def quantile(histogram: Mapping[int, int], share: float) -> float | None:
    """The time that this share of the steps did not exceed.

    >>> quantile({10: 99, 20: 1}, 0.5) == seconds_of(10)
    True
    """
    total = sum(histogram.values())
    if not total:
        return None
    wanted, seen, bucket = share * total, 0, 0
    for bucket in sorted(histogram):
        seen += histogram[bucket]
        if seen >= wanted:
            break
    return seconds_of(bucket)


def period_seconds(age_seconds: float, row_bytes: int = 0) -> float:
    """The length of a row of an attempt of this age: a week is less than 13,000 rows.

    >>> [period_seconds(age) for age in (0, 1200, 1e6)]
    [1.0, 2.0, 60.0]
    """
    period = min(60.0, max(1.0, age_seconds / 600))
    return period * max(1.0, row_bytes / _LONGEST_ROW_BYTES)


def encode(row: Row) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def append(path: Path, row: Row) -> int:
    """Append a row; returns its length, 0 if the file system refuses it."""
    line = encode(row)
    return len(line) if journal.append_line(path, line) else 0


def read(path: Path) -> Iterator[Row]:
    """The rows so far, oldest first; invalid lines are skipped."""
    for found in journal.read(path):
        if is_row(found):
            yield found  # type: ignore[misc]  # it has what every row has


def first_and_last(path: Path) -> tuple[Row, Row] | None:
    """The first and the last row, without reading those in between."""
    try:
        last = next(filter(None, map(_parse, journal.read_back(path))), None)
        return None if last is None else (next(read(path), last), last)
    except OSError:
        return None


def _parse(line: bytes) -> Row | None:
    found = journal.parse(line)
    return found if is_row(found) else None  # type: ignore[return-value]  # as above


def is_row(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("t"), int | float)
        and isinstance(found.get("s"), int)
        and isinstance(found.get("n"), int)
    )
