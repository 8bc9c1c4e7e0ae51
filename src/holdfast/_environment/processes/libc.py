"""The C library, and the signal handlers in the kernel."""

from __future__ import annotations

import sys
from typing import Any

_SIGACTION_BYTES = 256


def c_handler(number: int) -> bytes:
    """The kernel's handler: a C++ library can replace it without Python."""
    import ctypes

    return c_action(number)[: ctypes.sizeof(ctypes.c_void_p)]


def c_action(number: int) -> bytes:
    """The kernel's handler with its mask and flags; empty where it cannot be read."""
    if sys.platform != "linux":
        return b""
    import ctypes

    buffer = ctypes.create_string_buffer(_SIGACTION_BYTES)
    return buffer.raw if libc().sigaction(number, None, buffer) == 0 else b""


def set_c_action(number: int, action: bytes) -> None:
    """Restore what `c_action` has read; Python's own handler stays as it is."""
    libc().sigaction(number, action, None)


def libc() -> Any:
    global _loaded_libc
    if _loaded_libc is None:
        import ctypes

        _loaded_libc = ctypes.CDLL(None)
    return _loaded_libc


_loaded_libc: Any = None
