"""One script in the foreground of a terminal, and what it writes there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from tests.support import wait_until
from tests.terminal import ForegroundJob

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(ForegroundJob):
    """One script as the foreground job of a terminal of its own."""

    def __init__(self, script: Path, *arguments: Any) -> None:
        super().__init__([sys.executable, "-u", str(script), *map(str, arguments)])

    @property
    def output(self) -> str:
        """What was written, without the codes that move the cursor and erase: each writing
        of the progress line stands as a line of its own."""
        text = _CODES.sub("", self.raw.decode(errors="replace"))
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Wait for a line that contains `text`, and return it."""

        def look() -> str | None:
            whole = self.output.rpartition("\n")[0]
            found = next((line for line in whole.split("\n") if text in line), None)
            if found is None and self.process.poll() is not None:
                self._reader.join(10)
                assert text in self.output, f"ended without {text!r}:\n{self.output}"
            return found

        return wait_until(look, seconds, f"{text!r}")
