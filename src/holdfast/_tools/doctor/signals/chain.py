"""The dry run: a command started for real, with the probe in the place of its training.

All but the training runs as it stands, so harm is prevented: the probe is in every Python below,
requests to requeue or submit a job are recorded and not passed on, and at the end every process is
stopped first and then killed, so that no script goes on with its next line. Nothing is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._environment.processes.libc import libc
from holdfast._environment.processes.proc import FairDeadline, read_bytes, stat_fields
from holdfast._environment.processes.threads import name_of
from holdfast._environment.processes.tree import descendants
from holdfast._environment.slurm.controller import scancel
from holdfast._environment.slurm.job import rank_environment
from holdfast._run.ranks.address import is_taken, port_owner
from holdfast._tools.doctor.check import State, slow
from holdfast._tools.doctor.signals import probe
from holdfast._tools.doctor.signals.target import Target
from holdfast._tools.lint.launch import is_python

# Killed, these clients would leave their processes on other nodes.
CLIENTS = ("srun", "salloc")
_POLL_SECONDS = 0.01
_MORE_RANKS_SECONDS = 0.3  # where the number of ranks is not known
_MOST_TIMES = 3.0  # on a busy machine a deadline is at most so many times as long
_END_SECONDS = 5.0
_TERMINAL_END_SECONDS = 2.0
_EXEC_SECONDS = 0.002
_SET_ADOPTS_ORPHANS, _GET_ADOPTS_ORPHANS = 36, 37  # PR_*_CHILD_SUBREAPER
_WORD = re.compile(r"\w")
_IN_USE = re.compile(  # torch's store
    r"\bport: (\d{1,5}),.*EADDRINUSE|:(\d{1,5}) \(errno: \d+ - Address already in use\)"
)
# Records what a script would ask of SLURM, and does not ask it.
_SHIM = """#!/bin/sh
case "{name} $1" in
    "scontrol requeue"*|sbatch*) echo "{name} $*" >> '{folder}/asked'; exit 0;;
esac
PATH=${{PATH#'{folder}/bin:'}}
exec {name} "$@"
"""
# What the first process does before it becomes the command. Not between fork and exec of the
# doctor, where another thread may hold any lock.
_FIRST = """
import ctypes, fcntl, os, signal, sys, termios
if sys.argv[1] == "terminal":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
# Python ignores two of them; a doctor in a shell's background inherits an ignored Ctrl-C.
for name in ("SIGPIPE", "SIGXFSZ", "SIGINT", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
# If the doctor is killed, a script must not go on with the line behind the training.
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"{sys.argv[2]}: cannot be started: {error.strerror}", flush=True)
    os._exit(127)
"""


def _taken_port(output: str) -> int | None:
    """The port of this host that a command wanted and another process has."""
    found = _IN_USE.search(output)
    port = int(found[1] or found[2]) if found is not None else 0
    return port if 0 < port < 1 << 16 and is_taken(port) else None


class ChainError(Exception):
    """Why the training was not reached: the fact, and what to do."""

    def __init__(self, found: str, remedy: str = "", state: State = "warn") -> None:
        super().__init__(found)
        self.found, self.remedy, self.state = found, remedy, state


@dataclass
class Probe:
    """One process in the place of a training, by the lines of its report."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def here(self) -> dict[str, Any]:
        return self.lines[0]

    @property
    def variables(self) -> dict[str, str]:
        """Of its rank; a task of srun gets RANK and WORLD_SIZE as a run would give them."""
        found = dict(self.here["variables"])
        return rank_environment(found) | found

    @property
    def key(self) -> tuple[str, int]:
        """Host and pid: unique over all hosts."""
        return str(self.here["host"]), int(self.here["pid"])

    @property
    def rank(self) -> int:
        return self._number("RANK") or 0

    @property
    def world(self) -> int | None:
        return self._number("WORLD_SIZE") or self._number("SIZE")

    @property
    def step(self) -> str:
        return _step_of(self.variables)

    def expected(self, around: Mapping[str, str]) -> int | None:
        """The number of ranks that this chain starts; `around` are the doctor's own variables.

        The doctor may be one of several, on each node or in each task, and sees only its own ranks.
        """
        own_step = _step_of(around)
        if self.step not in ("", own_step):
            return self.world
        here = self.variables.get("LOCAL_WORLD_SIZE", "")
        if "TORCHELASTIC_RUN_ID" in self.variables and here.isdigit():
            return int(here)
        return 1 if "WORLD_SIZE" in around or own_step else self.world

    def events(self, what: str) -> list[dict[str, Any]]:
        return [each for each in self.lines if each.get("what") == what]

    def _number(self, name: str) -> int | None:
        """By a launcher of torch, or of MPI."""
        known = map(self.variables.get, (name, f"OMPI_COMM_WORLD_{name}", f"PMI_{name}"))
        return next((int(text) for text in known if text and text.isdigit()), None)


def _step_of(words: Mapping[str, str]) -> str:
    job, step = words.get("SLURM_JOB_ID", ""), words.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if job.isdigit() and step.isdigit() else ""


def own_step() -> str:
    return _step_of(variables.of_ranks())


def started(pid: int) -> int | None:
    """When a process began, in clock ticks; None if it is gone."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else None


def send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


class _Terminal:
    """A terminal of the chain's own, in which Ctrl-C can be pressed."""

    def __init__(self, output: Path) -> None:
        self._master, self.given = os.openpty()
        self._reader = threading.Thread(target=self._copy, args=[output], daemon=True)

    def begin(self) -> None:
        """The chain has its end. Read its output, or it would block."""
        os.close(self.given)
        self._reader.start()

    def _copy(self, output: Path) -> None:
        with contextlib.suppress(OSError), output.open("ab", buffering=0) as file:
            while piece := os.read(self._master, 65536):
                file.write(piece)

    def press_ctrl_c(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._master, b"\x03")

    def end(self) -> None:
        """The reader ends when no process has the other end open."""
        if self._reader.ident is None:
            os.close(self.given)
        else:
            self._reader.join(_TERMINAL_END_SECONDS)
        os.close(self._master)


class Chain:
    """One start of the command; a context, at whose end all of it is gone."""

    def __init__(
        self,
        target: Target,
        kind: str,  # of the probe's work: "signals" or "ranks"
        *,
        seconds: float,
        has_terminal: bool = False,
        backend: str = "",  # of torch, if the training names one
    ) -> None:
        self.target = target
        self._errand = {"kind": kind, "seconds": seconds, "backend": backend}
        self._has_terminal = has_terminal
        self.terminal: _Terminal | None = None
        self.first = 0  # the pid of the command
        self._seen: dict[int, int] = {}  # each process that was ever below it, and its start
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Chain:
        # Tasks of srun may be on other nodes, which share the job's folder and not /tmp.
        is_shared = any(word.endswith("srun") for word in self.target.command) or any(
            "srun" in text for text in self.target.scripts.values()
        )
        place = str(self.target.folder) if is_shared else None
        prefix = ".holdfast-doctor-" if is_shared else "holdfast-doctor-"
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            self._undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._start()
        except BaseException as error:
            self.end()
            if isinstance(error, OSError):
                where = place or "the temporary folder"
                found = f"{where}: {error.strerror or error}: the probe cannot be put there"
                remedy = "make room there, go to another folder, or set TMPDIR"
                raise ChainError(found, remedy) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _start(self) -> None:
        """Put the probe, its errand and the shims into the folder, and start the command."""
        folder = self.folder
        (folder / "told").mkdir()
        (folder / "bin").mkdir()
        shutil.copy(probe.__file__, folder / "sitecustomize.py")
        for program in ("scontrol", "sbatch"):
            if shutil.which(program):
                shim = folder / "bin" / program
                shim.write_text(_SHIM.format(name=program, folder=folder))
                shim.chmod(0o755)
        doctor = [os.getpid(), started(os.getpid()) or 0]
        more = {"folder": str(folder), "targets": self.target.names, "doctor": doctor}
        (folder / "errand.json").write_text(json.dumps({**self._errand, **more}))
        environment = variables.whole()
        paths = [str(folder), *filter(None, [environment.get("PYTHONPATH")])]
        environment |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": f"{folder / 'bin'}{os.pathsep}{environment.get('PATH', os.defpath)}",
            "HOLDFAST_STATE": str(folder / "state"),
        }
        # Processes that lose their parent become ours.
        before = ctypes.c_int(0)
        libc().prctl(_GET_ADOPTS_ORPHANS, ctypes.byref(before), 0, 0, 0)
        libc().prctl(_SET_ADOPTS_ORPHANS, 1, 0, 0, 0)
        self._undo.callback(libc().prctl, _SET_ADOPTS_ORPHANS, before.value, 0, 0, 0)
        if threading.current_thread() is threading.main_thread():
            # End the chain before ourselves; Ctrl-C does so without a handler.
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._undo.callback(signal.signal, number, signal.signal(number, _leave))
        if self._has_terminal:
            self.terminal = _Terminal(folder / "output")
            self._undo.callback(self.terminal.end)
        with (folder / "output").open("wb") as output:
            terminal = None if self.terminal is None else self.terminal.given
            where = "nowhere" if terminal is None else "terminal"
            self._undo.callback(self._kill)
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _FIRST, where, *self.target.command],
                cwd=self.target.folder,
                env=environment,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=output if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.first = self.process.pid
        self._seen[self.first] = started(self.first) or 0
        if self.terminal is not None:
            self.terminal.begin()

    # What the chain reports.

    def _reports(self) -> list[Probe]:
        with contextlib.suppress(OSError):
            os.utime(self.folder / "told")  # makes a network file system read the folder again
        found = []
        for path in sorted(self.folder.glob("told/*.jsonl")):
            with contextlib.suppress(OSError, ValueError):
                whole = path.read_text().rpartition("\n")[0]  # the last line may be incomplete
                found.append(Probe([json.loads(line) for line in whole.splitlines()]))
        return [each for each in found if each.lines]

    def probes(self) -> list[Probe]:
        """Those in the place of a training, in the order of their ranks."""
        found = [each for each in self._reports() if each.here["what"] == "here"]
        return sorted(found, key=lambda each: (each.rank, each.here["time"]))

    def asked(self) -> list[str]:
        return self._read("asked").splitlines()

    def await_probes(self, seconds: float) -> list[Probe]:
        """Wait for all ranks, as far as their number is known."""
        deadline = self.deadline(seconds)
        seen, changed = 0, time.monotonic()
        around = variables.of_ranks()
        while True:
            found = self.probes()
            if len(found) != seen:
                seen, changed = len(found), time.monotonic()
            known = [each.expected(around) for each in found]
            wanted = max((each for each in known if each is not None), default=None)
            if wanted is not None and seen >= wanted:
                return found
            if seen and wanted is None and time.monotonic() - changed > _MORE_RANKS_SECONDS:
                return found
            self.guard()
            if self.process.poll() is not None and not seen:
                raise self._ended_before()
            if deadline.is_over():
                break
            time.sleep(_POLL_SECONDS)
        why = f"{seen} of {wanted} ranks began within {seconds:.0f} s"
        remedy = "see why the others do not: start the command by itself"
        if not seen:
            why = f"{self.target.label} was not reached within {seconds:.0f} s"
            why += self._last_output()
            remedy = "leave out what takes long before the training, for this test"
        late = slow("", why, deadline)
        raise ChainError(*((why, remedy) if late is None else (late.found, late.remedy)))

    def _ended_before(self) -> ChainError:
        here = [each.here for each in self._reports()]
        skipped = sorted({each["script"] for each in here if each["what"] == "skipped"})
        passed_over = f" (not run: {', '.join(skipped)})" if skipped else ""
        remedy = "start it by itself and see that it begins to train"
        if port := _taken_port(self._read("output")):
            passed_over += f"; port {port} is in use by {port_owner(port)}"
            remedy = f"torchrun --standalone finds a free port; or --master-port={port + 1}"
        return ChainError(
            f"the command ended with status {self.process.returncode} before "
            f"{self.target.label} was reached{self._last_output()}{passed_over}",
            remedy,
            "fail" if self.process.returncode else "warn",
        )

    def _last_output(self) -> str:
        for line in reversed(self._read("output").split("\n")):
            if _WORD.search(line):
                return f"; it said last: {line.strip()[:160]}"
        return ""

    def _read(self, name: str) -> str:
        return (read_bytes(str(self.folder / name)) or b"").decode(errors="replace")

    def guard(self) -> None:
        """End all if a training begins without the probe: its PYTHONPATH may have been lost."""
        for pid in self.family():
            words = (read_bytes(f"/proc/{pid}/cmdline") or b"").decode(errors="replace")
            command = words.split("\0")[:-1]
            if not command or not is_python(command[0].rpartition("/")[2]):
                continue
            if probe.role(command, self.target.names) != "train":
                continue
            environment = read_bytes(f"/proc/{pid}/environ")
            if environment == b"":  # it may be in the middle of an exec
                time.sleep(_EXEC_SECONDS)
                environment = read_bytes(f"/proc/{pid}/environ")
            if environment is None:
                continue
            training = probe.read_python(command)
            path = re.search(rb"(?:^|\0)PYTHONPATH=([^\0]*)", environment)
            if path is None or str(self.folder).encode() not in path[1]:
                how = "PYTHONPATH does not reach it: a process above it sets it"
                remedy = "write PYTHONPATH=…:$PYTHONPATH where it is set, and pass variables on"
            elif training.loses_path:
                how = f"python -{training.flags} ignores PYTHONPATH"
                remedy = "leave that option out for this test"
            else:
                continue
            self.end()
            found = f"{training.name} was about to train for real, and was ended: {how}"
            raise ChainError(found, remedy)

    # The processes, and their end.

    def deadline(self, seconds: float) -> FairDeadline:
        """From now on; later if the chain has to wait for a processor."""
        return FairDeadline(seconds, self.family, times=_MOST_TIMES)

    def family(self) -> list[int]:
        """All processes of the chain on this host, the first one first."""
        found: list[int] = []
        if self._is_ours(self.first):
            found = [self.first, *descendants(self.first)]
        # Orphans of the chain have become our children.
        others = [pid for pid in descendants(os.getpid()) if pid not in found]
        found += filter(self._is_ours, others)
        living = [(pid, began) for pid in found if (began := started(pid)) is not None]
        self._seen.update(living)
        return [pid for pid, _ in living]

    def _is_ours(self, pid: int) -> bool:
        """Also by its start: the system gives a pid to another process later."""
        if pid in self._seen:
            return started(pid) == self._seen[pid]
        return str(self.folder).encode() in (read_bytes(f"/proc/{pid}/environ") or b"")

    def end(self) -> None:
        # A second Ctrl-C would leave behind processes that are only stopped.
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            self._undo.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _kill(self) -> None:
        """Stop all, so that no script goes on with its next line; then kill them."""
        steps = {each.step for each in self.probes()} - {"", own_step()}
        clients: set[int] = set()
        for _ in range(2):  # again, for processes that were started meanwhile
            for pid in self.family():
                if name_of(pid) in CLIENTS:
                    clients.add(pid)
                else:
                    send(pid, signal.SIGSTOP)
        # For probes on other hosts. Earlier, a script would go on behind its probe.
        with contextlib.suppress(OSError):
            (self.folder / "stop").touch()
        for step in sorted(steps):
            scancel(step)
        for pid in clients:
            send(pid, signal.SIGTERM)
        deadline = time.monotonic() + _END_SECONDS
        while any(map(started, clients)) and time.monotonic() < deadline - _END_SECONDS / 2:
            time.sleep(_POLL_SECONDS)
        while time.monotonic() < deadline:
            left = self.family()
            for pid in left:
                send(pid, signal.SIGKILL)
            if self._reap() and not left:
                break
            time.sleep(_POLL_SECONDS)

    def _reap(self) -> bool:
        """True if no process is left. One with many threads is dead before it can be reaped."""
        for pid, began in list(self._seen.items()):
            if pid == self.first:
                is_gone = self.process.poll() is not None
            else:
                try:
                    is_gone = os.waitpid(pid, os.WNOHANG)[0] != 0
                except OSError:  # the child of another process
                    is_gone = started(pid) != began
            if is_gone:
                del self._seen[pid]
        return not self._seen


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)
