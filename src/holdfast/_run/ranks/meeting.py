"""The ranks that open a run together: are they one job, and which attempt of the run is this?

They exchange a few values before they train, and never again: through the store of torch's process
group where there is one, else through files in the run folder, which all ranks can see anyway.
Each wait is bounded, and its error names the missing ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._environment import variables
from holdfast._errors import FolderError, RanksError, Stopped
from holdfast._run.ranks.address import Endpoint, is_refused
from holdfast._run.ranks.world import (
    Launcher,
    World,
    cluster_by_config,
    code_print,
    compare_prints,
    compare_trees,
    find_launcher,
    host_key,
    is_by_agent,
    name_ranks,
)
from holdfast._state.capture import capture
from holdfast._store.folder.attempts import claim, read_json, write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.plain_file import open_plain, read_plain
from holdfast._store.format.tree import tensor_leaves
from holdfast._text import say

if TYPE_CHECKING:
    from holdfast.torch.group import GroupStore

_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.005
_BEAT_SECONDS = 0.2
_TELL_SECONDS = 10.0
_openings = 0  # by this process: all ranks open their runs in the same order


class RankGroup:
    """All ranks of the job, as one of them sees them while the run is opened."""

    is_one_host = False  # known once they have met

    def __init__(self, world: World, layout: RunLayout, folder: Path, watch: LauncherWatch) -> None:
        global _openings
        self.rank, self.size = world.rank, world.size
        self.launcher: Launcher | None = find_launcher()
        self._folder = folder
        self._count = 0
        self.watch = watch
        store = _find_store()
        if store is not None:
            # By the number of openings and not by the folder: a rank with another one is to fail.
            _openings += 1
            # The agent of torchrun keeps its store for all attempts that it starts.
            self._prefix = (
                f"holdfast/{variables.whole_number('TORCHELASTIC_RESTART_COUNT')}/{_openings}"
            )
            self._store: GroupStore | _FileStore = store
        else:
            self._prefix = ""
            self._store = _FileStore(world, layout, folder)

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """Send a value to all ranks, and return the values of all of them."""
        self._count += 1
        keys = [f"{self._prefix}/{self._count}-{topic}/{rank}" for rank in range(self.size)]
        self._store.put(keys[self.rank], json.dumps(value).encode())
        deadline, pause = time.monotonic() + _PATIENCE_SECONDS, _POLL_SECONDS / 5
        while not self._store.has(keys):
            self.look()
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.has([key])]
                raise RanksError(
                    f"{self._folder}: of {self.size} ranks, {name_ranks(missing)} did not open "
                    f"this run within {_PATIENCE_SECONDS:.0f} s (at: {topic}).\n"
                    "Every rank must open it, with the same folder, at the same place in the "
                    "script."
                )
            time.sleep(pause)
            pause = min(_POLL_SECONDS, 2 * pause)
        return [json.loads(found) for found in self._store.get(keys)]

    def look(self) -> None:
        """RanksError if another rank has failed to open the run."""
        key = [f"{self._prefix}/failed"]
        if self._store.has(key):
            told = json.loads(self._store.get(key)[0])
            raise RanksError(
                f"{self._folder}: rank {told['rank']} could not open this run: {told['why']}\n"
                "See the output of that rank; the others leave with it."
            )

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one does not come, and why."""
        self.watch.is_over.set()
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        with contextlib.suppress(Exception):  # the error itself must come through
            told = {"rank": self.rank, "why": text}
            self._store.put(f"{self._prefix}/failed", json.dumps(told).encode())

    def close(self) -> None:
        if isinstance(self._store, _FileStore):
            self._store.close()

    def meet(self, run_id: str, state: Mapping[str, Any]) -> None:
        """Make sure that all ranks open the same run in the same way."""
        mine = {"folder": str(self._folder), "run_id": run_id, "code": code_print()}
        told = self.exchange("hello", {**mine, "trees": _trees(state), "host": host_key()})
        for rank, each in enumerate(told):
            if each["run_id"] != told[0]["run_id"]:
                raise RanksError(
                    f"rank {rank} opens {each['folder']}, rank 0 opens {told[0]['folder']}: the "
                    "ranks of a job train one run together.\n"
                    "Give all of them the same folder, on a file system that all of them see."
                )
        wrong = compare_prints([each["code"] for each in told])
        wrong = wrong or compare_trees([each["trees"] for each in told])
        if wrong is not None:
            raise RanksError(wrong)
        self.is_one_host = len({each["host"] for each in told}) == 1

    def take_attempt(self, layout: RunLayout) -> int:
        """Rank 0 claims the number of this attempt, and all ranks get it."""
        mine: dict[str, Any] = {}
        if self.rank == 0:
            stopped = stopped_before(layout, self.launcher)
            mine = {"leave": stopped} if stopped else {"attempt": claim(layout, self._folder, say)}
        told = self.exchange("attempt", mine)[0]
        if "leave" in told:
            raise leave_again(self._folder, told["leave"])
        return int(told["attempt"])


def come_together(
    world: World, layout: RunLayout, run_id: str, state: Mapping[str, Any], folder: Path
) -> RankGroup:
    watch = LauncherWatch(folder)
    try:
        group = RankGroup(world, layout, folder, watch)
        group.meet(run_id, state)
    except BaseException:
        watch.is_over.set()
        raise
    return group


def _trees(state: Mapping[str, Any]) -> dict[str, str]:
    """For each name of the state a hash of its form: names and types, not values."""
    prints = {}
    for name, value in state.items():
        captured = capture({name: value}, replicas=True)
        leaves = sorted(path for path, _ in tensor_leaves(captured.tree["state"][name], name))
        kinds = sorted(f"{spec.kind} {spec.dtype}" for spec in captured.specs)
        text = json.dumps([type(value).__qualname__, leaves, kinds if len(kinds) == 1 else []])
        prints[name] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return prints


def stopped_before(layout: RunLayout, launcher: Launcher | None) -> dict[str, Any] | None:
    """The record of the stop that ended the last attempt, if the same launcher starts this one.

    torchrun starts ranks again that leave with any status but 0, also after a stop.
    """
    if launcher is None or launcher.name != "torchrun":
        return None
    numbers = layout.attempt_numbers()
    record = read_json(layout.exit(numbers[-1])) if numbers else {}
    return record if record.get("asked") and record.get("launcher") == launcher.process else None


def leave_again(folder: Path, record: Mapping[str, Any]) -> Stopped:
    """The exception of an attempt that a launcher has started after a stop."""
    status, how = int(record["status"]), str(record["how"])
    say(
        f"{folder}: was asked to stop ({how}), and torchrun has started it again: leaving with "
        f"status {status}. Start torchrun again to go on."
    )
    return Stopped(status, how, int(record.get("step") or 0))


def make_key(layout: RunLayout) -> None:
    """The secret by which the keepers of a run know each other, private to the user."""
    if not layout.key.exists():
        with contextlib.suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = open_plain(layout.key, flags, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(os.urandom(32).hex())
    status = layout.key.lstat()
    is_file = stat.S_ISREG(status.st_mode)
    if not is_file or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise FolderError(
            f"{layout.key}: this key must be a file that only you may read.\n"
            "Remove it; the next start makes another."
        )


def _find_store() -> GroupStore | None:
    if "torch.distributed" not in sys.modules:
        return None
    from holdfast.torch import group

    return group.GroupStore() if group.rank_and_size() is not None else None


class _FileStore:
    """Values as files. Those of an earlier job look the same, so a live rank changes its own."""

    def __init__(self, world: World, layout: RunLayout, folder: Path) -> None:
        """Find the ranks that are here now, and go to a folder that only they know."""
        name = hashlib.blake2b(str(layout.folder).encode(), digest_size=8).hexdigest()
        cluster = cluster_by_config(variables.text("TF_CONFIG"))
        words = json.dumps([name, world.size, *variables.job_words(), cluster]).encode()
        self._folder = layout.meeting(hashlib.blake2b(words, digest_size=8).hexdigest())
        self._place = self._folder
        self._world = world
        self._quit = threading.Event()
        self._folder.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._beat, daemon=True).start()
        joined = json.dumps(sorted(self._find_ranks(folder).items())).encode()
        self._place = self._folder / hashlib.blake2b(joined, digest_size=8).hexdigest()
        self._place.mkdir(exist_ok=True)
        if world.rank == 0:
            for older in self._folder.iterdir():  # of an attempt that was killed
                if older.is_dir() and older != self._place:
                    shutil.rmtree(older, ignore_errors=True)

    def _find_ranks(self, folder: Path) -> dict[int, str]:
        first: dict[int, Any] = {}
        living: dict[int, str] = {}
        size, began, has_told = self._world.size, time.monotonic(), False
        while missing := [rank for rank in range(size) if rank not in living]:
            waited = time.monotonic() - began
            if waited > _TELL_SECONDS and not has_told:
                has_told = True
                say(f"{folder}: waiting for {name_ranks(missing)} of {size} to open it.")
            if waited > _PATIENCE_SECONDS:
                self.close()
                raise RanksError(
                    f"{folder}: of {size} ranks, {name_ranks(missing)} did not open "
                    f"this run within {_PATIENCE_SECONDS:.0f} s.\n"
                    "Every rank must open it, with the same folder. A process that is no rank must "
                    "have no WORLD_SIZE in its environment; a task of srun that trains by itself, "
                    "RANK=0 WORLD_SIZE=1."
                )
            for rank in missing:
                found = read_json(self._hello(rank))
                if not found:
                    continue
                if rank in first and found != first[rank] and found["is"] == first[rank]["is"]:
                    living[rank] = found["is"]
                first[rank] = found
            time.sleep(_BEAT_SECONDS / 4)
        return living

    def _hello(self, rank: int) -> Path:
        return self._folder / f"hello-{rank:05d}.json"

    def _beat(self) -> None:
        path, nonce, count = self._hello(self._world.rank), os.urandom(8).hex(), 0
        while True:
            count += 1
            with contextlib.suppress(OSError):
                write_json(path, {"is": nonce, "beat": count}, durable=False)
            if self._quit.wait(_BEAT_SECONDS):
                return

    def put(self, key: str, value: bytes) -> None:
        write_json(self._path(key), json.loads(value), durable=False)

    def has(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def get(self, keys: list[str]) -> list[bytes]:
        self._quit.set()  # all ranks are in this folder: none looks for us any more
        return [read_plain(self._path(key)) for key in keys]

    def _path(self, key: str) -> Path:
        return self._place / key.strip("/").replace("/", "-")

    def close(self) -> None:
        """Leave; the last rank removes the folder."""
        self._quit.set()
        if self._place == self._folder:
            return  # the others were not found
        with contextlib.suppress(OSError):
            self._path(f"left/{self._world.rank}").touch()
            if self.has([f"left/{rank}" for rank in range(self._world.size)]):
                shutil.rmtree(self._folder, ignore_errors=True)


# -- Ranks that are opening a run notice by themselves that their launcher has died ----------------
# A store of torch whose server is gone may hold a rank for the better part of an hour, in a call
# that no signal ends. There is no keeper yet. Once the run is open, the keepers watch the launcher.
# A launcher that died while the ranks imported torch is not their parent any more: its store tells.


_LOOK_SECONDS = 0.5
_LOOKS_PER_PROBE = 20  # each connection costs the store some work
_ERROR_SECONDS = 3.0  # for the error of the call itself, which says more


class LauncherWatch:
    """Ends this process if the one that started it dies before the run is open."""

    def __init__(self, folder: Path) -> None:
        """RanksError if it is dead already."""
        self._folder = folder
        # Set: the run is open, or will not be: from now on the keepers watch the launcher.
        self.is_over = threading.Event()
        self._launcher = find_launcher()
        self._parent = os.getppid()
        self._store = _find_agent_store()
        if self._launcher is None:
            return
        if self._is_store_gone():
            raise RanksError(self._say_gone(self._launcher))
        threading.Thread(
            target=self._watch, args=(self._launcher,), name="holdfast-launcher", daemon=True
        ).start()

    def _watch(self, launcher: Launcher) -> None:
        for look in itertools.count(1):
            if self.is_over.wait(_LOOK_SECONDS):
                return
            if os.getppid() != self._parent:
                break
            if look % _LOOKS_PER_PROBE == 0 and self._is_store_gone():
                break
        if self.is_over.wait(_ERROR_SECONDS):
            return
        say(self._say_gone(launcher))
        os._exit(1)

    def _is_store_gone(self) -> bool:
        return self._store is not None and is_refused(self._store)

    def _say_gone(self, launcher: Launcher) -> str:
        known_by = f"pid {self._parent}"
        if os.getppid() == self._parent:
            known_by = f"its store at {self._store}"
        return (
            f"{self._folder}: {launcher.name} ({known_by}) is gone, and the ranks had not opened "
            "the run yet. This rank leaves with status 1.\n"
            "Nothing was trained. Start the job again."
        )


def _find_agent_store() -> Endpoint | None:
    """The store that torchrun itself hosts, on this host or another one."""
    given = variables.of_ranks() | variables.of_ranks_at_start()  # a script may change them
    port = given.get("MASTER_PORT", "")
    if not is_by_agent(given) or not port.isdecimal():
        return None
    return Endpoint(given.get("MASTER_ADDR", ""), int(port))
