"""Lines for the person at the terminal."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
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
