"""Which functions of the script are signal handlers: what is saved inside of one is suspect."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

_codes: set[Any] = set()


def note_handlers() -> None:
    """Remember every handler that is ever set: one may take itself off before it saves."""
    set_handler = signal.signal

    def set_and_note(number: int, handler: Any) -> Any:
        inner = getattr(handler, "func", handler)  # of a partial
        inner = getattr(inner, "__func__", inner)  # of a method
        code = getattr(inner, "__code__", None)
        if code is not None:
            _codes.add(code)
        return set_handler(number, handler)

    # The module's own function, wherever it is called from: there is no other way to hear of it.
    signal.signal = set_and_note  # type: ignore[assignment]


def in_handler(frame: FrameType | None) -> bool:
    """Whether a signal handler is at work on this stack."""
    while frame is not None:
        if frame.f_code in _codes:
            return True
        frame = frame.f_back
    return False
