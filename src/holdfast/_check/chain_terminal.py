"""A terminal of its own for a chain, in which Ctrl-C can be pressed."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_PIECE_BYTES = 65536
_END_SECONDS = 2.0
_CTRL_C = b"\x03"


class Terminal:
    """One end for the chain; the other is ours."""

    def __init__(self) -> None:
        self._master, self.given = os.openpty()
        self._reader: threading.Thread | None = None

    def begin(self, output: Path) -> None:
        """The chain has its end: read what it prints, or it would wait for us."""
        os.close(self.given)
        self._reader = threading.Thread(target=self._copy, args=(output,), daemon=True)
        self._reader.start()

    def press_ctrl_c(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._master, _CTRL_C)

    def end(self) -> None:
        """When nobody has the other end any more, the reader ends by itself."""
        if self._reader is None:
            os.close(self.given)
        else:
            self._reader.join(_END_SECONDS)
        os.close(self._master)

    def _copy(self, output: Path) -> None:
        with contextlib.suppress(OSError), output.open("ab", buffering=0) as file:
            while piece := os.read(self._master, _PIECE_BYTES):
                file.write(piece)
