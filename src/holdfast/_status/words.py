"""Sizes, times and names as people read them."""

from __future__ import annotations

import shlex
from pathlib import Path

from holdfast._why.words import duration, size

__all__ = ["command", "duration", "name", "number", "size", "steps"]


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
