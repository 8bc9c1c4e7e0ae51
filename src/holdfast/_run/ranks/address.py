"""Where the ranks meet, as the network sees it: names, ports, and who has them.

All of this comes before torch is asked, since torch waits half an hour for an address that
nobody answers at, and forever for one where something else does. Every wait here is bounded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast._environment.processes.identity import host_name
from holdfast._errors import RanksError

Tell = Callable[[str], None]
_TELL_AFTER_SECONDS = 10.0
_LEADS_HERE_SECONDS = 5.0
_LISTENING = "0A"  # of a line in /proc/net/tcp


@dataclass(frozen=True)
class Endpoint:
    """MASTER_ADDR and MASTER_PORT."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"MASTER_ADDR={self.host}, MASTER_PORT={self.port}"


class AddressPatience:
    """How long to wait for others, and when to say that one does."""

    def __init__(self, seconds: float, tell: Tell) -> None:
        self.seconds = seconds
        self._tell = tell
        self._began = time.monotonic()
        self._told = False

    @property
    def left(self) -> float:
        """Seconds until it ends."""
        return self._began + self.seconds - time.monotonic()

    def wait(self, seconds: float, what: str) -> bool:
        """Wait a moment for something to come, and say once for what; False when it has ended."""
        if self.left <= 0:
            return False
        if not self._told and self.seconds - self.left > _TELL_AFTER_SECONDS:
            self._told = True
            self._tell(f"{what}; waiting for {self.left:.0f} s more.")
        time.sleep(min(seconds, max(0.0, self.left)))
        return True


def resolve(host: str, patience: AddressPatience) -> list[str]:
    """The addresses of a name; tried again for a while, as names of containers may come late."""
    while True:
        found = _look_up(host, patience.left)
        if isinstance(found, list):
            return found
        what = f'MASTER_ADDR is "{host}", which does not resolve on {host_name()} ({found})'
        if not patience.wait(1.0, what):
            raise RanksError(
                f"{what}.\n"
                "Correct MASTER_ADDR, or give the IP address of rank 0's host, which `hostname -I` "
                "shows there."
            )


def _look_up(host: str, seconds: float) -> list[str] | str:
    """In a thread, since nothing else ends it: addresses, or why there are none."""
    answer: list[list[str] | str] = []

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer.append(list(dict.fromkeys(str(info[4][0]) for info in infos)))
        except (OSError, UnicodeError) as error:
            answer.append(str(getattr(error, "strerror", None) or error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(max(1.0, seconds))
    return answer[0] if answer else f"no answer from the name server within {seconds:.0f} s"


def await_answer(endpoint: Endpoint, addresses: Sequence[str], patience: AddressPatience) -> None:
    """Return when something listens there; rank 0 may come late."""
    pause, last, is_here = 0.02, "", any(map(_is_own, addresses))
    while True:
        # Every connection costs the store, which has one thread, a question to the name server.
        if is_here and _listeners(endpoint.port):
            return
        seconds = min(3.0, max(0.5, patience.left))
        for address in addresses:
            try:
                with socket.create_connection((address, endpoint.port), seconds) as probe:
                    # Without a listener, a port can be connected to itself.
                    if probe.getsockname() != probe.getpeername():
                        return
                last = "connection refused"
            except OSError as error:
                last = (error.strerror or str(error)).lower()
        if not patience.wait(pause, f"rank 0 does not answer at {endpoint} ({last})"):
            raise RanksError(_no_answer(endpoint, addresses, patience.seconds, last))
        pause = min(0.5, 2 * pause)


def _no_answer(endpoint: Endpoint, addresses: Sequence[str], seconds: float, last: str) -> str:
    step = "Rank 0 has not started there yet, has ended, or was given another port: see its output."
    if addresses[0].startswith("127.") or addresses[0] == "::1":
        step = f"{endpoint.host} is this host itself. {step.replace('there', 'here')} If it is on "
        step += "another host, MASTER_ADDR must name that one."
    elif "refused" not in last:
        step = "A firewall is between the hosts, the address is wrong, or its host is down: try "
        step += f"`nc -vz {endpoint.host} {endpoint.port}` from here while rank 0 waits."
    return f"rank 0 did not answer at {endpoint} within {seconds:g} s: {last}.\n{step}"


def check_host(endpoint: Endpoint, addresses: Sequence[str], patience: AddressPatience) -> None:
    """For rank 0: what the others connect to at MASTER_ADDR must be this process."""
    _check_port(endpoint.port)
    if any(_is_own(address) for address in addresses):
        return
    # A service of a cluster or a forwarded port is no address of ours, and yet leads here.
    if _leads_here(endpoint.port, addresses, min(_LEADS_HERE_SECONDS, patience.left)):
        return
    here = host_name()
    number = "" if endpoint.host in addresses else f" ({addresses[0]})"
    raise RanksError(
        f"RANK is 0, and MASTER_ADDR={endpoint.host}{number} is no address of this host, {here}.\n"
        f"Rank 0 must run on the host that MASTER_ADDR names: set MASTER_ADDR={here} for all "
        f"ranks, or start rank 0 on {endpoint.host}."
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_own(address: str) -> bool:
    """Whether this host has the address: only then it can be bound."""
    try:
        with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def _bound(port: int) -> socket.socket:
    """A socket that has the port on all addresses, as torch's store would."""
    try:
        made = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:  # a host without IPv6
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # there it would share the port with whoever has it
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("", port))
    except OSError:
        made.close()
        raise
    return made


def _check_port(port: int) -> None:
    try:
        _bound(port).close()
    except PermissionError as error:
        raise RanksError(
            f"MASTER_PORT is {port}, which this user may not open: {error.strerror}.\n"
            f"Take one above 1023, the same for all ranks: MASTER_PORT=29500"
        ) from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE or _holder(_listeners(port)) == os.getpid():
            return  # torch shares a store within a process; of all else it will tell
        raise RanksError(port_in_use(port)) from error


def port_in_use(port: int) -> str:
    """The sentence for it."""
    return (
        f"MASTER_PORT is {port}, and on this host that port is in use by {port_owner(port)}.\n"
        f"If that is a run that shall go on, give this one another port on all ranks, such as "
        f"MASTER_PORT={_free_port_after(port)}; `torchrun --standalone` finds one by itself."
    )


def _free_port_after(port: int) -> int:
    for other in range(port + 1, min(port + 100, 65536)):
        try:
            _bound(other).close()
        except OSError:
            continue
        return other
    with _bound(0) as found:
        return int(found.getsockname()[1])


def _leads_here(port: int, addresses: Sequence[str], seconds: float) -> bool:
    """Whether what connects to one of the addresses arrives in this process."""
    word = os.urandom(16)
    deadline = time.monotonic() + seconds
    with _bound(port) as listener:
        listener.listen()
        listener.settimeout(0.2)
        while time.monotonic() < deadline:
            for address in addresses:
                try:
                    with socket.create_connection((address, port), timeout=1) as caller:
                        caller.sendall(word)
                        if _arrives(listener, word):
                            return True
                except OSError:
                    continue
            time.sleep(0.05)
    return False


def _arrives(listener: socket.socket, word: bytes) -> bool:
    try:
        while True:
            answered, _ = listener.accept()
            with answered:
                answered.settimeout(0.5)
                if answered.recv(len(word)) == word:
                    return True
    except OSError:  # nobody else has called
        return False


def is_taken(port: int) -> bool:
    """Whether a process of this host listens at a port."""
    return bool(_listeners(port))


def port_owner(port: int) -> str:
    """Who listens at a port of this host, as far as this user may know."""
    sockets = _listeners(port)
    pid = _holder(sockets)
    if pid is not None:
        return f"pid {pid} ({_command(pid)})"
    users = {_user(uid) for uid in sockets.values()}
    return f"a process of {' and '.join(sorted(users))}" if users else "another process"


def _listeners(port: int) -> dict[str, int]:
    """The sockets that listen at a port, as /proc/*/fd names them, and whose they are."""
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found[f"socket:[{fields[9]}]"] = int(fields[7])
    return found


def _holder(sockets: Mapping[str, int]) -> int | None:
    """A process that has one of these sockets open, this one before all others."""
    for pid in [os.getpid(), *_pids()] if sockets else ():
        if any(link in sockets for link in _open_files(pid)):
            return pid
    return None


def _open_files(pid: int) -> Iterator[str]:
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # another user's, or one that has just ended
        return
    for entry in entries:
        with contextlib.suppress(OSError):  # closed meanwhile, as the folder itself is
            yield str(entry.readlink())


def _pids() -> list[int]:
    try:
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return "?"
    return " ".join(words.split("\0")).strip()[:120]


def _user(uid: int) -> str:
    try:
        import pwd

        return f"user {pwd.getpwuid(uid).pw_name}"
    except (ImportError, KeyError):
        return f"user {uid}"
