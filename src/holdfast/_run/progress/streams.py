"""What others write to the terminal passes by here first.

Covered are the methods of the stream itself. `sys.stdout` stays the object it was, with all its
attributes, and a logging handler that has held it since before the run is seen too.
"""

from __future__ import annotations

import re
import sys
import threading
from types import FrameType
from typing import Any, NamedTuple, Protocol, TextIO

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def ends_in_mid_line(text: str, before: bool) -> bool:
    """Whether the cursor is in the middle of somebody's line after this text.

    >>> ends_in_mid_line("50%", False), ends_in_mid_line("done\\n\\x1b[0m", True)
    (True, False)
    """
    shown = (_CONTROL.sub("", text) if "\x1b" in text else text).rstrip("\r")
    return not shown.endswith("\n") if shown else before


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, OSError, ValueError):
        return False  # there is none, or it is closed


class Place(NamedTuple):
    """Where in its code a thread is."""

    thread: int
    frame: int
    instruction: int


def _place(thread: int, frame: FrameType) -> Place:
    # The frame itself would keep the variables of whoever is there alive.
    return Place(thread, id(frame), frame.f_lasti)


def place_of(thread: int) -> Place | None:
    frame = sys._current_frames().get(thread)
    return None if frame is None else _place(thread, frame)


class Listener(Protocol):
    """Who is told what passes."""

    def pass_text(self, tap: Tap, text: str) -> int: ...
    def pass_bar(self, tap: Tap, text: str, *, is_message: bool) -> int: ...
    def note_flush(self, tap: Tap, place: Place) -> None: ...


class Tap:
    """One covered stream; `write` and `flush` are what it had before."""

    def __init__(self, name: str, stream: TextIO, listener: Listener) -> None:
        self.name = name
        self.stream = stream
        self.write, self.flush = stream.write, stream.flush
        self._listener = listener
        self._covers = {"write": self._covered_write, "flush": self._covered_flush}
        # Another library may have covered them before us, and gets its own back.
        own = getattr(stream, "__dict__", {})
        self._former = {name: own[name] for name in self._covers if name in own}

    def cover(self) -> bool:
        try:
            for name, cover in self._covers.items():
                setattr(self.stream, name, cover)
        except (AttributeError, TypeError):
            self.uncover()
            return False
        return True

    def uncover(self) -> None:
        own = getattr(self.stream, "__dict__", {})
        for name, cover in self._covers.items():
            if own.get(name) is not cover:
                continue  # somebody has covered ours since: theirs stays, and ours only passes on
            if name in self._former:
                own[name] = self._former[name]
            else:
                del own[name]

    def _covered_write(self, text: str, /) -> int:
        # Not sys._getframe(1): the interpreter itself also writes, from no frame at all.
        caller = sys._getframe().f_back
        if _is_of_tqdm(caller):
            is_message = caller is not None and caller.f_code.co_name == "write"
            return self._listener.pass_bar(self, text, is_message=is_message)
        return self._listener.pass_text(self, text)

    def _covered_flush(self) -> None:
        self.flush()
        caller = sys._getframe().f_back
        if caller is not None and not _is_of_tqdm(caller):
            self._listener.note_flush(self, _place(threading.get_ident(), caller))


def _is_of_tqdm(caller: FrameType | None) -> bool:
    name = "" if caller is None else caller.f_globals.get("__name__", "")
    return name == "tqdm" or str(name).startswith("tqdm.")
