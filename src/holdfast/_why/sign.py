"""One thing that a text tells, and the tables that say which texts tell what."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from holdfast._why.text import Line

_OF_THE_LIFE_BEFORE = "holdfast: the attempt before ended"
TEXT_MOST = 600  # characters of a line that are kept: some libraries print pages in one


@dataclass(frozen=True)
class Sign:
    """Something that a text tells of an end.

    `details` always has `from_end`: how many lines came after it. What stands in the last
    lines is likely why it ended; what was printed thousands of lines before hardly is.
    """

    kind: str
    text: str  # the line that tells
    rank: int | None = None
    line: int = 1
    details: dict[str, Any] = field(default_factory=dict)


class Pattern(NamedTuple):
    """A kind of line: `needle` finds candidates at the speed of memory, `shape` decides.

    Named groups become details, numbers as numbers, but for those that begin with `_` and are
    for `more` alone; `rank` is the sign's own.
    """

    kind: str
    needle: str
    shape: str
    details: dict[str, Any] = {}  # noqa: RUF012  (a tuple's default, and never changed)
    more: Callable[[re.Match[str]], dict[str, Any] | None] | None = None


def pattern(
    kind: str,
    needle: str,
    shape: str = "",
    *,
    more: Callable[[re.Match[str]], dict[str, Any] | None] | None = None,
    **details: Any,
) -> Pattern:
    """A row of a table; without a shape the needle is enough."""
    return Pattern(kind, needle, shape or re.escape(needle), details, more)


def sign_of(row: Pattern, line: Line) -> Sign | None:
    """The sign that a line is, by a row of a table; None if it only looks like it."""
    match = _compiled(row.shape).search(line.text)
    if match is None or is_source_code(line.text, match.start()):
        return None
    if line.text.startswith(_OF_THE_LIFE_BEFORE):
        return None
    details = dict(row.details)
    for name, value in match.groupdict().items():
        if value is not None and not name.startswith("_"):
            details[name] = _as_number(value)
    if row.more is not None:
        found = row.more(match)
        if found is None:
            return None
        details.update(found)
    rank = details.pop("rank", None)
    return make_sign(row.kind, line, details, rank if isinstance(rank, int) else line.rank)


def make_sign(
    kind: str, line: Line, details: dict[str, Any] | None = None, rank: int | None = None
) -> Sign:
    """A sign at a line, which says how far from the end it stands."""
    return Sign(
        kind,
        line.text.strip()[:TEXT_MOST],
        rank if rank is not None else line.rank,
        line.number,
        {**(details or {}), "from_end": line.from_end},
    )


def is_source_code(text: str, at: int) -> bool:
    """Whether it is a line of a program, as a traceback shows it: what it could say, not says."""
    if not text.startswith("    "):
        return False
    before = text[:at].lstrip()
    return before.startswith(("raise ", "assert ", "return ", "#")) or before.endswith(
        ('("', "('", '(f"', "(f'", '= "', '"""')
    )


@cache
def _compiled(shape: str) -> re.Pattern[str]:
    # On demand: of all the rows few are ever met, and whoever leads a training imports them all.
    return re.compile(shape)


def _as_number(value: str) -> Any:
    try:
        return int(value) if len(value) < 19 else value
    except ValueError:
        return value
