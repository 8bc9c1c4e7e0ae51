"""What the machine gives a run, before it is needed: each thing measured, none guessed.

Whatever may hang is asked by a program of its own (`doctor_question`), all of them at the same
time; the judges (`doctor_…`) only look at what came back. Nothing is changed or left behind.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast
from holdfast._environment import variables
from holdfast._environment.processes.cgroup import MemoryCgroup
from holdfast._environment.processes.memory_sample import shm_room
from holdfast._errors import SettingsError
from holdfast._tools.doctor.cores import (
    is_clock_kept,
    judge_clock,
    judge_cores,
    ranks_here,
    read_cores,
)
from holdfast._tools.doctor.disk import (
    WRITE_SECONDS,
    Grace,
    bytes_to_write,
    judge_room,
    judge_speed,
)
from holdfast._tools.doctor.environment import Around, interfaces, judge_environment, nodes_of
from holdfast._tools.doctor.finding import Check
from holdfast._tools.doctor.limits import judge_limits, read_limits
from holdfast._tools.doctor.memory import Memory, judge_memory, judge_shm
from holdfast._tools.doctor.places import (
    find_mount,
    judge_file_system,
    judge_folder,
    judge_home,
    judge_temporary,
)
from holdfast._tools.doctor.question import GPUS, PACKAGES, PLACE, SPEED, Question
from holdfast._tools.doctor.run import Known, read_run, slurm_grace
from holdfast._tools.doctor.software import judge_gpus, judge_packages, judge_torch, python_of
from holdfast._tools.doctor.stacks import try_stacks

_ANSWER_SECONDS = 2.5
_TERM_GRACE = Grace(10.0, "what SIGTERM leaves")
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")


@dataclass(frozen=True)
class Wish:
    """What a person asks to be looked at."""

    folder: Path
    command: tuple[str, ...] = ()
    is_quick: bool = False
    size_bytes: int | None = None  # of the state, where no checkpoint tells it
    grace_seconds: float | None = None


@dataclass(frozen=True)
class Examined:
    """All that was found, in the order in which it was looked at."""

    checks: list[Check]
    known: Known
    gpu: dict[str, Any] | None  # what the driver says; empty: there is none
    seconds: float


def examine(wish: Wish) -> Examined:
    """Look at the machine; SettingsError if the folder is something that no run can be in."""
    began = time.monotonic()
    rounds = _Rounds(wish)
    try:
        checks = list(rounds.walk())
    finally:
        rounds.drop()
    return Examined(checks, rounds.known, rounds.gpu, time.monotonic() - began)


class _Rounds:
    """One visit: the questions first, then what each has brought."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._environment = variables.whole()
        self._temporary = variables.temporary_folder()
        home = self._environment.get("HOME") or str(Path.home())
        self._folder = Question(PLACE, str(wish.folder), "write")
        self._home = Question(PLACE, home)
        self._tmp = Question(PLACE, self._temporary, "write")
        has_driver = any(Path(each).exists() for each in _DRIVERS)
        self._driver = Question(GPUS) if has_driver else None
        self._python = python_of(wish.command)
        # With the interpreter's own words, not ours: what it sees is what will be imported.
        python = self._python or sys.executable
        self._packages = Question(PACKAGES, python=[python])
        self._write: Question | None = None
        self._deadline = time.monotonic() + _ANSWER_SECONDS
        self.known = Known()
        self.gpu: dict[str, Any] | None = {}

    def drop(self) -> None:
        asked = (self._folder, self._home, self._tmp, self._driver, self._packages, self._write)
        for each in asked:
            if each is not None:
                each.drop()

    def walk(self) -> Iterator[Check]:
        wish, name = self._wish, str(self._wish.folder)
        folder = self._folder.answer(self._deadline)
        if folder is not None and folder.get("kind") == "file":
            raise SettingsError(
                f"{name}: is a file, or below one, and a run folder is wanted.\n"
                "Name the folder that holdfast.Run is given: holdfast doctor runs/a"
            )
        base = str(folder.get("base")) if folder is not None else ""
        free = folder.get("free") if folder is not None else None
        can_write = folder is not None and bool(folder.get("is_writable"))
        if folder is not None and folder.get("kind") == "folder":
            self.known = read_run(wish.folder)
        on_disk = wish.size_bytes or self.known.state_bytes
        if can_write and not wish.is_quick and (most := bytes_to_write(on_disk, free)):
            # Longest, so it runs while the others are looked at.
            self._write = Question(SPEED, base, str(most), str(WRITE_SECONDS))
            write_deadline = time.monotonic() + WRITE_SECONDS + 1.5
        else:
            write_deadline = 0.0
        # Of one that does not answer only the words of its path are known.
        mount = find_mount(base or str(wish.folder.absolute()))
        yield judge_folder(name, folder, mount)
        if folder is not None:
            yield from _given(judge_file_system(name, mount))
        yield from self._memory()
        if folder is not None:
            known = self.known
            inodes = folder.get("free_inodes")
            yield from _given(judge_room(free, inodes, on_disk, known.kept, known.held_bytes))
        limits = read_limits()
        if limits is not None:
            yield from judge_limits(limits, wish.size_bytes or self.known.host_bytes)
        yield from self._cores()
        skew = folder.get("skew_seconds") if folder is not None else None
        yield judge_clock(is_clock_kept(), skew, mount is not None and mount.is_remote)
        yield from self._software()
        yield from self._other_places()
        if not wish.is_quick:
            yield from _given(try_stacks())
        if self._write is not None:
            measured = self._write.answer(write_deadline)
            yield judge_speed(measured, on_disk, self._grace(), self.known.save_seconds)

    def _memory(self) -> Iterator[Check]:
        if sys.platform != "linux":
            return
        from holdfast._store.memory.backing import available_bytes, find_leftovers, reserve_bytes

        room = shm_room()
        # What the run holds there itself is used again, by it or by its next life.
        held = 0
        for path in find_leftovers(self.known.run_id) if self.known.run_id else ():
            try:
                held += path.stat().st_size
            except OSError:
                continue
        available = available_bytes()
        cgroup = MemoryCgroup.find(os.getpid())
        memory = Memory(
            state=self._wish.size_bytes or self.known.host_bytes,
            shm_free=None if room is None else room["free"] + held,
            shm_total=None if room is None else room["total"],
            available=available + held,
            limit=None if cgroup is None else cgroup.limit(),
            reserve=reserve_bytes(available),
        )
        yield judge_shm(memory)
        yield from _given(judge_memory(memory))

    def _cores(self) -> Iterator[Check]:
        command = self._wish.command
        is_torchrun = any(Path(word).name == "torchrun" or word == "torch.distributed.run"
                          for word in command)  # fmt: skip
        ranks = ranks_here(command, self._environment)
        yield judge_cores(read_cores(ranks, launcher_sets_one=is_torchrun), self._environment)

    def _software(self) -> Iterator[Check]:
        if self._driver is not None:
            self.gpu = self._driver.answer(self._deadline)
        packages = self._packages.answer(self._deadline)
        gpus = len(self.gpu.get("gpus") or ()) if self.gpu else None
        around = Around(interfaces(), gpus, nodes_of(self._environment))
        yield from judge_environment(self._environment, around)
        if self._wish.command and self._python is None:
            # Which one trains is not in the command's words; its probe tells it later.
            yield from judge_gpus(self.gpu, None)
            return
        yield from judge_gpus(self.gpu, packages)
        yield from judge_packages(packages, holdfast.__version__, self._python)

    def _other_places(self) -> Iterator[Check]:
        home = self._home.answer(self._deadline)
        yield judge_home(home, find_mount(str(home["base"])) if home is not None else None)
        tmp = self._tmp.answer(self._deadline)
        mount = find_mount(str(tmp["base"])) if tmp is not None else None
        yield judge_temporary(tmp, mount, self._temporary)

    def _grace(self) -> Grace:
        if self._wish.grace_seconds is not None:
            return Grace(self._wish.grace_seconds, "given")
        known = slurm_grace(self._environment)
        if known:
            (seconds, by), (least, least_by) = max(known), min(known)
            return Grace(seconds, by, Grace(least, least_by) if least < seconds else None)
        return _TERM_GRACE


def examine_command(
    command: Sequence[str], gpu: Mapping[str, Any] | None = None
) -> Iterator[Check]:
    """The signals' way through the launchers, and the ranks: with the real command."""
    from holdfast._tools.doctor.reduce import check_ranks
    from holdfast._tools.doctor.signals.path import check_leader_path, check_signal_path

    if not command:
        yield from check_leader_path()
        return
    found = check_signal_path(list(command))
    yield from found
    tried = [each.data for each in found if each.name.startswith("signal SIG")]
    if not tried:
        return  # the training was not reached, and would not be once more
    if python_of(command) is None and (python := tried[0]["python"]):
        answer = Question(PACKAGES, python=[python]).answer(time.monotonic() + _ANSWER_SECONDS)
        if gpu and gpu.get("gpus"):
            yield from judge_torch(gpu, answer or {})
        yield from judge_packages(answer, holdfast.__version__, python)
    yield from check_ranks(list(command))


def _given(check: Check | None) -> Iterator[Check]:
    if check is not None:
        yield check
