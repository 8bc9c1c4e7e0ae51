"""A small client of the protocol that editors speak with debugpy."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from tests.support import wait_until

_ANSWER_SECONDS = 60.0


class Editor:
    """Attaches to a debugpy that listens on this port; its breakpoints hold until `go_on`."""

    def __init__(self, port: int, breakpoints: dict[Path, list[int]]) -> None:
        self._socket = wait_until(lambda: _connect(port), _ANSWER_SECONDS, "debugpy")
        self._stream = self._socket.makefile("rb")
        self._count = 0
        self._events: list[dict[str, Any]] = []
        self.ask("initialize", adapterID="tests", clientID="tests", pathFormat="path")
        # Answered only when all is set up.
        attached = self._send("attach", {"justMyCode": False, "name": "tests"})
        self.wait_for_event("initialized")
        for path, lines in breakpoints.items():
            points = [{"line": line} for line in lines]
            self.ask("setBreakpoints", source={"path": str(path)}, breakpoints=points)
        self.ask("configurationDone")
        self._wait_for_answer(attached)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self._wait_for_answer(self._send(command, arguments))

    def wait_until_stopped(self) -> tuple[int, list[str]]:
        """The thread that is stopped, and its functions, the innermost first."""
        thread = int(self.wait_for_event("stopped")["body"]["threadId"])
        frames = self.ask("stackTrace", threadId=thread)["body"]["stackFrames"]
        return thread, [frame["name"] for frame in frames]

    def go_on(self, thread: int) -> None:
        self.ask("continue", threadId=thread)

    def leave(self) -> None:
        self.ask("disconnect", terminateDebuggee=False)
        self.close()

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def wait_for_event(self, name: str) -> dict[str, Any]:
        while True:
            for event in self._events:
                if event["event"] == name:
                    self._events.remove(event)
                    return event
            self._hear()

    def _send(self, command: str, arguments: dict[str, Any]) -> int:
        self._count += 1
        message = {"seq": self._count, "type": "request", "command": command}
        body = json.dumps({**message, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return self._count

    def _wait_for_answer(self, number: int) -> dict[str, Any]:
        while (message := self._hear()).get("request_seq") != number:
            pass
        assert message["success"], message
        return message

    def _hear(self) -> dict[str, Any]:
        length = 0
        while (line := self._stream.readline().strip()) or not length:
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
            assert line or length, "debugpy has hung up"
        message: dict[str, Any] = json.loads(self._stream.read(length))
        if message["type"] == "event":
            self._events.append(message)
        return message


def _connect(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_SECONDS)
    except OSError:
        return None
