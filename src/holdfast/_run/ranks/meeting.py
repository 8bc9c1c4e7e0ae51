"""Where the ranks of a job exchange a few words before they train, and never again.

Through the store of torch's process group where there is one, else through files in the
run folder, which all ranks can see anyway. Each waits a bounded time, and says for whom.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from holdfast._environment import variables
from holdfast._errors import RanksError
from holdfast._run.ranks.world import World, cluster_by_config, find_launcher
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.plain_file import read_plain
from holdfast._text import say

_POLL_SECONDS = 0.005
_BEAT_SECONDS = 0.2
_TELL_SECONDS = 10.0
_openings: dict[str, int] = {}  # of each folder in this process: all ranks open in the same order


class Board(Protocol):
    """A place to put words under a name, and to see those of others."""

    def put(self, key: str, value: bytes) -> None: ...

    def has(self, keys: list[str]) -> bool: ...

    def get(self, keys: list[str]) -> list[bytes]: ...


class Meeting:
    """The ranks that open one run together."""

    def __init__(
        self, world: World, board: Board, prefix: str, patience_seconds: float, folder: Path
    ) -> None:
        self._world = world
        self._board = board
        self._prefix = prefix
        self._patience = patience_seconds
        self._folder = folder
        self._count = 0
        self._over: Callable[[], None] = lambda: None

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """Tell all ranks a value, and get what each of them has told."""
        self._count += 1
        keys = [f"{self._prefix}/{self._count}-{topic}/{r}" for r in range(self._world.size)]
        self._board.put(keys[self._world.rank], json.dumps(value).encode())
        self._await(keys, topic)
        return [json.loads(found) for found in self._board.get(keys)]

    def fail(self, error: BaseException) -> None:
        """Let the others know that this rank does not come any more, and why."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        with contextlib.suppress(Exception):
            told = {"rank": self._world.rank, "why": text}
            self._board.put(f"{self._prefix}/failed", json.dumps(told).encode())

    def look(self) -> None:
        """Whether all still come; RanksError if one of them has failed."""
        if self._board.has([f"{self._prefix}/failed"]):
            told = json.loads(self._board.get([f"{self._prefix}/failed"])[0])
            raise RanksError(
                f"{self._folder}: rank {told['rank']} could not open this run: {told['why']}\n"
                "See what that rank says; the others leave with it."
            )

    def close(self) -> None:
        self._over()

    def _await(self, keys: list[str], topic: str) -> None:
        deadline = time.monotonic() + self._patience
        pause = _POLL_SECONDS / 5
        while not self._board.has(keys):
            self.look()
            if time.monotonic() > deadline:
                missing = [r for r, key in enumerate(keys) if not self._board.has([key])]
                raise RanksError(
                    f"{self._folder}: of {self._world.size} ranks, {_names(missing)} did not open "
                    f"this run within {self._patience:.0f} s (at: {topic}).\n"
                    "Every rank must open it, with the same folder, at the same place in the "
                    "script."
                )
            time.sleep(pause)
            pause = min(_POLL_SECONDS, 2 * pause)


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def meet(world: World, layout: RunLayout, patience_seconds: float) -> Meeting:
    """Come together with the other ranks that open this run now."""
    board = _store_board()
    name = hashlib.blake2b(str(layout.folder).encode(), digest_size=8).hexdigest()
    if board is not None:
        # By the number of openings and not by the folder: ranks with another one are to be told.
        count = _openings["store"] = _openings.get("store", 0) + 1
        # The agent of torchrun keeps its store for the lives that it starts again.
        prefix = f"holdfast/{variables.whole_number('TORCHELASTIC_RESTART_COUNT')}/{count}"
        return Meeting(world, board, prefix, patience_seconds, layout.folder)
    cluster = cluster_by_config(variables.text("TF_CONFIG"))
    job = hashlib.blake2b(
        json.dumps([name, world.size, *variables.job_words(), cluster]).encode(), digest_size=8
    ).hexdigest()
    files = _FileBoard(layout.meeting(job))
    meeting = Meeting(world, files, "", patience_seconds, layout.folder)
    files.gather(world, patience_seconds, meeting)
    meeting._over = files.close
    return meeting


def _store_board() -> Board | None:
    if "torch.distributed" not in sys.modules:
        return None
    from holdfast.torch import group

    return group.group_store()


class _FileBoard:
    """Words as files. Those of an earlier job look the same, so who is here proves it by moving."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = folder
        self._world = World()
        self._quit = threading.Event()

    def gather(self, world: World, patience_seconds: float, meeting: Meeting) -> None:
        """Find the ranks that are here now, and go to a place that only they know."""
        self._world = world
        self._folder.mkdir(parents=True, exist_ok=True)
        mine = self._hello(world.rank)
        nonce = os.urandom(8).hex()
        threading.Thread(target=self._beat, args=(mine, nonce), daemon=True).start()
        first: dict[int, Any] = {}
        living: dict[int, str] = {}
        began, has_told = time.monotonic(), False
        while len(living) < world.size:
            for rank in range(world.size):
                found = read_json(self._hello(rank))
                if rank in living or not found:
                    continue
                if rank in first and found != first[rank] and found["is"] == first[rank]["is"]:
                    living[rank] = found["is"]
                first[rank] = found
            missing = [rank for rank in range(world.size) if rank not in living]
            waited = time.monotonic() - began
            if missing and waited > _TELL_SECONDS and not has_told:
                has_told = True
                say(f"{meeting._folder}: waiting for {_names(missing)} of {world.size} to open it.")
            if missing and waited > patience_seconds:
                self.close()
                raise RanksError(
                    f"{meeting._folder}: of {world.size} ranks, {_names(missing)} did not open "
                    f"this run within {patience_seconds:.0f} s.\n"
                    "Every rank must open it, with the same folder. A process that is no rank must "
                    "have no WORLD_SIZE in its environment; a task of srun that trains by itself, "
                    "RANK=0 WORLD_SIZE=1."
                )
            time.sleep(_BEAT_SECONDS / 4)
        joined = json.dumps(sorted(living.items())).encode()
        self._place = self._folder / hashlib.blake2b(joined, digest_size=8).hexdigest()
        self._place.mkdir(exist_ok=True)
        if world.rank == 0:
            for older in self._folder.iterdir():  # of a life that did not end by itself
                if older.is_dir() and older != self._place:
                    shutil.rmtree(older, ignore_errors=True)

    def _hello(self, rank: int) -> Path:
        return self._folder / f"hello-{rank:05d}.json"

    def _beat(self, path: Path, nonce: str) -> None:
        count = 0
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
        self._quit.set()  # all have come to this place: nobody looks for us any more
        return [read_plain(self._path(key)) for key in keys]

    def _path(self, key: str) -> Path:
        return self._place / key.strip("/").replace("/", "-")

    def close(self) -> None:
        """Leave; whoever is last takes the folder with him."""
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


_LOOK_SECONDS = 0.5
_ERROR_SECONDS = 3.0  # for the error of the call itself, which says more


class LauncherWatch:
    """Ends this process if the one that started it dies before the run is open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_over = threading.Event()
        self._launcher = find_launcher()
        self._parent = os.getppid()
        if self._launcher is not None:
            threading.Thread(target=self._watch, name="holdfast-launcher", daemon=True).start()

    def end(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        assert self._launcher is not None
        while os.getppid() == self._parent:
            if self._is_over.wait(_LOOK_SECONDS):
                return
        if self._is_over.wait(_ERROR_SECONDS):
            return
        say(
            f"{self._folder}: {self._launcher.name} (pid {self._parent}) is gone, and the ranks "
            "had not opened the run yet. This rank leaves with status 1.\n"
            "Nothing was trained. Start the job again."
        )
        os._exit(1)
