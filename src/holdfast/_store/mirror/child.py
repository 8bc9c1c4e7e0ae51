"""Processes that use a store: the keeper's uploader, and one that answers a single question.

A store is used in a process of its own, since its library may hang, crash or fill memory. The
process sends its messages as lines of JSON. The keeper only writes a byte into the uploader's pipe,
and reads its messages when it has time. When the keeper exits, the pipe closes; the uploader then
copies the newest checkpoint and exits by itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import command
from holdfast._errors import MirrorError
from holdfast._store.commit.write import Policy
from holdfast._store.folder import journal
from holdfast._store.folder.plain_file import open_log
from holdfast._store.mirror.store import MissingPlace
from holdfast._text import cut

_AGAIN_SECONDS = (1.0, 5.0, 30.0, 300.0)
_NEVER = float("inf")
_SILENT_SECONDS = 120.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Service:
    folder: str
    run_id: str
    attempt: int
    address: str
    keep_last: int
    best: tuple[str, str] | None


def start_speaker(config: dict[str, Any], log: Path | None) -> subprocess.Popen[bytes]:
    """A process that uses the store, in a session of its own."""
    with contextlib.ExitStack() as stack:
        errors: IO[bytes] | int = subprocess.DEVNULL
        with contextlib.suppress(OSError):  # the folder has become read-only
            errors = errors if log is None else stack.enter_context(open_log(log))
        return subprocess.Popen(
            command("holdfast._store.mirror.fetch", config),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env=variables.child_environment(),
        )


class Speaker:
    def __init__(self, config: dict[str, Any], log: Path | None = None) -> None:
        self._address = config["address"]
        self.process = start_speaker(config, log)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._input, False)
        self._rest = b""
        self._heard_at = time.monotonic()
        self.is_over = False

    def notify(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full, or the process is gone
            os.write(self._input, b"\n")

    def receive(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """The messages that have arrived; waits at most so long for the first byte."""
        while not self.is_over and select.select([self._output], [], [], seconds)[0]:
            data = os.read(self._output, 1 << 16)
            self._rest += data
            self._heard_at, self.is_over, seconds = time.monotonic(), not data, 0.0
        *lines, self._rest = self._rest.split(b"\n")
        # Other lines are output of a library.
        found = (journal.parse(line) for line in lines)
        return [each for each in found if each is not None and "kind" in each]

    def answers(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Its messages within this time; MirrorError if it fails, or is silent for long."""
        deadline = time.monotonic() + seconds
        while not self.is_over and (left := deadline - time.monotonic()) > 0:
            for told in self.receive(left):
                if told["kind"] == "failed":
                    raise self._failed(told["text"])
                yield told
            if time.monotonic() - self._heard_at > _SILENT_SECONDS:
                raise self._failed(f"no answer for {_SILENT_SECONDS:.0f} s")
        if self.is_over and self.process.wait() != 0:
            raise self._failed("the process that asks it has died")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
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


def ask(config: dict[str, Any]) -> list[dict[str, Any]]:
    """All messages, once it has finished."""
    with contextlib.closing(Speaker(config)) as speaker:
        told: list[dict[str, Any]] = []
        while not speaker.is_over:
            told += speaker.answers(1.0)
        return told


class Mirror:
    """The keeper's side of the uploader."""

    def __init__(self, policy: Policy, say: Callable[[str], None]) -> None:
        assert policy.mirror is not None
        self._layout = policy.layout
        self._service = Service(
            folder=str(policy.layout.folder),
            run_id=policy.run_id,
            attempt=policy.attempt,
            address=policy.mirror,
            keep_last=policy.mirror_keep_last,
            best=policy.best,
        )
        self._say = say
        self._speaker: Speaker | None = None
        self._start_at = 0.0
        self._deaths = 0
        self._durable: object = None

    def poll(self, now: float, durable: object) -> None:
        """Receive its messages, and start it if needed; `durable` changes with each checkpoint."""
        if self._speaker is None:
            if now >= self._start_at:
                self._start(now)
        elif self._is_running(now) and durable != self._durable:
            self._durable = durable
            self._speaker.notify()

    def leave(self) -> None:
        """The keeper exits: make sure that an uploader stays behind."""
        if not self._is_running(0.0) and self._start_at != _NEVER:
            self._start(0.0)

    def _start(self, now: float) -> None:
        service = self._service
        config = {"task": "serve", "address": service.address, "service": asdict(service)}
        try:
            self._speaker = Speaker(config, self._layout.mirror_log(service.attempt))
        except OSError as error:
            self._start_at = now + _AGAIN_SECONDS[-1]
            self._say(f"nothing can be copied to {service.address} now ({error.strerror}).")

    def _is_running(self, now: float) -> bool:
        """Receive its messages; False if it was killed, or the mirror belongs to another run."""
        speaker = self._speaker
        if speaker is None:
            return False
        status = speaker.process.poll()
        for told in speaker.receive():
            with contextlib.suppress(KeyError, TypeError):  # not one of its messages
                self._take(told)
        if status is None:
            return True
        speaker.close()
        self._speaker = self._durable = None
        pause = _AGAIN_SECONDS[min(self._deaths, len(_AGAIN_SECONDS) - 1)]
        self._deaths += 1
        # If it exited by itself it has said why, and would find the same again.
        self._start_at = _NEVER if status == 0 else now + pause
        return False

    def _take(self, told: dict[str, Any]) -> None:
        if told["kind"] == "mirrored":
            self._deaths = 0
        elif told["kind"] == "trouble" and "\n" in told["text"]:
            self._say(told["text"])
        elif told["kind"] == "trouble":  # one line, in the words of its library
            self._say(
                f"{told['text'].rstrip('.')}. Training goes on, its checkpoints are safe in the "
                "run folder, and the copy is tried again."
            )
        elif told["kind"] == "damaged":
            self._say(f"{told['text']}\nTo look closer: holdfast verify {self._service.folder}")
        elif told["kind"] == "well":
            self._say(f"{self._service.address}: copying works again.")


# -- What is wrong with a mirror, in a sentence --------------------------------------------

# By the names of the errors: importing the libraries only for their classes would be slow.
_NO_CREDENTIALS = ("NoCredentials", "CredentialRetrieval", "DefaultCredentials")
_REFUSED = (
    *("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"),
    *("Forbidden", "InvalidToken", "AuthFailure"),
)
_UNREACHABLE = ("EndpointConnection", "ConnectTimeout", "ReadTimeout", "ConnectionError", "Timeout")
_MOST = 160


def describe_trouble(address: str, error: BaseException) -> str:
    """Why a store cannot be used now, whatever its library has raised."""
    return f"{address}: {why(error)}"


def why(error: BaseException) -> str:
    """The same without the address; equal for the same failure."""
    chain = [error]
    while len(chain) < 8 and (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    texts = " ".join(f"{type(each).__name__} {each}" for each in chain)
    first = cut(" ".join(str(error).split()).rstrip(".") or type(error).__name__, _MOST)
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
        return f"the credentials are refused ({first})"
    if "NoSuchBucket" in texts:
        return "there is no such bucket"
    if any(word in texts for word in _UNREACHABLE):
        return "it cannot be reached"
    return f"{type(error).__name__}: {first}"
