"""The map of a run folder: every path is spelled here, and nowhere else.

runs/demo/
  run.json                         the run's random id
  run.key                          the secret by which its keepers authenticate each other
  journal.jsonl                    what happened, one line each
  labels.json                      tags, a note and whether it is archived: set on the page
  mirror.json  mirror.lock         what is known of its mirror, and the lock of the uploader
  attempts/0002/                   one attempt: one training process
    lease.json  heartbeat.json     which process has the folder, and that it lives
    origin.json                    the (attempt, step) it came from
    start.json                     how it was started: command, environment, versions, config
    series.jsonl                   steps, metrics, memory: a row about every second
    exit.json                      how it ended
    requeue.json                   what SLURM was asked then, and how many attempts made no step
    stacks.txt  keeper.log  trouble.txt  mirror.log
    error.json  death.json         an exception, by the trainer; a death, by the keeper
    hang.json  hang.txt            a hang: what every process did then, and its stacks
    look.json                      the same, on request
    void.json                      the step from which on a rule has called everything bad
    led.json  output.log           what `holdfast run` observed, and all that it printed
    ranks/00001.json               of a job of several: each rank's process and keeper
    stacks-00001.txt  …            and its own files
    mail/                          messages of keepers that could not go by network
  checkpoints/step-000000001240-a0002/
    manifest.json  rank-00000.safetensors  …
    rank-00000.step-000000000900-a0002.safetensors     linked: what has not changed since then
  checkpoints/step-000000001240-a0002-turn/    the same step, at the end of its epoch
  loggers/tensorboard.json  .log   what was sent to loggers, and their output
  requests/stop-0002.json          a request of another process
  resume.log                       the output of the last `holdfast resume --detach`
  set-aside/                       damaged or unfinished checkpoints; void-…: called bad by a rule
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol

    class _PathOfAttempt(Protocol):
        def __call__(self, attempt: int, rank: int = 0) -> Path: ...


_CHECKPOINT = re.compile(r"step-(\d{12})-a(\d{4,})(-turn)?")
_ATTEMPT = re.compile(r"\d{4,}")
_TEMPORARY = re.compile(r"\..+\.\d+(?:-[0-9a-f]+)?\.(part|new)")
_WRITER = re.compile(
    r"\.(?:claim|probe)-(\d+)-[0-9a-f]+|\.partial-.+[.-](\d+)|\..+\.(\d+)(?:-[0-9a-f]+)?\.(?:part|new)"
)
_OWN_FOLDER = re.compile(r"\.|\d|step-|to-")
MANIFEST = "manifest.json"
_SET_ASIDE = re.compile(rf"(?:void-|partial-)*{_CHECKPOINT.pattern}(?:[.-]\d+)*")
_CONTENT = re.compile(
    rf"{re.escape(MANIFEST)}|lease\.json|rank-\d{{5}}(?:\..+)?\.safetensors|{_TEMPORARY.pattern}"
)


def foreign_in(path: Path) -> str:
    """Why an unfinished or damaged checkpoint must not be removed; empty if it may be."""
    if path.is_symlink():
        return "a symbolic link, which holdfast did not make"
    if path.parent.name == "set-aside" and not _SET_ASIDE.fullmatch(path.name):
        return "holdfast did not make it"
    with contextlib.suppress(OSError):
        for entry in sorted(path.iterdir()) if path.is_dir() else ():
            if not _CONTENT.fullmatch(entry.name) or entry.is_symlink() or entry.is_dir():
                return f"holds {entry.name}, which holdfast did not make"
    return ""


def _own_folders(folder: str) -> list[str]:
    """The paths in a folder whose names are of holdfast: 0002, step-…, .partial-…, to-00003."""
    try:
        return [f"{folder}/{name}" for name in _names_in(folder) if _OWN_FOLDER.match(name)]
    except OSError:  # who reads the folder gets this error
        return []


def _names_in(folder: Path | str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  faster than Path, for thousands of runs
    except (FileNotFoundError, NotADirectoryError):
        return []


def _beginning_with(folder: Path, *prefixes: str) -> list[Path]:
    return sorted(folder / name for name in _names_in(folder) if name.startswith(prefixes))


def writer_of(path: Path) -> int | None:
    """The process that made a file or folder without a final name."""
    match = _WRITER.fullmatch(path.name)
    return int(next(filter(None, match.groups()))) if match else None


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def linked_file(name: str, checkpoint: Path) -> str:
    """The name here of a file that another checkpoint wrote."""
    stem, dot, ending = name.rpartition(".")
    return f"{stem}.{checkpoint.name}{dot}{ending}"


def is_epoch_end(checkpoint: Path) -> bool:
    return checkpoint.name.endswith("-turn")


class _InRun:
    """A path directly in the run folder.

    Cached in the layout: it is used often, and there may be thousands of runs.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __set_name__(self, owner: type, attribute: str) -> None:
        self._attribute = attribute

    def __get__(self, layout: RunLayout, owner: type) -> Path:
        path = layout.folder / self._name
        vars(layout)[self._attribute] = path
        return path


class _InAttempt:
    """A file of an attempt: `layout.stacks(2, rank=1)` is attempts/0002/stacks-00001.txt."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stem, _, self._ending = name.rpartition(".")

    def __get__(self, layout: RunLayout, owner: type) -> _PathOfAttempt:
        def path(attempt: int, rank: int = 0) -> Path:
            name = f"{self._stem}-{rank:05d}.{self._ending}" if rank else self._name
            return layout.attempt(attempt) / name

        return path


@dataclass(frozen=True)
class RunLayout:
    folder: Path

    identity = _InRun("run.json")
    key = _InRun("run.key")
    journal = _InRun("journal.jsonl")
    labels = _InRun("labels.json")
    mirror = _InRun("mirror.json")
    mirror_lock = _InRun("mirror.lock")
    attempts = _InRun("attempts")
    checkpoints = _InRun("checkpoints")
    requests = _InRun("requests")
    loggers = _InRun("loggers")
    set_aside = _InRun("set-aside")
    resume_log = _InRun("resume.log")

    lease = _InAttempt("lease.json")
    heartbeat = _InAttempt("heartbeat.json")
    origin = _InAttempt("origin.json")
    start = _InAttempt("start.json")
    series = _InAttempt("series.jsonl")
    exit = _InAttempt("exit.json")
    requeue = _InAttempt("requeue.json")
    stacks = _InAttempt("stacks.txt")
    keeper_log = _InAttempt("keeper.log")
    mirror_log = _InAttempt("mirror.log")
    trouble = _InAttempt("trouble.txt")
    error = _InAttempt("error.json")
    death = _InAttempt("death.json")
    hang = _InAttempt("hang.json")
    hang_text = _InAttempt("hang.txt")
    void = _InAttempt("void.json")
    look = _InAttempt("look.json")
    led = _InAttempt("led.json")
    output = _InAttempt("output.log")

    def linked_folder(self) -> Path | None:
        """A folder of the run that is a symbolic link, which leads outside of it."""
        # Without Path, which is slow for thousands of runs.
        return next((Path(each) for each in self._folders() if os.path.islink(each)), None)  # noqa: PTH114

    def _folders(self) -> Iterator[str]:
        """Each folder that holdfast follows; the names that others have made are left alone."""
        folder = str(self.folder)
        for name in ("attempts", "checkpoints", "requests", "loggers", "set-aside"):
            yield f"{folder}/{name}"
        yield from _own_folders(f"{folder}/checkpoints")
        for each in _own_folders(f"{folder}/attempts"):
            yield from (each, f"{each}/ranks", f"{each}/mail")
            yield from _own_folders(f"{each}/mail")

    def logger(self, name: str, ending: str) -> Path:
        """A file of a logger: its state (json), its output (log), or its lock (lock)."""
        return self.loggers / f"{name}.{ending}"

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number:04d}"

    def voids(self, attempt: int) -> list[Path]:
        return sorted(self.attempt(attempt).glob("void*.json"))

    def ranks(self, attempt: int) -> Path:
        return self.attempt(attempt) / "ranks"

    def rank(self, attempt: int, rank: int) -> Path:
        return self.ranks(attempt) / f"{rank:05d}.json"

    def mail(self, attempt: int) -> Path:
        return self.attempt(attempt) / "mail"

    def meeting(self, job: str) -> Path:
        """Where ranks meet before they train, if they have no other way."""
        return self.attempts / f".meeting-{job}"

    def request(self, kind: str, attempt: int) -> Path:
        return self.requests / f"{kind}-{attempt:04d}.json"

    def checkpoint(self, step: int, attempt: int, at_epoch_end: bool = False) -> Path:
        turn = "-turn" if at_epoch_end else ""
        return self.checkpoints / f"step-{step:012d}-a{attempt:04d}{turn}"

    def partial(self, checkpoint: Path, pid: int) -> Path:
        """A checkpoint while process `pid` writes it."""
        return self.checkpoints / f".partial-{checkpoint.name}.{pid}"

    def fetching(self, checkpoint: Path) -> Path:
        """A checkpoint while it is fetched from a mirror."""
        return self.checkpoints / f".fetching-{checkpoint.name}"

    def stale_partials(self, checkpoint: Path, pid: int) -> list[tuple[Path, int]]:
        """This checkpoint as it was begun, and what other processes have begun in its attempt.

        Each with the pid of its writer; 0 if the name has none.
        """
        attempt = _CHECKPOINT.fullmatch(checkpoint.name)[2]  # type: ignore[index]  # ours
        found = []
        for path in self.partial_folders():
            name, _, writer = path.name.removeprefix(".partial-").rpartition(".")
            match = _CHECKPOINT.fullmatch(name)
            is_of_attempt = match is not None and match[2] == attempt and writer != str(pid)
            if name == checkpoint.name or is_of_attempt:
                found.append((path, int(writer) if writer.isdecimal() else 0))
        return found

    def attempt_numbers(self) -> list[int]:
        """The attempts so far, oldest first."""
        return sorted(int(name) for name in _names_in(self.attempts) if _ATTEMPT.fullmatch(name))

    def is_followed(self, attempt: int) -> bool:
        """True if a newer attempt has begun; False if that cannot be read."""
        with contextlib.suppress(OSError):
            return max(self.attempt_numbers(), default=0) > attempt
        return False

    def checkpoint_folders(self) -> list[tuple[int, int, Path]]:
        """(step, attempt, folder) of every committed checkpoint, oldest first."""
        found = []
        for name in _names_in(self.checkpoints):
            match = _CHECKPOINT.fullmatch(name)
            if match is not None:
                found.append((int(match[1]), int(match[2]), self.checkpoints / name))
        # Of one step, the end of its epoch comes later; so does its name.
        return sorted(found, key=lambda item: (item[1], item[0], item[2].name))

    def partial_folders(self) -> list[Path]:
        """Checkpoints that were never committed."""
        return _beginning_with(self.checkpoints, ".partial-")

    def fetching_folders(self) -> list[Path]:
        """Checkpoints that were not fetched completely."""
        return _beginning_with(self.checkpoints, ".fetching-")

    def half_removed_folders(self) -> list[Path]:
        """Checkpoints whose removal was interrupted."""
        return _beginning_with(self.checkpoints, ".removing-")

    def claims(self) -> list[Path]:
        """Attempts that were prepared and never begun."""
        return _beginning_with(self.attempts, ".claim-", ".probe-")

    def newest_write(self) -> int:
        """When unfinished checkpoints were last written to: it shows progress."""
        newest = 0
        for folder in self.partial_folders():
            with contextlib.suppress(OSError):
                newest = max([newest, *(e.stat().st_mtime_ns for e in folder.iterdir())])
        return newest

    def temporary_files(self) -> list[Path]:
        """Small files that never got their final name."""
        attempts = map(self.attempt, self.attempt_numbers())
        folders = [self.folder, self.requests, self.loggers, *attempts]
        found = (each / name for each in folders for name in _names_in(each))
        return sorted(path for path in found if _TEMPORARY.fullmatch(path.name))
