"""Sizes, times and names as people read them."""

from __future__ import annotations

import shlex
from pathlib import Path

_SIZES = ("kB", "MB", "GB", "TB", "PB")


def size(size_bytes: int) -> str:
    """A size in three digits or so.

    >>> size(999), size(1234), size(2_340_000_000)
    ('999 B', '1.2 kB', '2.3 GB')
    """
    if size_bytes < 1000:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in _SIZES:
        value /= 1000
        if value < 999.5 or unit == _SIZES[-1]:
            break
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def duration(seconds: float) -> str:
    """A time in the unit that fits.

    >>> duration(0.042), duration(4.2), duration(90), duration(7000), duration(200_000)
    ('42 ms', '4.2 s', '90 s', '117 min', '2.3 days')
    """
    seconds = max(0.0, seconds)  # another machine's clock may be ahead of ours
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def number(value: float | None) -> str:
    """A metric in a few digits; None is what was no finite number.

    >>> number(0.123456), number(None)
    ('0.1235', 'nan')
    """
    return "nan" if value is None else f"{value:.4g}"


def steps(count: int) -> str:
    """A number of steps.

    >>> steps(1), steps(2)
    ('1 step', '2 steps')
    """
    return f"{count} step" if count == 1 else f"{count} steps"


def name(path: Path | str) -> str:
    r"""A path in one line of printable characters, whatever its bytes are.

    >>> name("runs/a\nb")
    'runs/a\\nb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(path))


def command(verb: str, *folders: Path) -> str:
    """A command that can be pasted into a shell.

    >>> command("ls", Path("runs/my run"))
    "holdfast ls 'runs/my run'"
    """
    texts = [str(each) for each in folders]
    shown = [shlex.quote(text) if text.isprintable() else name(text) for text in texts]
    return " ".join(["holdfast", verb, *shown])
