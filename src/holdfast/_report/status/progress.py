"""How fast a run is and what its newest metrics are, by the end of its series."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from holdfast import _text
from holdfast._report.json_lines import Record, parse_lines
from holdfast._store.folder import series
from holdfast._store.folder.plain_file import MOST_LINES_BYTES, open_file

_TAIL_BYTES = 16 << 10  # about a minute of rows
_RATE_SECONDS = 60.0
_MOST_METRICS = 50
_MOST_NAME = 200
BAR_CELLS = 20


def read_progress(path: Path, now: float) -> tuple[float | None, dict[str, float]]:
    """Steps in a second and the newest finite value of each metric, by the end of a series."""
    rows = _last_rows(path)
    return _rate(rows, now), _newest(rows)


def seconds_left(step: int | None, total: int | None, rate: float | None) -> float | None:
    if step is None or total is None or not rate:
        return None
    return max(0, total - step) / rate


def share_done(step: int | None, total: int | None) -> float | None:
    """From 0 to 1; None if it is unknown how many steps there will be."""
    if step is None or not total:
        return None
    return max(0.0, min(1.0, step / total))


def bar(share: float, cells: int = BAR_CELLS) -> str:
    """A progress bar in plain characters; full only at the end.

    >>> bar(0.5, 10), bar(0.999, 10)
    ('[#####.....]', '[#########.]')
    """
    full = int(share * cells)
    return f"[{'#' * full}{'.' * (cells - full)}]"


def main_metric(names: Iterable[str]) -> str | None:
    """The metric that a reader wants to see first: the training loss, if there is one.

    >>> main_metric(["lr", "val_loss", "train/loss"]), main_metric(["acc", "lr"])
    ('train/loss', 'acc')
    """
    known = list(names)

    def order(name: str) -> tuple[int, int]:
        words = name.lower()
        is_later = any(each in words for each in ("val", "eval", "test"))
        rank = 0 if words == "loss" else 1 if "loss" in words else 3
        return rank + is_later, known.index(name)

    return min(known, key=order, default=None)


def _last_rows(path: Path) -> list[Record]:
    try:
        with open_file(path, most_bytes=MOST_LINES_BYTES) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    # The first line is cut, unless the whole file was read; the last one may be incomplete.
    rows = parse_lines(lines[1:-1] if size > _TAIL_BYTES else lines[:-1])
    real, whole = _text.real, _text.whole
    return [r for r in rows if series.is_row(r) and None not in (real(r["t"]), whole(r["s"]))]


def _rate(rows: list[Record], now: float) -> float | None:
    """Steps in a second, in the last minute; None if none was made then."""
    if not rows:
        return None
    end = float(rows[-1]["t"])
    recent = [row for row in rows if float(row["t"]) >= end - _RATE_SECONDS]
    first, last = recent[0], recent[-1]
    seconds, steps = last["t"] - first["t"], last["s"] - first["s"]
    if now - end > 2 * _RATE_SECONDS or seconds <= 0 or steps <= 0:
        return None
    return float(steps / seconds)


def _newest(rows: list[Record]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        for name, values in _text.record(row.get("m")).items():
            value = _text.real(values[0]) if isinstance(values, list) and values else None
            is_known = name in found or len(found) < _MOST_METRICS
            if value is not None and is_known and len(name) <= _MOST_NAME:
                found[name] = value
    return found
