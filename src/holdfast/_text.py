"""Text for people: lines to the terminal, sizes, times and counts; and values out of records.

A record (JSON of a run folder, a heartbeat, a journal) may hold anything: `whole`, `real`, `text`,
`record` and `records` return a value of the wanted kind, or none.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast._errors import HoldfastError, Stopped, place_of

_rank = 0
_speaking = threading.RLock()  # held while a line is written
_LINE_SECONDS = 1.0  # a line is left out if the output stands still for longer


@atexit.register
def _let_nobody_speak() -> None:
    """Wait for the line that another thread writes, and let none begin another one.

    A daemon thread that Python ends within a write keeps the lock of the stream. Then the flush at
    the end aborts the process.
    """
    _speaking.acquire(timeout=_LINE_SECONDS)


def _renew_lock() -> None:
    global _speaking
    _speaking = threading.RLock()  # a thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def speak_as(rank: int) -> None:
    """Set the rank of this process: of several ranks, rank 0 speaks for all."""
    global _rank
    _rank = rank


def say(message: str, *, each: bool = False) -> None:
    """One line on standard error; training goes on if that is closed.

    Only rank 0 writes it, unless it concerns `each` rank.
    """
    if _rank and not each:
        return
    if each and _rank:
        message = f"rank {_rank}: {message}"
    lock = _speaking
    if not lock.acquire(timeout=_LINE_SECONDS):
        return
    try:
        # The stream of a notebook sends messages, and raises errors of its own.
        with contextlib.suppress(Exception):
            sys.stderr.write(f"holdfast: {printable(message)}\n")
            sys.stderr.flush()
    finally:
        lock.release()


def printable(text: str) -> str:
    r"""A text that is safe for a terminal: the name of a folder can hold any bytes.

    >>> printable("runs/a\x1b[2J\nnext line")
    'runs/a\\x1b[2J\nnext line'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, OSError, ValueError):
        return False  # there is none, or it is closed


def speak_plainly() -> None:
    """Show an uncaught error of ours as its sentences and its place, not as a traceback."""
    # Leave the hook of a debugger alone, and that of IPython, which asks the error for its text.
    # torch sets one with a process group, to name the rank: that one is replaced.
    former = sys.excepthook
    of_ranks = getattr(former, "__module__", "").startswith("torch.distributed")
    if former is sys.__excepthook__ or of_ranks:
        sys.excepthook = functools.partial(_show_error, former)


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _show_error(
    former: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if isinstance(error, Stopped):  # at a prompt; in a script it is an exit
        say(error.message)
    elif isinstance(error, HoldfastError):
        say(str(error), each=True)
        place = place_of(error)
        at = "" if place is None else f"at {printable(place)} "
        # `holdfast why` and `holdfast run` read the type.
        sys.stderr.write(f"  {at}(holdfast.{type(error).__name__})\n")
    else:
        former(kind, error, trace)


# Sizes, times, counts and names.

_SIZES = ("kB", "MB", "GB", "TB", "PB")


def size(size_bytes: float) -> str:
    """A size in about three digits.

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


def stopwatch(seconds: float) -> str:
    """
    >>> stopwatch(156), stopwatch(3756), stopwatch(273_600)
    ('2:36', '1:02:36', '3 d 4 h')
    """
    hour, minute, second = _hours(seconds)
    if hour >= 48:
        return f"{hour // 24} d {hour % 24} h"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def minutes(seconds: float) -> str:
    """
    >>> minutes(156), minutes(3756), minutes(12)
    ('2 min 36 s', '1 h 2 min', '12 s')
    """
    hour, minute, second = _hours(seconds)
    if hour >= 48:
        return f"{hour // 24} d {hour % 24} h"
    if hour:
        return f"{hour} h {minute} min"
    return f"{minute} min {second} s" if minute else f"{second} s"


def _hours(seconds: float) -> tuple[int, int, int]:
    whole_seconds = round(min(max(seconds, 0.0), 1e10))  # a rate near 0 gives an eternity
    return whole_seconds // 3600, whole_seconds // 60 % 60, whole_seconds % 60


def clock(moment: float) -> str:
    """A moment by the clock of this machine; empty if it cannot be shown."""
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


def steps(number: int) -> str:
    return count(number, "step")


def number(value: float | None) -> str:
    """A metric in a few digits; None is a value that was not finite.

    >>> number(0.123456), number(None)
    ('0.1235', 'nan')
    """
    return "nan" if value is None else f"{value:.4g}"


def short_number(value: float | None) -> str:
    """Three significant digits, always about as wide.

    >>> short_number(0.2312), short_number(1234.5), short_number(3e-5), short_number(None)
    ('0.231', '1234', '3.00e-05', 'nan')
    """
    if value is None or value != value:
        return "nan"
    size = abs(value)
    if size == 0:
        return "0"
    if 1e-3 <= size < 100:
        return f"{value:#.3g}".rstrip(".")
    return f"{value:.0f}" if 100 <= size < 1e6 else f"{value:.2e}"


def signal_name(status: int | None) -> str | None:
    """The signal that killed a process with this status; None if none did.

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
    """The first line that is not empty, shortened."""
    return cut(next((each.strip() for each in text.splitlines() if each.strip()), ""), most)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def sentence(text: str) -> str:
    """A text with the full stop that it may lack."""
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def name(path: Path | str) -> str:
    r"""A path in one line of printable characters, whatever its bytes are.

    >>> name("runs/a\nb")
    'runs/a\\nb'
    """
    return "".join(c if c.isprintable() else _escaped(c) for c in str(path))


def command(verb: str, *folders: Path) -> str:
    """A command that can be pasted into a shell.

    >>> command("ls", Path("runs/my run"))
    "holdfast ls 'runs/my run'"
    """
    texts = [str(each) for each in folders]
    shown = [shlex.quote(text) if text.isprintable() else name(text) for text in texts]
    return " ".join(["holdfast", verb, *shown])


# Values out of records.

_MOST = 1 << 53  # a page can count to it, and no size, time or step has reached it


def whole(value: object) -> int | None:
    """A whole number of a size that can be computed with.

    >>> whole(7), whole("7"), whole(10**400), whole(True)
    (7, None, None, None)
    """
    if type(value) is float and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -_MOST < value < _MOST else None


def real(value: object) -> float | None:
    """A finite number.

    >>> real(7), real(float("nan")), real([7])
    (7.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -_MOST < value < _MOST else None  # NaN is between no two numbers


def text(value: object, most: int | None = None) -> str:
    """A text, shortened to `most` characters; empty for any other value."""
    if not isinstance(value, str):
        return ""
    return value if most is None else cut(value, most)


def record(value: object) -> dict[str, Any]:
    """A JSON object, or an empty one."""
    return value if isinstance(value, dict) else {}


def records(value: object) -> list[dict[str, Any]]:
    """The JSON objects in a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def unique_names(pairs: Iterable[tuple[str, Any]], mark: str = "~") -> dict[str, Any]:
    """Values by name; the second of one name gets a number.

    >>> unique_names([("a", 1), ("a", 2)])
    {'a': 1, 'a~2': 2}
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        key, count = name, 2
        while key in found:
            key, count = f"{name}{mark}{count}", count + 1
        found[key] = value
    return found
