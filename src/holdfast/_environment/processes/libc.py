"""The C library, and the signal handlers in the kernel."""

from __future__ import annotations

import sys
from typing import Any

_SIGACTION_BYTES = 256


def c_handler(number: int) -> bytes:
    """The kernel's handler: a C++ library can replace it without Python."""
    if sys.platform != "linux":
        return b""
    import ctypes

    buffer = ctypes.create_string_buffer(_SIGACTION_BYTES)
    if libc().sigaction(number, None, buffer) != 0:
        return b""
    return buffer.raw[: ctypes.sizeof(ctypes.c_void_p)]


def libc() -> Any:
    global _loaded_libc
    if _loaded_libc is None:
        import ctypes

        _loaded_libc = ctypes.CDLL(None)
    return _loaded_libc


_loaded_libc: Any = None
