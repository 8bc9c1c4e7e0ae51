"""Where the ranks meet, as the network sees it: names, ports, and who has them.

All of this comes before torch is asked. torch waits half an hour for an address that does not
answer, and forever for one where something else does. Every wait here is bounded.
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from holdfast._environment.processes.identity import host_name, of_process
from holdfast._environment.processes.threads import command_of
from holdfast._errors import RanksError
from holdfast._run.ranks.world import is_by_agent, is_own, name_ranks, rank_and_size, tasks_of_srun

Tell = Callable[[str], None]
_TELL_AFTER_SECONDS = 10.0
_PROBE_SECONDS = 5.0
_LISTENING = "0A"  # of a line in /proc/net/tcp


@dataclass(frozen=True)
class Endpoint:
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

    def poll(self, look: Callable[[], str | None], what: str) -> str | None:
        """What `look` finds; None if it finds nothing in time."""
        pause = 0.001
        while (found := look()) is None:
            if not self.wait(pause, what):
                return None
            pause = min(_POLL_SECONDS, 2 * pause)
        return found


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
    pause, last, is_here = 0.02, "", any(map(is_own, addresses))
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


def is_refused(endpoint: Endpoint) -> bool:
    """Whether nothing listens there; False if that is not certain."""
    try:
        address = (endpoint.host, endpoint.port)
        with socket.create_connection(address, _PROBE_SECONDS) as probe:
            return bool(probe.getsockname() == probe.getpeername())  # as above
    except ConnectionRefusedError:
        return True
    except (OSError, UnicodeError):
        return False


def _no_answer(endpoint: Endpoint, addresses: Sequence[str], seconds: float, last: str) -> str:
    step = "Rank 0 has not started there yet, has ended, or was given another port: see its output."
    if addresses[0].startswith("127.") or addresses[0] == "::1":
        step = f"{endpoint.host} is this host itself. {step.replace('there', 'here')} If it is on "
        step += "another host, MASTER_ADDR must name that one."
    elif "refused" not in last:
        step = "A firewall is between the hosts, the address is wrong, or its host is down: try "
        step += f"`nc -vz {endpoint.host} {endpoint.port}` from here while rank 0 waits."
    return f"rank 0 did not answer at {endpoint} within {seconds:g} s: {last}.\n{step}"


def _bound(port: int) -> socket.socket:
    """A socket that has the port on all addresses, as torch's store would."""
    try:
        made = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:  # a host without IPv6
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # there it would share the port with its owner
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("", port))
    except OSError:
        made.close()
        raise
    return made


def check_port(port: int) -> None:
    """For rank 0: the port must be free for its store."""
    try:
        _bound(port).close()
    except PermissionError as error:
        raise RanksError(
            f"MASTER_PORT is {port}, which this user may not open: {error.strerror}.\n"
            f"Take one above 1023, the same for all ranks: MASTER_PORT=29500"
        ) from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE or _holder(_listeners(port)) == os.getpid():
            return  # torch shares a store within a process, and reports other errors itself
        raise RanksError(port_in_use(port)) from error


def port_in_use(port: int) -> str:
    return (
        f"MASTER_PORT is {port}, and on this host that port is in use by {port_owner(port)}.\n"
        f"If that is a run that shall go on, give this one another port on all ranks, such as "
        f"MASTER_PORT={_free_port_after(port)}; `torchrun --standalone` finds one by itself."
    )


def _free_port_after(port: int) -> int:
    for other in (*range(port + 1, min(port + 100, 65536)), 0):  # 0: any
        with contextlib.suppress(OSError), _bound(other) as found:
            return int(found.getsockname()[1])
    return port


def is_taken(port: int) -> bool:
    return bool(_listeners(port))


def port_owner(port: int) -> str:
    """Who listens at a port of this host, as far as this user may know."""
    sockets = _listeners(port)
    pid = _holder(sockets)
    if pid is not None:
        return f"pid {pid} ({command_of(pid) or '?'})"
    users = {f"user {_user(uid)}" for uid in sockets.values()}
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
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")] if sockets else []
    for pid in (os.getpid(), *pids):
        with contextlib.suppress(OSError):  # another user's, or one that has just ended
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile, as the folder itself is
                    if str(entry.readlink()) in sockets:
                        return pid
    return None


def _user(uid: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)


# -- Before they train, the ranks make sure through the store that they are all there, and one job.
# Rank 0 of another job at the same port, and a second process with the same rank, would
# otherwise train along or hang. Each rank writes who it is; rank 0 waits for all of them and
# then says go, or what is wrong, so that all leave with the same sentence.


_POLL_SECONDS = 0.2
_HEARD_SECONDS = 2.0  # for the others to read what is wrong, before the store ends with rank 0
_NUMBERS = re.compile(r"(?<![\d.])\d+(?![\d.])")
_NOTHING = "?"
_calls = 0  # of this process: a store may outlive a process group


def describe_caller(now: Mapping[str, str]) -> dict[str, str]:
    process = of_process()
    script = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
    command = " ".join([Path(script).name, *sys.argv[1:]])[:120]
    return {
        "process": f"pid {process.pid} on {process.host}",
        "started": process.started,
        "host": process.host,
        "command": command,
        "script": Path(script).name,
        "world": str(rank_and_size(now)[1]),
        "run": now.get("TORCHELASTIC_RUN_ID", ""),
        "slurm": now.get("SLURM_JOB_ID", ""),
        # Ranks that one process has spawned have its arguments. Numbers may tell hosts apart.
        "spawned": _NUMBERS.sub("N", command) if multiprocessing.parent_process() else "",
    }


def find_difference(mine: Mapping[str, str], first: Mapping[str, str]) -> str | None:
    """Why rank 0 cannot be of this rank's job; None if it can."""
    for name, variable in (("run", "TORCHELASTIC_RUN_ID"), ("world", "WORLD_SIZE")):
        if mine[name] != first[name]:
            return f"{variable} is {first[name] or 'not set'} there and {mine[name] or 'not'} here"
    # A rank that srun did not start has no number of the job.
    if mine["slurm"] and first["slurm"] and mine["slurm"] != first["slurm"]:
        return f"SLURM_JOB_ID is {first['slurm']} there and {mine['slurm']} here"
    if mine["script"] != first["script"]:
        return f"it runs {first['script']}, and here it is {mine['script']}"
    spawned = (mine["spawned"], first["spawned"])
    if mine["host"] == first["host"] and all(spawned) and spawned[0] != spawned[1]:
        return f"it was started as {first['command']}, and this as {mine['command']}"
    return None


def wait_for_all_ranks(
    store: Any, now: Mapping[str, str], endpoint: Endpoint, patience: AddressPatience
) -> str:
    """Return when all ranks are there and are one job; else RanksError, on all of them.

    Of torch's `store` only `set` and `compare_set` are used. What it returns is a name of this
    gathering, for keys that no other one has used.
    """
    global _calls
    roll_call = _RollCall(store, now, endpoint, patience)
    try:
        roll_call.call()
    except RuntimeError as error:  # torch's, of all kinds of lost connections
        raise RanksError(
            f"the store at {endpoint} was lost while the ranks gathered: "
            f"{str(error).splitlines()[0]}\n"
            "The process that hosts it, rank 0 or torchrun's agent, has ended: see its output."
        ) from error
    _calls += 1
    return roll_call.name


class _RollCall:
    def __init__(
        self, store: Any, now: Mapping[str, str], endpoint: Endpoint, patience: AddressPatience
    ) -> None:
        self._store = store
        self._now = now
        self._endpoint = endpoint
        self._patience = patience
        self._rank, self._size = rank_and_size(now)
        self._me = describe_caller(now)
        # The agent's store serves every attempt of its ranks.
        self.name = f"holdfast/{now.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_calls}"

    def call(self) -> None:
        if is_by_agent(self._now):
            self._check_run()
            # The agent has decided which rank is which: an entry of an earlier attempt is void.
            self._store.set(self._key(self._rank), json.dumps(self._me))
        else:
            if self._rank != 0:
                self._check_job()
            self._claim()
        if self._rank == 0:
            self._gather()
        else:
            self._await_go()

    def _key(self, rank: int) -> str:
        return f"{self.name}/rank-{rank}"

    def _look(self, key: str) -> str | None:
        """What stands under a key, without waiting for it."""
        # Not by check(), which torch 2.4 lacks: the expected value comes back if there is none.
        found = self._store.compare_set(key, _NOTHING, _NOTHING).decode()
        return None if found == _NOTHING else found

    def _check_run(self) -> None:
        """Two jobs that torchrun runs with one endpoint have one store, and all its keys."""
        mine = self._me["run"]
        first = self._store.compare_set("holdfast/run", "", mine).decode()
        if first != mine:
            raise self._another_job(f"its TORCHELASTIC_RUN_ID is {first}, and here it is {mine}")

    def _check_job(self) -> None:
        what = f"rank 0 has a store at {self._endpoint} and has not come to it"
        told = self._patience.poll(lambda: self._look(self._key(0)), what)
        if told is None:
            raise RanksError(
                f"a store of torch answers at {self._endpoint}, and within "
                f"{self._patience.seconds:g} s no rank 0 of this job has come to it.\n"
                "Another job may have that port: take another MASTER_PORT. Or rank 0 calls "
                "torch.distributed.init_process_group: call holdfast's on all ranks."
            )
        first = json.loads(told)
        difference = find_difference(self._me, first)
        if difference is not None:
            raise self._another_job(f"its rank 0 is {_words(first)}; {difference}")

    def _another_job(self, why: str) -> RanksError:
        return RanksError(
            f"another job answers at {self._endpoint}: {why}.\n"
            "Give each job a port of its own on all its ranks, by MASTER_PORT or torchrun's "
            "--rdzv-endpoint; on one host `torchrun --standalone` finds one."
        )

    def _claim(self) -> None:
        """One process for each rank. The same one may come again, with another process group."""
        mine = json.dumps(self._me)
        held = self._store.compare_set(self._key(self._rank), "", mine).decode()
        if held != mine:
            self._store.set(f"{self.name}/twice", str(self._rank))
            raise RanksError(
                f"two processes say that they are rank {self._rank}: {_words(json.loads(held))}, "
                f"and this one, {_words(self._me)}.\n"
                "Give each process its own RANK; if these are two jobs, give each its own "
                "MASTER_PORT."
            )

    def _gather(self) -> None:
        missing, pause = list(range(1, self._size)), 0.001
        while missing := [rank for rank in missing if self._look(self._key(rank)) is None]:
            if not self._patience.wait(pause, f"{name_ranks(missing)} not there yet"):
                self._give_up(missing)
            pause = min(_POLL_SECONDS, 2 * pause)
        self._store.set(f"{self.name}/go", "go")

    def _give_up(self, missing: list[int]) -> NoReturn:
        there = [rank for rank in range(self._size) if rank not in missing]
        is_one, longer = len(missing) == 1, 10 * self._patience.seconds
        step = f"Was {'it' if is_one else 'any of them'} started, and what does it say? To wait "
        step += f"longer: init_process_group(timeout_seconds={longer:g})"
        tasks = tasks_of_srun(self._now)
        if tasks is not None and tasks < self._size:
            step = f"srun has started {tasks} tasks (SLURM_NTASKS): set WORLD_SIZE to {tasks}."
        twice = self._look(f"{self.name}/twice")
        again = "" if twice is None else f", and two processes say that they are rank {twice}"
        text = (
            f"{name_ranks(missing)} of {self._size} {'has' if is_one else 'have'} not come to "
            f"{self._endpoint} within {self._patience.seconds:g} s; {name_ranks(there)} "
            f"{'is' if there == [0] else 'are'} there{again}.\n{step}"
        )
        self._store.set(f"{self.name}/go", f"not: {text}")
        unheard, deadline = there[1:], time.monotonic() + _HEARD_SECONDS
        while unheard and time.monotonic() < deadline:
            unheard = [rank for rank in unheard if self._look(f"{self._key(rank)}/heard") is None]
            time.sleep(0.01)
        raise RanksError(text)

    def _await_go(self) -> None:
        # Rank 0 waits for all, and says for whom; only if it does not this rank gives up itself.
        patience = AddressPatience(self._patience.seconds + _HEARD_SECONDS, lambda _: None)
        word = patience.poll(lambda: self._look(f"{self.name}/go"), "")
        if word is None:
            raise RanksError(
                f"rank 0 did not let the others start within {patience.seconds:g} s, though "
                f"its store at {self._endpoint} answers.\n"
                "See what rank 0 says, and call holdfast's init_process_group on all ranks."
            )
        if word != "go":
            self._store.set(f"{self._key(self._rank)}/heard", "yes")
            raise RanksError(word.removeprefix("not: "))


def _words(caller: Mapping[str, Any]) -> str:
    return f"{caller['process']} ({caller['command']})"
