"""The ranks that open a run together: are they one job, and which life of the run is this?"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast._errors import FolderError, RanksError, Stopped
from holdfast._run.ranks.environment import code_print, compare_prints, compare_trees
from holdfast._run.ranks.meeting import LauncherWatch, Meeting, meet
from holdfast._run.ranks.world import Launcher, World, find_launcher, host_key
from holdfast._state.capture import capture
from holdfast._store.folder.attempts import claim, read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.plain_file import open_plain
from holdfast._store.format.tree import tensor_leaves

_PATIENCE_SECONDS = 120.0


class Party:
    """All ranks of the job, as one of them sees them while the run is opened."""

    def __init__(
        self, world: World, meeting: Meeting, hosts: list[str], watch: LauncherWatch
    ) -> None:
        self.rank = world.rank
        self.size = world.size
        self.is_one_host = len(set(hosts)) == 1
        self.launcher: Launcher | None = find_launcher()
        self._meeting = meeting
        self._watch = watch

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """Tell all ranks a value, and get what each of them has told."""
        return self._meeting.exchange(topic, value)

    def opened(self) -> None:
        """All ranks have opened the run: from now on the keepers watch the launcher."""
        self._watch.end()

    def fail(self, error: BaseException) -> None:
        """Let the others know that this rank does not come."""
        self._watch.end()
        self._meeting.fail(error)

    def look(self) -> None:
        """RanksError if another rank has failed to open the run."""
        self._meeting.look()

    def close(self) -> None:
        self._meeting.close()

    def take_attempt(self, layout: RunLayout, folder: Path, say: Callable[[str], None]) -> int:
        """Rank 0 takes the number of this life, and all have it."""
        mine: dict[str, Any] = {}
        if self.rank == 0:
            stopped = stopped_before(layout, self.launcher)
            if stopped is not None:
                mine = {"leave": stopped}
            else:
                mine = {"attempt": claim(layout, folder, say)}
        told = self.exchange("attempt", mine)[0]
        if "leave" in told:
            raise leave_again(folder, told["leave"], say)
        return int(told["attempt"])


def come_together(
    world: World, layout: RunLayout, run_id: str, state: Mapping[str, Any], folder: Path
) -> Party:
    """Meet the other ranks, and make sure that all open the same run in the same way."""
    watch = LauncherWatch(folder)
    try:
        meeting, hosts = _meet_alike(world, layout, run_id, state, folder)
    except BaseException:
        watch.end()
        raise
    return Party(world, meeting, hosts, watch)


def _meet_alike(
    world: World, layout: RunLayout, run_id: str, state: Mapping[str, Any], folder: Path
) -> tuple[Meeting, list[str]]:
    meeting = meet(world, layout, _PATIENCE_SECONDS)
    mine = {
        "folder": str(folder),
        "run_id": run_id,
        "code": code_print(),
        "trees": _trees(state),
        "host": host_key(),
    }
    told = meeting.exchange("hello", mine)
    for rank, each in enumerate(told):
        if each["run_id"] != told[0]["run_id"]:
            raise RanksError(
                f"rank {rank} opens {each['folder']}, rank 0 opens {told[0]['folder']}: the ranks "
                "of a job train one run together.\n"
                "Give all of them the same folder, on a file system that all of them see."
            )
    wrong = compare_prints([each["code"] for each in told])
    wrong = wrong or compare_trees([each["trees"] for each in told])
    if wrong is not None:
        raise RanksError(wrong)
    return meeting, [each["host"] for each in told]


def _trees(state: Mapping[str, Any]) -> dict[str, str]:
    """For each name of the state a hash of what it consists of: names and types, not values."""
    prints = {}
    for name, value in state.items():
        captured = capture({name: value}, replicas=True)
        leaves = sorted(path for path, _ in tensor_leaves(captured.tree["state"][name], name))
        kinds = sorted(f"{spec.kind} {spec.dtype}" for spec in captured.specs)
        text = json.dumps([type(value).__qualname__, leaves, kinds if len(kinds) == 1 else []])
        prints[name] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return prints


def stopped_before(layout: RunLayout, launcher: Launcher | None) -> dict[str, Any] | None:
    """The stop that somebody asked for in the last life, if the same launcher starts this one.

    torchrun starts ranks again that leave with any status but 0: nobody has asked for that.
    """
    if launcher is None or launcher.name != "torchrun":
        return None
    numbers = layout.attempt_numbers()
    record = read_json(layout.exit(numbers[-1])) if numbers else {}
    if record.get("asked") and record.get("launcher") == launcher.process:
        return record
    return None


def leave_again(folder: Path, record: Mapping[str, Any], say: Callable[[str], None]) -> Stopped:
    """What a life leaves with that a launcher has started after a stop that was asked for."""
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
    status = layout.key.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise FolderError(
            f"{layout.key}: this key must belong to you, and no other user may read it.\n"
            "Remove it; the next start makes another."
        )
