"""The keeper's child that copies checkpoints to a mirror: started, polled, and restarted.

A store is used in a process of its own, since its library may hang, crash or fill memory. The
keeper only writes a byte into the child's pipe, and reads its messages when it has time. When the
keeper exits, the pipe closes; the child then copies the newest checkpoint and exits by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import command
from holdfast._store.commit.checkpoint import Policy
from holdfast._store.folder.plain_file import open_log

_PIECE_BYTES = 16 << 20
_AGAIN_SECONDS = (1.0, 5.0, 30.0, 300.0)
_NEVER = float("inf")


def start_speaker(config: dict[str, Any], log: Path | None) -> subprocess.Popen[bytes]:
    """A process that uses the store, in a session of its own."""
    with contextlib.ExitStack() as stack:
        errors: IO[bytes] | int = subprocess.DEVNULL
        if log is not None:
            with contextlib.suppress(OSError):  # the folder has become read-only
                errors = stack.enter_context(open_log(log))
        return subprocess.Popen(
            command("holdfast._store.mirror.__main__", config),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env=variables.child_environment(),
        )


def piece_bytes() -> int:
    """The size of a chunk."""
    return variables.whole_number("HOLDFAST_MIRROR_PIECE_BYTES") or _PIECE_BYTES


class Mirror:
    """The keeper's side of the uploader."""

    def __init__(self, policy: Policy, say: Callable[[str], None]) -> None:
        self._policy = policy
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0
        self._deaths = 0
        self._rest = b""
        self._durable: object = None

    @staticmethod
    def of(policy: Policy, say: Callable[[str], None]) -> Mirror | None:
        """The keeper of rank 0 copies for all ranks."""
        return None if policy.mirror is None or policy.rank else Mirror(policy, say)

    def look(self, now: float, durable: object) -> None:
        """Receive its messages, and start it if needed; `durable` changes with each checkpoint."""
        if self._process is None:
            if now >= self._start_at:
                self._start(now)
            return
        self._receive()
        status = self._process.poll()
        if status is not None:
            self._after_exit(now, status)
        elif durable != self._durable:
            self._durable = durable
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # the pipe is full, or the child is gone
                os.write(self._process.stdin.fileno(), b"\n")

    def leave(self) -> None:
        """The keeper exits: make sure that an uploader stays behind."""
        if self._process is not None:
            self._receive()
            status = self._process.poll()
            if status is None:
                return
            self._after_exit(0.0, status)
        if self._start_at != _NEVER:
            self._start(0.0)

    def _start(self, now: float) -> None:
        policy = self._policy
        config = {
            "task": "serve",
            "folder": str(policy.layout.folder),
            "run_id": policy.run_id,
            "attempt": policy.attempt,
            "address": policy.mirror,
            "keep_last": policy.mirror_keep_last,
            "best": policy.best,
            "piece_bytes": piece_bytes(),
        }
        try:
            self._process = start_speaker(config, policy.layout.mirror_log(policy.attempt))
        except OSError as error:
            self._start_at = now + _AGAIN_SECONDS[-1]
            self._say(f"nothing can be copied to {policy.mirror} now ({error.strerror}).")
            return
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    def _receive(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._process.stdout.fileno(), 1 << 16):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not one of its messages
                self._handle_message(json.loads(line))

    def _handle_message(self, told: dict[str, Any]) -> None:
        if told["kind"] == "mirrored":
            self._deaths = 0
        elif told["kind"] == "trouble":
            fact, _, then = told["text"].partition("\n")
            if then:
                self._say(f"{fact}\n{then}")
                return
            # One line, in the words of its library.
            self._say(
                f"{fact.rstrip('.')}. Training goes on, its checkpoints are safe in the run "
                "folder, and the copy is tried again."
            )
        elif told["kind"] == "damaged":
            self._say(
                f"{told['text']}\nTo look closer: holdfast verify {self._policy.layout.folder}"
            )
        elif told["kind"] == "well":
            self._say(f"{told['address']}: copying works again.")

    def _after_exit(self, now: float, status: int) -> None:
        """It was killed, or has exited because the mirror belongs to another run."""
        assert self._process is not None
        self._receive()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process, self._durable, self._rest = None, None, b""
        pause = _AGAIN_SECONDS[min(self._deaths, len(_AGAIN_SECONDS) - 1)]
        self._deaths += 1
        # If it exited by itself it has said why, and would find the same again.
        self._start_at = _NEVER if status == 0 else now + pause
