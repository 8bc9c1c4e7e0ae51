"""All checks in their order: each fact is measured, none is guessed.

What may block is asked by a process of its own (`question`), all of them at the same time; the
judges only read the answers. Nothing is changed or left behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from holdfast._environment import variables
from holdfast._environment.processes.cgroup import MemoryCgroup
from holdfast._environment.processes.memory_sample import shm_room
from holdfast._errors import SettingsError
from holdfast._report.status.gather import describe_waiting, find_waiting
from holdfast._tools.doctor import machine, storage
from holdfast._tools.doctor.check import FACTS, Check, Question
from holdfast._tools.doctor.environment import judge_environment, nodes_of
from holdfast._tools.doctor.run import RunNeeds, read_run, slurm_grace

_ANSWER_SECONDS = 2.5
_TERM_GRACE = storage.Grace(10.0, "what SIGTERM leaves")
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")


@dataclass(frozen=True)
class DoctorRequest:
    folder: Path
    command: tuple[str, ...] = ()
    is_quick: bool = False
    size_bytes: int | None = None  # of the state, while no checkpoint says it
    grace_seconds: float | None = None


class Examination:
    def __init__(self, request: DoctorRequest) -> None:
        self._request = request
        self._environment = variables.whole()
        ask = partial(Question, FACTS, seconds=_ANSWER_SECONDS)
        self._folder = ask("place", str(request.folder))
        has_driver = any(Path(each).exists() for each in _DRIVERS)
        self._driver = ask("gpus") if has_driver else None
        self._write: Question | None = None
        self.known = RunNeeds()

    def run(self) -> list[Check]:
        """SettingsError if the folder can hold no run."""
        try:
            return [check for check in self._checks() if check is not None]
        finally:
            for each in (self._folder, self._driver, self._write):
                if each is not None:
                    each.drop()

    def _checks(self) -> Iterator[Check | None]:
        request, name = self._request, str(self._request.folder)
        folder = self._folder.answer()
        facts = folder or {}
        if facts.get("kind") == "file":
            raise SettingsError(
                f"{name}: is a file, or below one, and a run folder is wanted.\n"
                "Name the folder that holdfast.Run is given: holdfast doctor runs/a"
            )
        if facts.get("kind") == "folder":
            self.known = read_run(request.folder)
        known, base, free = self.known, str(facts.get("base") or ""), facts.get("free")
        on_disk = request.size_bytes or known.state_bytes
        if facts.get("is_writable") and not request.is_quick:
            most = storage.bytes_to_write(on_disk, free)
            if most:
                # It takes longest, so it runs during the other checks.
                words = ("speed", base, str(most), str(storage.WRITE_SECONDS))
                self._write = Question(FACTS, *words, seconds=storage.WRITE_SECONDS + 1.5)
        # If the file system does not answer, only the words of the path are known.
        mount = storage.find_mount(base or str(request.folder.absolute()))
        yield self._folder.slow("run folder") or storage.judge_folder(name, folder, mount)
        if folder is not None:
            yield storage.judge_file_system(name, mount)
        yield from self._memory()
        if folder is not None:
            yield storage.judge_room(
                free, facts.get("free_inodes"), on_disk, known.kept, known.held_bytes
            )
        limits = machine.read_limits()
        if limits is not None:
            yield from machine.judge_limits(limits, request.size_bytes or known.host_bytes)
        yield self._cores()
        yield from judge_environment(self._environment, nodes_of(self._environment))
        if self._driver is not None:
            gpus = self._driver.answer()
            late = self._driver.slow("gpu")
            yield from machine.judge_gpus(gpus) if late is None else [late]
        if not request.is_quick:
            yield machine.try_stacks()
        if self._write is not None:
            measured = self._write.answer()
            taken = storage.judge_speed(measured, on_disk, self._grace(), known.save_seconds)
            yield self._write.slow("write speed") or taken

    def _memory(self) -> Iterator[Check | None]:
        if sys.platform != "linux":
            return
        from holdfast._store.memory.arena import used_bytes
        from holdfast._store.memory.backing import available_bytes, find_leftovers, reserve_bytes

        room = shm_room()
        # What the run holds there is used again by its next attempt.
        held = 0
        for path in find_leftovers(self.known.run_id) if self.known.run_id else ():
            try:
                held += used_bytes(path)
            except OSError:
                continue
        available = available_bytes()
        cgroup = MemoryCgroup.find(os.getpid())
        memory = machine.HostMemory(
            state=self._request.size_bytes or self.known.host_bytes,
            shm_free=None if room is None else room["free"] + held,
            shm_total=None if room is None else room["total"],
            available=available + held,
            limit=None if cgroup is None else cgroup.limit(),
            reserve=reserve_bytes(available),
        )
        yield machine.judge_shm(memory)
        yield machine.judge_memory(memory)
        if self.known.run_id and (waiting := find_waiting(self.known.run_id)) is not None:
            found = describe_waiting(waiting)
            yield Check("waiting memory", "ok", found, data=asdict(waiting))

    def _cores(self) -> Check:
        command = self._request.command
        is_torchrun = any(
            Path(word).name == "torchrun" or word == "torch.distributed.run" for word in command
        )
        ranks = machine.ranks_here(command, self._environment)
        cores = machine.read_cores(ranks, launcher_sets_one=is_torchrun)
        return machine.judge_cores(cores, self._environment)

    def _grace(self) -> storage.Grace:
        if self._request.grace_seconds is not None:
            return storage.Grace(self._request.grace_seconds, "given")
        known = slurm_grace(self._environment)
        if not known:
            return _TERM_GRACE
        (seconds, by), (least, least_by) = max(known), min(known)
        shorter = storage.Grace(least, least_by) if least < seconds else None
        return storage.Grace(seconds, by, shorter)


def examine_command(command: Sequence[str]) -> Iterator[Check]:
    """With the real command: the way of the signals through the launchers, and the ranks."""
    from holdfast._tools.doctor.ranks import check_ranks
    from holdfast._tools.doctor.signals.path import check_signal_path

    if not command:
        return
    found = check_signal_path(list(command))
    yield from found
    # If the training was not reached, a second start would not reach it either.
    if any(each.name.startswith("signal SIG") for each in found):
        yield from check_ranks(list(command))
