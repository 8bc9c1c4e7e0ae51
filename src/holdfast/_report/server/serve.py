"""The server itself: uvicorn on a loopback socket, and a prompt end.

The server holds no state, so Ctrl-C waits for nothing: connections are cut, and threads that hang
on a file system are left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.middleware.gzip import GZipMiddleware

from holdfast._errors import FolderError, SettingsError
from holdfast._report.server import access
from holdfast._report.server.app import Application
from holdfast._report.server.index import RunIndex

_SWITCH_SECONDS = 0.001  # between the threads that read and the one that answers
_BACKLOG = 64
_PACKED_BYTES = 8192  # smaller answers are not compressed


def open_root(folder: Path) -> Path:
    """The folder without links in its path; FolderError if there is none."""
    hint = "Name one with runs in it: holdfast ui runs"
    try:
        root = folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise FolderError(f"{folder}: there is no such folder.\n{hint}") from error
    if not root.is_dir():
        raise FolderError(f"{folder}: this is not a folder.\n{hint}")
    return root


def listen(host: str, port: int) -> socket.socket:
    """A socket that only this machine can reach; SettingsError if the port is taken."""
    if host not in access.LOOPBACK:
        raise SettingsError(
            f"--host {host}: the page is for this machine only, at 127.0.0.1 or ::1.\n"
            "From elsewhere, use a tunnel: ssh -L 8000:127.0.0.1:8000 HOST, "
            "with holdfast ui --port 8000 there"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, else asyncio leaves Nagle's algorithm on: 40 ms for each answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform != "win32":  # where it would let other programs take the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1" if host == "localhost" else host, port))
        # Now, since another program could take the port until the server begins.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        what = "is taken by another program" if error.errno == errno.EADDRINUSE else error.strerror
        raise SettingsError(
            f"port {port} of {host}: {what}.\nTo take any that is free: holdfast ui --port 0"
        ) from error
    return listener


def serve(
    folder: Path,
    *,
    host: str,
    port: int,
    is_read_only: bool,
    ready: Callable[[str], None],
) -> int:
    """Serve until a signal comes, and return the exit status for it.

    `ready` gets the address, which has the token in it.
    """
    root = open_root(folder)
    listener = listen(host, port)
    port, keys = listener.getsockname()[1], access.Keys()
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={keys.token}"
    index = RunIndex(root)
    gate = access.Gate(keys, port)
    app = Application(index, gate, is_read_only=is_read_only)
    # There may be a tunnel between page and server.
    packing = GZipMiddleware(app, minimum_size=_PACKED_BYTES, compresslevel=1)
    _silence()
    sys.setswitchinterval(_SWITCH_SECONDS)
    server = _Server(
        uvicorn.Config(
            packing,
            http=access.BoundedProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # there is no proxy
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=int(access.HEAD_SECONDS),
            h11_max_incomplete_event_size=access.HEAD_BYTES,
        )
    )
    index.start()
    try:
        return asyncio.run(_run(server, listener, lambda: ready(address)))
    finally:
        index.close()


async def _run(server: _Server, listener: socket.socket, ready: Callable[[], None]) -> int:
    number = 0

    def end(received: int) -> None:
        nonlocal number
        number, server.should_exit = received, True

    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(each, end, each)
        except NotImplementedError:  # Windows
            signal.signal(each, lambda received, _: loop.call_soon_threadsafe(end, received))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.005)
    if server.started and not server.should_exit:
        ready()
    await task
    return 128 + number if number else 0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # we handle them

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for each in sockets or ():
            each.close()
        for connection in list(self.server_state.connections):
            if isinstance(connection, access.BoundedProtocol):
                connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()


def _silence() -> None:
    # Requests of strangers are not for the terminal, and addresses hold secrets.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logger = logging.getLogger(name)
        logger.handlers = [logging.NullHandler()]
        logger.propagate = False
        logger.setLevel(logging.CRITICAL + 1)


def write_redirect(place: Path, address: str) -> Path:
    """A file that redirects a browser to the page, readable only by its owner.

    Every user of the machine can see the command line of a browser; the token must not be in it.
    """
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"ui-{os.getpid()}.html"
    path.unlink(missing_ok=True)  # of a killed server with the same pid
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(
            '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0; url={address}"><title>holdfast</title>'
            f'<a href="{address}">holdfast ui</a>\n'
        )
    return path
