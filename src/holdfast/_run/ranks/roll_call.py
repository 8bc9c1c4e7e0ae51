"""Before they train, the ranks make sure through the store that they are all there, and one job.

Rank 0 of another job at the same port, and a second process with the same rank, would
otherwise train along or hang. Each rank writes who it is; rank 0 waits for all of them and
then says go, or what is wrong, so that all leave with the same sentence.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from holdfast._environment.processes.identity import of_process
from holdfast._errors import RanksError
from holdfast._run.ranks.address import AddressPatience, Endpoint
from holdfast._run.ranks.environment import is_by_agent, name_ranks, rank_and_size, tasks_of_srun

_POLL_SECONDS = 0.2
_HEARD_SECONDS = 2.0  # for the others to read what is wrong, before the store ends with rank 0
_NUMBERS = re.compile(r"(?<![\d.])\d+(?![\d.])")
_NOTHING = "?"
_calls = 0  # of this process: a store may outlive a process group


class Store(Protocol):
    """What is used of a store of torch."""

    def set(self, key: str, value: str, /) -> None: ...

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes: ...


def describe_caller(now: Mapping[str, str]) -> dict[str, str]:
    """Who this rank is, and of which job."""
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
    # By other ways than srun, a rank has no number of the job; whoever has one is of that job.
    if mine["slurm"] and first["slurm"] and mine["slurm"] != first["slurm"]:
        return f"SLURM_JOB_ID is {first['slurm']} there and {mine['slurm']} here"
    if mine["script"] != first["script"]:
        return f"it runs {first['script']}, and here it is {mine['script']}"
    spawned = (mine["spawned"], first["spawned"])
    if mine["host"] == first["host"] and all(spawned) and spawned[0] != spawned[1]:
        return f"it was started as {first['command']}, and this as {mine['command']}"
    return None


def call_the_roll(
    store: Store, now: Mapping[str, str], endpoint: Endpoint, patience: AddressPatience
) -> str:
    """Return when all ranks are there and are one job; else RanksError, on all of them.

    What it returns is a name of this gathering, for keys that no other one has used.
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
        self, store: Store, now: Mapping[str, str], endpoint: Endpoint, patience: AddressPatience
    ) -> None:
        self._store = store
        self._now = now
        self._endpoint = endpoint
        self._patience = patience
        self._rank, self._size = rank_and_size(now)
        self._me = describe_caller(now)
        # The agent's store serves every life of its ranks.
        self.name = f"holdfast/{now.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_calls}"

    def call(self) -> None:
        if is_by_agent(self._now):
            self._check_run()
            # Which rank is which the agent has decided, and a former life's entry means nothing.
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
        # Not by check(), which torch 2.4 has not: what is expected comes back if nothing is there.
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
        pause = 0.001
        while (told := self._look(self._key(0))) is None:
            if not self._patience.wait(pause, what):
                raise RanksError(
                    f"a store of torch answers at {self._endpoint}, and within "
                    f"{self._patience.seconds:g} s no rank 0 of this job has come to it.\n"
                    "Another job may have that port: take another MASTER_PORT. Or rank 0 calls "
                    "torch.distributed.init_process_group: call holdfast's on all ranks."
                )
            pause = min(_POLL_SECONDS, 2 * pause)
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
        text = (
            f"{name_ranks(missing)} of {self._size} {'has' if is_one else 'have'} not come to "
            f"{self._endpoint} within {self._patience.seconds:g} s; {name_ranks(there)} "
            f"{'is' if there == [0] else 'are'} there{self._told_twice()}.\n{step}"
        )
        self._store.set(f"{self.name}/go", f"not: {text}")
        self._await_heard([rank for rank in there if rank != 0])
        raise RanksError(text)

    def _told_twice(self) -> str:
        rank = self._look(f"{self.name}/twice")
        return "" if rank is None else f", and two processes say that they are rank {rank}"

    def _await_heard(self, ranks: list[int]) -> None:
        deadline = time.monotonic() + _HEARD_SECONDS
        while time.monotonic() < deadline and ranks:
            ranks = [rank for rank in ranks if self._look(f"{self._key(rank)}/heard") is None]
            time.sleep(0.01)

    def _await_go(self) -> None:
        go, pause = f"{self.name}/go", 0.001
        # Rank 0 waits for all, and says for whom; only if it does not this rank gives up itself.
        patience = AddressPatience(self._patience.seconds + _HEARD_SECONDS, lambda _: None)
        while (word := self._look(go)) is None:
            if not patience.wait(pause, ""):
                raise RanksError(
                    f"rank 0 has not said go within {patience.seconds:g} s, though its store at "
                    f"{self._endpoint} answers.\n"
                    "See what rank 0 says, and call holdfast's init_process_group on all ranks."
                )
            pause = min(_POLL_SECONDS, 2 * pause)
        if word != "go":
            self._store.set(f"{self._key(self._rank)}/heard", "yes")
            raise RanksError(word.removeprefix("not: "))


def _words(caller: Mapping[str, Any]) -> str:
    return f"{caller['process']} ({caller['command']})"
