"""One question to a mirror, asked in a process of its own, with a bound on its silence."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast._errors import MirrorError
from holdfast._store.mirror.child import start_speaker
from holdfast._store.mirror.store import MissingPlace

_SILENT_SECONDS = 120.0


class Answers:
    """The messages of that process."""

    def __init__(self, config: dict[str, Any], log: Path | None) -> None:
        self._address = config["address"]
        self._process: subprocess.Popen[bytes] = start_speaker(config, log)
        self._rest = b""
        self._heard_at = time.monotonic()
        self.is_over = False

    def hear(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Its messages within this time; MirrorError if it fails, or is silent for long."""
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
                    continue  # output of a library
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
            "reachable, or leave out Settings(mirror=…) to start over."
        )


def ask(config: dict[str, Any], log: Path | None = None) -> list[dict[str, Any]]:
    """All messages, once it has finished."""
    answers = Answers(config, log)
    try:
        told: list[dict[str, Any]] = []
        while not answers.is_over:
            told += answers.hear(1.0)
        return told
    finally:
        answers.close()


# -- What is wrong with a mirror, in a sentence --------------------------------------------

# By the names of the errors: importing the libraries only for their classes would be slow.
_NO_CREDENTIALS = ("NoCredentials", "CredentialRetrieval", "DefaultCredentials")
_REFUSED = (
    *("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"),
    *("Forbidden", "InvalidToken", "AuthFailure"),
)
_UNREACHABLE = ("EndpointConnection", "ConnectTimeout", "ReadTimeout", "ConnectionError", "Timeout")
_MOST = 160
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def describe_trouble(address: str, error: BaseException) -> str:
    """Why a store cannot be used now, whatever its library has raised."""
    return f"{address}: {why(error)}"


def why(error: BaseException) -> str:
    """The same without the address; equal for the same failure."""
    texts = " ".join(f"{type(each).__name__} {each}" for each in _chain(error))
    if any(word in texts for word in _NO_CREDENTIALS):
        return "there are no credentials for it here"
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return "there is no room left in it"
    if isinstance(error, MissingPlace):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        # Without the file name, which differs at each try.
        return f"{type(error).__name__}: {error.strerror}"
    if isinstance(error, PermissionError) or any(word in texts for word in _REFUSED):
        return f"the credentials are refused ({_first_line(error)})"
    if "NoSuchBucket" in texts:
        return "there is no such bucket"
    if any(word in texts for word in _UNREACHABLE):
        return "it cannot be reached"
    return f"{type(error).__name__}: {_first_line(error)}"


def _chain(error: BaseException) -> list[BaseException]:
    found = [error]
    while len(found) < 8 and (cause := found[-1].__cause__ or found[-1].__context__) is not None:
        found.append(cause)
    return found


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"
