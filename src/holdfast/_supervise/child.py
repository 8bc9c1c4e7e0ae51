"""The start of the command: its streams, its session, and that it does not outlive us.

Nothing here blocks: a reader that does not read makes the command wait, as it would without us,
and signals are still received. When a reader leaves (`| head`), our end is closed, and the command
gets SIGPIPE.

With a terminal for input and output it gets a terminal and a session of its own, and does its own
job control. Without any terminal it gets a session too: a signal to our group reaches it once,
through us. With a terminal on some of its streams only, it stays in our group, which has the
terminal: keys reach it as without us.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import stat
import termios
from collections.abc import Callable, Collection, Mapping, Sequence

from holdfast._supervise.terminal import copy_modes, copy_size, open_again, open_pair

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LETS_READ = 0x59616D61  # PR_SET_PTRACER
_ERROR_BYTES = 4
_PIECE_BYTES = 65536
_MOST_WAITING_BYTES = 65536
_MOST_PIECES = 64  # no pipe holds more
# A write of this size does not block if the descriptor is writable.
_SURE_BYTES = 512
_SURE_OF_SOCKET_BYTES = 4096


class Outlet:
    """One of our own streams, written to without ever blocking."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._waiting = bytearray()
        self.is_closed = False
        self.is_for_errors = False  # gets our own lines, too
        self.is_terminal = os.isatty(descriptor)
        mode = os.fstat(descriptor).st_mode
        self._waits = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or self.is_terminal
        self._own = open_again(descriptor, os.O_WRONLY) if self._waits else None
        self._sure_bytes = _SURE_OF_SOCKET_BYTES if stat.S_ISSOCK(mode) else _SURE_BYTES

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= _MOST_WAITING_BYTES

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting) and not self.is_closed

    def add(self, data: bytes) -> None:
        """Write what can be written now, and keep the rest."""
        if not self.is_closed:
            self._waiting += data
            self.flush()

    def flush(self) -> None:
        while self._waiting and not self.is_closed:
            may_wait = self._waits and self._own is None
            if may_wait and not self._is_writable():
                return
            piece = self._waiting[: self._sure_bytes if may_wait else _PIECE_BYTES]
            try:
                written = os.write(self.descriptor if self._own is None else self._own, piece)
            except BlockingIOError:
                return
            except InterruptedError:
                continue
            except OSError as error:
                self._waiting.clear()
                # A full disk may have room again. A terminal that was closed is no reason to stop
                # training: its SIGHUP says that already.
                if error.errno in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                    self._close()
                return
            del self._waiting[:written]

    def _is_writable(self) -> bool:
        poller = select.poll()
        poller.register(self.descriptor, select.POLLOUT)
        return bool(poller.poll(0))

    def _close(self) -> None:
        self.is_closed = True
        if self._own is not None:
            with contextlib.suppress(OSError):
                os.close(self._own)


class Inlet:
    """One end of a pipe or terminal into which the command writes."""

    def __init__(self, descriptor: int, outlet: Outlet, on_output: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._outlet = outlet
        self._on_output = on_output
        self.is_terminal = os.isatty(descriptor)
        self.is_over = False
        self._pieces_left: int | None = None  # no limit while the command lives

    @property
    def wants_to_read(self) -> bool:
        return not self.is_over and not self._outlet.is_full

    def pump(self) -> bool:
        """Pass on one piece; False if there was none."""
        if self._outlet.is_closed and not self.is_terminal:
            self.close()
            return False
        try:
            data = os.read(self.descriptor, _PIECE_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # the other end of a terminal is closed
            data = b""
        if not data:
            self.close()
            return False
        self._on_output(data)
        self._outlet.add(data)
        if self._outlet.is_closed and not self.is_terminal:
            self.close()
        if self._pieces_left is not None:
            self._pieces_left -= 1
            if self._pieces_left <= 0:
                self.close()
        return True

    def drain(self) -> None:
        """The command has ended: pass on what is there, as far as it is taken.

        The pieces are limited: a process that it left behind may write forever.
        """
        if self._pieces_left is None:
            self._pieces_left = _MOST_PIECES
        while self.wants_to_read and self.pump():
            pass

    def close(self) -> None:
        """The command gets SIGPIPE if it writes on."""
        if not self.is_over:
            self.is_over = True
            if not self.is_terminal:  # the terminal's end is also where keys go in
                os.close(self.descriptor)


def hold_closed_streams() -> set[int]:
    """Open /dev/null for the standard streams that we were started without (`<&-`).

    Otherwise the next file that we open would get their number. The command is started without
    them too.
    """
    found: set[int] = set()
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            with contextlib.suppress(OSError):
                found.add(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    return found


def find_outlets(closed: Collection[int]) -> dict[int, Outlet]:
    """Our two outputs; the same object where both are the same file, to keep the order."""
    found: dict[int, Outlet] = {}
    for number in (1, 2):
        if number in closed:
            continue
        with contextlib.suppress(OSError):
            is_same = 1 in found and number == 2 and _place(1) == _place(2)
            found[number] = found[1] if is_same else Outlet(number)
            found[number].is_for_errors = number == 2
    return found


def _place(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    if stat.S_ISCHR(status.st_mode):
        return (status.st_rdev,)
    return (status.st_dev, status.st_ino)


class Streams:
    """The three streams of the command, and the ends that we keep."""

    def __init__(self, outlets: Mapping[int, Outlet], on_output: Callable[[bytes], None]) -> None:
        self.inlets: list[Inlet] = []
        self.given: dict[int, int] = {}
        self.master: int | None = None  # of the command's own terminal, with keyboard
        self._screens: list[tuple[int, int]] = []
        self._ours: set[int] = set()  # ends that only the command should have
        self._on_output = on_output
        has_terminal = any(os.isatty(number) for number in (0, 1, 2))
        if os.isatty(0) and os.isatty(1) and _place(0) == _place(1):
            self.master, self.given[0] = open_pair(0)
            self._ours.add(self.given[0])
        self.has_own_session = self.master is not None or not has_terminal
        ends: dict[Outlet, int] = {}
        for number, outlet in outlets.items():
            if outlet not in ends:
                ends[outlet] = self._open(number, outlet)
            self.given[number] = ends[outlet]

    def pass_size_on(self, child: int) -> None:
        """Copy the size of our window, which has changed."""
        if self.master is not None:
            copy_size(0, self.master)  # which sends SIGWINCH
        for number, master in self._screens:
            copy_size(number, master)
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGWINCH)  # its own terminal gets no SIGWINCH of this one

    def copy_terminal(self, child: int) -> None:
        """Copy modes and sizes: ours had others, for the keys, when these were opened."""
        if self.master is not None:
            copy_modes(0, self.given[0], is_screen_only=False)
        for number, _ in self._screens:
            copy_modes(number, self.given[number], is_screen_only=True)
        self.pass_size_on(child)

    def close_given(self, *, is_over: bool) -> None:
        """Close the command's ends. Those of a terminal stay until it is over, since the command
        may close its streams and open them again."""
        for descriptor in sorted(self._ours):
            if is_over or not os.isatty(descriptor):
                os.close(descriptor)
                self._ours.discard(descriptor)

    def close(self) -> None:
        self.close_given(is_over=True)
        for inlet in self.inlets:
            inlet.close()
        masters = [master for _, master in self._screens]
        for master in [*masters, *([] if self.master is None else [self.master])]:
            with contextlib.suppress(OSError):
                os.close(master)

    def _open(self, number: int, outlet: Outlet) -> int:
        if outlet.is_closed:
            ours, given = os.pipe()
            os.close(ours)
            self._ours.add(given)
            return given
        if not outlet.is_terminal:
            ours, given = os.pipe()
        elif self.master is not None and _place(number) == _place(0):
            self.inlets.append(Inlet(self.master, outlet, self._on_output))
            return self.given[0]
        else:
            ours, given = open_pair(number, is_screen_only=True)
            self._screens.append((number, ours))
        self._ours.add(given)
        self.inlets.append(Inlet(ours, outlet, self._on_output))
        return given


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    streams: Streams,
    mask: set[int | signal.Signals],
    *,
    inherited: Collection[int] | None = None,
) -> int:
    """Start the command and return its pid; OSError if it cannot be started.

    `inherited` are further descriptors, for a spare. A spare that would be in our group is in one
    of its own until it is needed: keys are not for it.
    """
    library = ctypes.CDLL(None)
    leader = os.getpid()
    failure, failure_in_child = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _take_streams(streams)
            if inherited is not None:
                if not streams.has_own_session:
                    os.setpgid(0, 0)
                for descriptor in inherited:
                    os.set_inheritable(descriptor, True)
            library.prctl(_DIES_WITH_PARENT, signal.SIGTERM, 0, 0, 0)
            # Let the processes that we start read its stacks: many systems forbid that otherwise.
            library.prctl(_LETS_READ, ctypes.c_ulong(leader), 0, 0, 0)
            if os.getppid() != leader:
                os._exit(128 + signal.SIGTERM)
            # Python ignores the last two. The warning signals stay as we got them. Where the
            # job's script ignores them, a warning that SLURM sends to all processes at once
            # (proctrack/linuxproc) must not kill a trainer that still imports torch. Otherwise a
            # script without a handler ends by them. The same for Ctrl-C in the background, and
            # for SIGHUP under nohup.
            for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback before the exec
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(command[0], list(command), dict(environment))
        except (OSError, ValueError) as error:  # the latter for an empty name
            reason = getattr(error, "errno", None) or errno.ENOENT
            os.write(failure_in_child, reason.to_bytes(_ERROR_BYTES, "little"))
        finally:
            os._exit(127)
    os.close(failure_in_child)
    streams.close_given(is_over=False)
    with os.fdopen(failure, "rb") as file:
        failed = file.read()  # ends with the exec
    if failed:
        os.waitpid(child, 0)
        reason = int.from_bytes(failed[:_ERROR_BYTES], "little")
        raise OSError(reason, os.strerror(reason), command[0])
    return child


def _take_streams(streams: Streams) -> None:
    if streams.has_own_session:
        os.setsid()
    if streams.master is not None:
        fcntl.ioctl(streams.given[0], termios.TIOCSCTTY, 0)
    # Duplicated first, so that none is overwritten before its turn.
    apart = {number: os.dup(descriptor) for number, descriptor in streams.given.items()}
    for number, descriptor in apart.items():
        os.dup2(descriptor, number)
