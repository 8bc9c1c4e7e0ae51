"""Lines for the person at the terminal."""

from __future__ import annotations

import contextlib
import functools
import math
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast._errors import HoldfastError, Stopped, place_of

_rank = 0  # of several, the first speaks for all


def speak_as(rank: int) -> None:
    """Say which of several processes this is."""
    global _rank
    _rank = rank


def say(message: str, *, each: bool = False) -> None:
    """One line on standard error; whoever has closed it does not hear us, and training goes on.

    Of several ranks only the first speaks, but for what concerns `each` of them.
    """
    if _rank and not each:
        return
    if each and _rank:
        message = f"rank {_rank}: {message}"
    # A notebook's stream sends messages and fails in ways of its own.
    with contextlib.suppress(Exception):
        sys.stderr.write(f"holdfast: {printable(message)}\n")
        sys.stderr.flush()


def printable(text: str) -> str:
    r"""A text as a terminal may have it: a folder's name can hold any bytes.

    >>> printable("runs/a\x1b[2J\nnext line")
    'runs/a\\x1b[2J\nnext line'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def speak_plainly() -> None:
    """Let an error of ours that nobody catches be its sentences and the place, not a traceback."""
    # A debugger's own is left alone, and so is IPython's, which asks the error how it looks.
    # torch puts one of its own in place with a process group, to name the rank.
    former = sys.excepthook
    of_ranks = getattr(former, "__module__", "").startswith("torch.distributed")
    if former is sys.__excepthook__ or of_ranks:
        sys.excepthook = functools.partial(_tell, former)


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _tell(
    former: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if isinstance(error, Stopped):  # at a prompt: in a script it is an exit and never comes here
        say(error.message)
    elif isinstance(error, HoldfastError):
        say(str(error), each=True)
        place = place_of(error)
        if place is not None:
            sys.stderr.write(f"  at {printable(place)}\n")
    else:
        former(kind, error, trace)


# -- Sizes and times as people read them, and values of records that may be anything ---------------


_SIZES = ("kB", "MB", "GB", "TB", "PB")
_MOST = 1 << 62  # beyond it a number is no size, time or step


def size(size_bytes: float) -> str:
    """A size in three digits or so.

    >>> size(999), size(1234), size(2_340_000_000)
    ('999 B', '1.2 kB', '2.3 GB')
    """
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    value = float(size_bytes)
    for unit in _SIZES:
        value /= 1000
        if value < 999.5 or unit == _SIZES[-1]:
            break
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def size_of(used: float, limit: float) -> str:
    """How much of how much, with the unit once where it is the same.

    >>> size_of(1_960_000_000, 2_000_000_000), size_of(400_000, 2_000_000_000)
    ('2.0 of 2.0 GB', '400 kB of 2.0 GB')
    """
    first, second = size(used), size(limit)
    number, _, unit = first.partition(" ")
    return f"{number} of {second}" if second.endswith(f" {unit}") else f"{first} of {second}"


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


def clock(moment: float) -> str:
    """A moment as this machine's clock shows it; empty if it is none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (OverflowError, ValueError, OSError):
        return ""


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(1, "worker"), count(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def signal_name(status: int | None) -> str | None:
    """The signal of which a process with such a status died; None if of none.

    >>> signal_name(-9), signal_name(1), signal_name(-64), signal_name(None)
    ('SIGKILL', None, 'signal 64', None)
    """
    if status is None or not -64 <= status < 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def one_line(text: str, most: int = 300) -> str:
    """The first line that says something, not too long."""
    line = next((each.strip() for each in text.splitlines() if each.strip()), "")
    return line if len(line) <= most else line[: most - 1] + "…"


def whole(value: object) -> int | None:
    """A whole number, if it is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value) or value != int(value) or abs(value) > _MOST:
        return None
    return int(value)


def real(value: object) -> float | None:
    """A number, if it is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _MOST else None  # nan is not


def text(value: object) -> str:
    """A text, or none."""
    return value if isinstance(value, str) else ""


def record(value: object) -> dict[str, Any]:
    """An object of JSON, or an empty one."""
    return value if isinstance(value, dict) else {}


def records(value: object) -> list[dict[str, Any]]:
    """Those of a list that are objects."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


# -- Sizes, times and names as people read them ----------------------------------------------------


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
