"""What a process that speaks with a store has to say, heard with a bound on its silence."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast._errors import MirrorError
from holdfast._keeper.mirror import start_speaker

_SILENT_SECONDS = 120.0


class Answers:
    """One question to a mirror, and what comes back."""

    def __init__(self, config: dict[str, Any], log: Path | None) -> None:
        self._address = config["address"]
        self._process: subprocess.Popen[bytes] = start_speaker(config, log)
        self._rest = b""
        self._heard_at = time.monotonic()
        self.is_over = False

    def hear(self, seconds: float) -> Iterator[dict[str, Any]]:
        """What it tells within this time; MirrorError if it fails, or says nothing for long."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        descriptor = self._process.stdout.fileno()
        while not self.is_over and (left := deadline - time.monotonic()) > 0:
            if not select.select([descriptor], [], [], left)[0]:
                if time.monotonic() - self._heard_at > _SILENT_SECONDS:
                    raise self._failed(f"no answer for {_SILENT_SECONDS:.0f} s")
                return
            data = os.read(descriptor, 1 << 16)
            self._heard_at = time.monotonic()
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                try:
                    told = json.loads(line)
                except ValueError:
                    continue  # of a library, or of the site's own start of Python
                if told["kind"] == "failed":
                    raise self._failed(told["text"])
                yield told
            if not data:
                self.is_over = True
                if self._process.wait() != 0:
                    raise self._failed("the process that asks it has died")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _failed(self, text: str) -> MirrorError:
        fact = text if text.startswith(self._address) else f"{self._address}: {text}"
        if "\n" in fact:
            return MirrorError(fact)
        return MirrorError(
            f"{fact.rstrip('.')}.\nNothing was begun: there may be a run in the mirror. Make it "
            "reachable, or leave out Settings(mirror=…) to begin anew."
        )


def ask(config: dict[str, Any], log: Path | None = None) -> list[dict[str, Any]]:
    """All that is told, at the end."""
    answers = Answers(config, log)
    try:
        told: list[dict[str, Any]] = []
        while not answers.is_over:
            told += answers.hear(1.0)
        return told
    finally:
        answers.close()
