"""Two hosts on one machine, joined by one cable that can be cut.

A host is a set of Linux namespaces: it has a network, a name, processes, and shared memory of
its own, and only its files are those of this machine. Its first process holds all that; with it
the host dies as by a power cut, and no test leaves anything behind.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil

from tests.support import Trainer, environment, wait_until

SCRIPT = Path(__file__).parent / "free_rank.py"
_CABLE = "cable0"
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
# While a shell waits for one child, it takes care of all others that are left to it. Pids begin
# elsewhere on each host: in the folder that both see, unfinished files are named by them.
_FIRST_PROCESS = (
    'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && ip link set lo up '
    '&& echo "$1" >/proc/sys/kernel/ns_last_pid && echo up && cat; exit 0'
)


def why_not() -> str | None:
    """What is missing for hosts of this kind; None if nothing is."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "hostname") if not shutil.which(tool)]
    if missing:
        return f"needs {', '.join(missing)}: install iproute2, util-linux and hostname"
    try:
        TwoHosts(Path()).end()
    except (AssertionError, subprocess.SubprocessError) as error:
        return f"needs root, namespaces and virtual cables: {error}"
    return None


def has_ipv6() -> bool:
    """Whether this system speaks it."""
    return Path("/proc/net/if_inet6").exists()


class Host:
    """One of them."""

    def __init__(self, name: str, last_pid: int) -> None:
        self.name = name
        command = ("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc")
        self._holder = subprocess.Popen(
            [*command, "sh", "-c", _FIRST_PROCESS, name, str(last_pid)],
            stdin=subprocess.PIPE,  # should this process end, it reads the end of it and goes
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "up\n":
            said = self._holder.stderr.read().strip()
            self.die()
            raise AssertionError(said)
        (self._first,) = psutil.Process(self._holder.pid).children()

    @property
    def first_pid(self) -> int:
        return self._first.pid

    @property
    def entry(self) -> tuple[str, ...]:
        """What makes a command one that runs on this host."""
        return ("nsenter", "--target", str(self.first_pid), *_NAMESPACES)

    def do(self, *command: str) -> str:
        """Run a short command, and return what it says."""
        done = subprocess.run(
            [*self.entry, *command], capture_output=True, text=True, check=False, timeout=30
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def arenas(self) -> list[str]:
        """What runs have left in its shared memory."""
        folder = Path(f"/proc/{self.first_pid}/root/dev/shm")
        return sorted(path.name for path in folder.glob("holdfast-*"))

    def processes(self) -> list[str]:
        """The command lines of all that runs on it, but for what holds it."""
        inside = Path(f"/proc/{self.first_pid}/root/proc")
        assert inside.exists(), f"{self.name} is gone"
        found = []
        for folder in inside.glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if folder.name != "1" and words[0] not in ("", "cat"):
                found.append(" ".join(words))
        return found

    def talks_to(self) -> set[tuple[str, str]]:
        """The addresses, own and other, of all TCP connections that this host has."""
        text = self.do("ss", "--no-header", "--numeric", "--tcp", "state", "established")
        pairs = re.findall(r"(\S+):\d+\s+(\S+):\d+\s*$", text, re.MULTILINE)
        return {(_plain(own), _plain(other)) for own, other in pairs}

    def die(self) -> None:
        """As by a power cut: all its processes end, and what was in its memory is gone."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(30)  # with its first process, the system kills all others
        for pipe in (self._holder.stdout, self._holder.stderr):
            assert pipe is not None
            pipe.close()


def _plain(address: str) -> str:
    return address.strip("[]").removeprefix("::ffff:")


class Rank(Trainer):
    """A rank on a host. Its parent, by which we know how it ended, is outside of the host."""

    def __init__(self, host: Host, *arguments: Any, **variables: str) -> None:
        self.host = host
        super().__init__(*arguments, script=SCRIPT, prefix=host.entry, env=environment(**variables))

    def send(self, number: int) -> None:
        (rank,) = psutil.Process(self.pid).children()
        rank.send_signal(number)

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def last(self, word: str) -> str:
        """What stood behind this word the last time that it was said."""
        found = [line.split()[1] for line in list(self.lines) if line.startswith(f"{word} ")]
        assert found, f"no {word!r} in\n{self.output}"
        return found[-1]

    @property
    def summary(self) -> str:
        """What it has said, without all the steps."""
        lines = list(self.lines)
        told = [line for line in lines if not line.startswith("step ")]
        return "".join(told) + f"(at step {self.step})\n"

    @property
    def step(self) -> int:
        found = (line for line in reversed(self.lines) if line.startswith("step "))
        return int(next(found, "step 0").split()[1])

    def wait_for_step(self, step: int, seconds: float = 20.0) -> None:
        wait_until(
            lambda: self.step >= step or self.is_over, seconds, f"step {step} in\n{self.output}\n"
        )
        assert self.step >= step, self.output


class TwoHosts:
    """Both, and the cable between them; the first is that of rank 0."""

    def __init__(self, folder: Path, network: str = "10.77.0") -> None:
        self.folder = folder
        self._numbers = itertools.count()
        self.hosts = [self._new_host(), self._new_host()]
        self.ranks: list[Rank] = []
        dot = ":" if ":" in network else "."
        self.addresses = [f"{network}{dot}{number}" for number in (1, 2)]
        self._length = "64" if ":" in network else "24"
        self._lay_cable()

    def _new_host(self) -> Host:
        number = next(self._numbers)
        return Host(f"host-{'abc'[number]}", 1000 + 5000 * number)

    def _lay_cable(self) -> None:
        ends = [("name", _CABLE, "netns", str(host.first_pid)) for host in self.hosts]
        command = ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]]
        subprocess.run(command, check=True, timeout=30)
        for end in (0, 1):
            self.heal(end)

    def cut(self, end: int = 1) -> None:
        """Pull the cable out of one host: nobody is sent a word of it."""
        self.hosts[end].do("ip", "link", "set", _CABLE, "down")

    def heal(self, end: int = 1) -> None:
        """Put the cable in; the system has forgotten an IPv6 address meanwhile."""
        host, address = self.hosts[end], self.addresses[end]
        host.do("ip", "link", "set", _CABLE, "up")
        # Else it could not be used before nobody else has claimed it for a second.
        at_once = ("nodad",) if ":" in address else ()
        host.do("ip", "addr", "replace", f"{address}/{self._length}", "dev", _CABLE, *at_once)

    def replace(self, number: int) -> None:
        """Another machine takes the place of one that died, with its address."""
        self.hosts[number] = self._new_host()
        other = self.hosts[1 - number]
        other.do("sh", "-c", f"ip link del {_CABLE} 2>&- || true")  # its end may be gone already
        self._lay_cable()

    def start(self, *arguments: Any, **variables: str) -> list[Rank]:
        """One rank on each."""
        ranks = []
        for number, host in enumerate(self.hosts):
            words = {"RANK": str(number), "WORLD_SIZE": "2", **variables}
            ranks.append(Rank(host, self.folder, "--rank", number, *arguments, **words))
        self.ranks += ranks
        return ranks

    @property
    def outputs(self) -> str:
        """What all have said so far, to be shown when something went wrong."""
        said = "\n".join(f"-- on {rank.host.name} --\n{rank.summary}" for rank in self.ranks)
        logs = sorted(self.folder.glob("attempts/*/keeper*.log"))
        return said + "".join(f"\n-- {log.name} --\n{log.read_text()}" for log in logs)

    def end(self) -> None:
        """For clean-up: the hosts take with them whatever still runs there."""
        for host in self.hosts:
            host.die()
        for rank in self.ranks:
            rank.end()
