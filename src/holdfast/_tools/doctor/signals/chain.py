"""A command started for real, with the probe in the place of its training.

Everything but the training runs as it stands, so what could do harm is kept from it: the probe
stands in every Python below, requests to requeue or submit a job are noted and not passed on, and
at the end all that was started is stopped first and then killed, so that no script goes on with
its next line. Nothing is left behind.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast._environment import variables as _env
from holdfast._environment.processes.tree import descendants
from holdfast._tools.doctor.finding import State
from holdfast._tools.doctor.signals import probe
from holdfast._tools.doctor.signals.probed import Probe, read_lines
from holdfast._tools.doctor.signals.processes import (
    CLIENTS,
    adopt_orphans,
    as_first,
    environment,
    name,
    options,
    own_step,
    read,
    scancel,
    send,
    started,
    words,
)
from holdfast._tools.doctor.signals.target import Target
from holdfast._tools.lint.wrappers import is_python

# -- A terminal of its own for a chain, in which Ctrl-C can be pressed -----------------------------


_PIECE_BYTES = 65536
_TERMINAL_END_SECONDS = 2.0
_CTRL_C = b"\x03"


class Terminal:
    """One end for the chain; the other is ours."""

    def __init__(self) -> None:
        self._master, self.given = os.openpty()
        self._reader: threading.Thread | None = None

    def begin(self, output: Path) -> None:
        """The chain has its end: read what it prints, or it would wait for us."""
        os.close(self.given)
        self._reader = threading.Thread(target=self._copy, args=(output,), daemon=True)
        self._reader.start()

    def press_ctrl_c(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._master, _CTRL_C)

    def end(self) -> None:
        """When nobody has the other end any more, the reader ends by itself."""
        if self._reader is None:
            os.close(self.given)
        else:
            self._reader.join(_TERMINAL_END_SECONDS)
        os.close(self._master)

    def _copy(self, output: Path) -> None:
        with contextlib.suppress(OSError), output.open("ab", buffering=0) as file:
            while piece := os.read(self._master, _PIECE_BYTES):
                file.write(piece)


_LOOK_SECONDS = 0.01
_SETTLE_SECONDS = 0.3  # for more ranks, where nobody says how many there are
_END_SECONDS = 5.0
_WORD = re.compile(r"\w")
# Notes what a script would ask of SLURM, and does not ask it.
_SHIM = """#!/bin/sh
case "{name} $1" in
    "scontrol requeue"*|sbatch*) echo "{name} $*" >> '{folder}/asked'; exit 0;;
esac
PATH=${{PATH#'{folder}/bin:'}}
exec {name} "$@"
"""


class ChainError(Exception):
    """Why the training was not reached: the fact, and what to do."""

    def __init__(self, found: str, remedy: str = "", state: State = "warn") -> None:
        super().__init__(found)
        self.found = found
        self.state = state
        self.remedy = remedy


class Chain:
    """One start of the command; a context, at whose end all of it is gone."""

    def __init__(
        self,
        command: Sequence[str],
        target: Target,
        kind: str,
        *,
        seconds: float,
        folder: Path | None = None,
        has_terminal: bool = False,
        backend: str = "",
    ) -> None:
        self.command = list(command)
        self.target = target
        self._kind = kind
        self._backend = backend  # of torch, if the training names one
        self._seconds = seconds
        self._cwd = folder
        self._terminal = Terminal() if has_terminal else None
        self._seen: dict[int, int] = {}  # all that was ever below it: number and start
        self._handlers: dict[int, Any] = {}
        self.first = 0

    def __enter__(self) -> Chain:
        # Tasks of srun may be on other nodes, and share the folder of the job, not /tmp.
        is_shared = any(word.endswith("srun") for word in self.command) or self._uses_srun()
        place = (self._cwd or Path.cwd()) if is_shared else None
        try:
            prefix = ".holdfast-doctor-" if is_shared else "holdfast-doctor-"
            made = tempfile.mkdtemp(prefix=prefix, dir=place)
        except OSError as error:
            raise ChainError(
                f"{place or tempfile.gettempdir()}: {error.strerror}: no place for the probe",
                "go to a folder that can be written to, or set TMPDIR",
            ) from error
        self.folder = Path(made)
        try:
            self._start()
        except OSError as error:
            self.end()
            raise ChainError(
                f"{made}: {error.strerror or error}: the probe cannot be put there",
                "make room there, or set TMPDIR",
            ) from error
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _uses_srun(self) -> bool:
        for path in self.target.scripts:
            with contextlib.suppress(OSError):
                if "srun" in path.read_text(errors="replace"):
                    return True
        return False

    def _start(self) -> None:
        folder = self.folder
        (folder / "told").mkdir()
        (folder / "bin").mkdir()
        shutil.copy(probe.__file__, folder / "sitecustomize.py")
        for program in ("scontrol", "sbatch"):
            if shutil.which(program):
                shim = folder / "bin" / program
                shim.write_text(_SHIM.format(name=program, folder=folder))
                shim.chmod(0o755)
        names = list(self.target.names)
        command = self.command
        if self.target.program_at is not None:
            names = ["training.py"]
            command = [*command[: self.target.program_at], sys.executable, str(folder / names[0])]
            (folder / names[0]).write_text("")
        errand = {
            "kind": self._kind,
            "folder": str(folder),
            "targets": names,
            "seconds": self._seconds,
            "backend": self._backend,
            "doctor": [os.getpid(), started(os.getpid()) or 0],
        }
        variables = _env.whole()
        paths = [str(folder), *filter(None, [variables.get("PYTHONPATH")])]
        (folder / "errand.json").write_text(json.dumps(errand))
        variables |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": f"{folder / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}",
            "HOLDFAST_STATE": str(folder / "state"),
        }
        self._adopted = adopt_orphans(True)
        if threading.current_thread() is threading.main_thread():
            # Told to end, we end the chain before; Ctrl-C does so by itself.
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup it stays so
                    self._handlers[number] = signal.signal(number, _leave)
        with (folder / "output").open("wb") as output:
            if self._terminal is None:
                streams: tuple[Any, ...] = (subprocess.DEVNULL, output, output)
            else:
                streams = (self._terminal.given,) * 3
            self.process = subprocess.Popen(
                as_first(command, has_terminal=self._terminal is not None),
                cwd=self._cwd,
                env=variables,
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                start_new_session=True,
            )
        self.first = self.process.pid
        if self._terminal is not None:
            self._terminal.begin(self.folder / "output")
        self._seen[self.first] = started(self.first) or 0

    def press_ctrl_c(self) -> None:
        """In the terminal that the chain was started in."""
        assert self._terminal is not None
        self._terminal.press_ctrl_c()

    # What is told.

    def probes(self) -> list[Probe]:
        """Those that are in the place of a training, in the order of their ranks."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / "told")  # a network file system looks again for that
        found = []
        for path in sorted(self.folder.glob("told/*.jsonl")):
            one = Probe(read_lines(path))
            if one.told and one.here["what"] == "here":
                found.append(one)
        return sorted(found, key=lambda each: (each.rank, each.here["time"]))

    def skipped(self) -> list[str]:
        """Scripts of the user that were not run."""
        found = [read_lines(path) for path in sorted(self.folder.glob("told/*.jsonl"))]
        return [each[0]["script"] for each in found if each and each[0]["what"] == "skipped"]

    def asked(self) -> list[str]:
        """What a script would have asked of SLURM."""
        with contextlib.suppress(OSError):
            return (self.folder / "asked").read_text(errors="replace").splitlines()
        return []

    def output(self) -> str:
        """The last line that was printed and has words in it."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "output").read_text(errors="replace").split("\n")
            return next((line.strip()[:160] for line in reversed(lines) if _WORD.search(line)), "")
        return ""

    def await_probes(self, seconds: float) -> list[Probe]:
        """Wait for all ranks, as far as it is known how many there are."""
        deadline = time.monotonic() + seconds
        seen, changed = 0, time.monotonic()
        around = _env.of_ranks()
        while True:
            found = self.probes()
            if len(found) != seen:
                seen, changed = len(found), time.monotonic()
            known = [each.expected(around) for each in found]
            wanted = max((each for each in known if each is not None), default=None)
            if wanted is not None and seen >= wanted:
                return found
            if seen and wanted is None and time.monotonic() - changed > _SETTLE_SECONDS:
                return found
            self.guard()
            if self.process.poll() is not None and not seen:
                raise self._ended_before()
            if time.monotonic() > deadline:
                if seen:
                    raise ChainError(
                        f"{seen} of {wanted} ranks began within {seconds:.0f} s",
                        "see why the others do not: start the command by itself",
                    )
                raise ChainError(
                    f"{self.target.label} was not reached within {seconds:.0f} s"
                    f"{self._last_words()}",
                    "leave out what takes long before the training, for this test",
                )
            time.sleep(_LOOK_SECONDS)

    def _ended_before(self) -> ChainError:
        skipped = self.skipped()
        passed_over = f" (not run: {', '.join(sorted(set(skipped)))})" if skipped else ""
        return ChainError(
            f"the command ended with status {self.process.returncode} before "
            f"{self.target.label} was reached{self._last_words()}{passed_over}",
            "start it by itself and see that it begins to train",
            "fail" if self.process.returncode else "warn",
        )

    def _last_words(self) -> str:
        said = self.output()
        return f"; it said last: {said}" if said else ""

    def guard(self) -> None:
        """See that no training begins without the probe: an environment may have been lost."""
        for pid in self.family():
            command = words(pid)
            if not command or not is_python(command[0].rpartition("/")[2]):
                continue
            if probe.role(command, self.target.names) != "train":
                continue
            variables = environment(pid)
            if variables is None:
                continue
            label, letters = probe.what_it_runs(command)[1], "".join(options(command))
            paths = [each for each in variables.split(b"\0") if each.startswith(b"PYTHONPATH=")]
            if not any(str(self.folder).encode() in each for each in paths):
                how = "PYTHONPATH does not reach it: something above it sets it anew"
                remedy = "write PYTHONPATH=…:$PYTHONPATH where it is set, and pass variables on"
            elif set(letters) & set("EIS"):
                how = f"python -{letters} looks at no PYTHONPATH"
                remedy = "leave that option out for this test"
            else:
                continue
            self.end()
            raise ChainError(f"{label} was about to train for real, and was ended: {how}", remedy)

    # Whom there is, and their end.

    def family(self) -> list[int]:
        """All processes of the chain on this host, the first one first."""
        found: list[int] = []
        if self._is_ours(self.first):
            found = [self.first, *descendants(self.first)]
        for pid in descendants(os.getpid()):  # orphans of the chain have become ours
            if pid not in found and self._is_ours(pid):
                found.append(pid)
        living = [(pid, began) for pid in found if (began := started(pid)) is not None]
        self._seen.update(living)
        return [pid for pid, _ in living]

    def _is_ours(self, pid: int) -> bool:
        """By when it began, too: a number passes on to strangers."""
        if pid in self._seen:
            return started(pid) == self._seen[pid]
        return str(self.folder).encode() in read(f"/proc/{pid}/environ")

    def end(self) -> None:
        """Stop all, so that no script goes on with its next line; then kill it."""
        if not self.folder.exists():
            return
        # A second Ctrl-C would leave behind what is only stopped by now.
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        )
        try:
            self._end()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _end(self) -> None:
        steps = {each.step for each in self.probes()} - {"", own_step()}
        clients = []
        for _ in range(2):  # whoever was started meanwhile
            for pid in self.family():
                if name(pid) in CLIENTS:
                    clients.append(pid)
                else:
                    send(pid, signal.SIGSTOP)
        # For those that no signal of ours reaches. Sooner, and a script goes on behind its probe.
        with contextlib.suppress(OSError):
            (self.folder / "stop").touch()
        for step in sorted(steps):
            scancel(step)
        for pid in dict.fromkeys(clients):
            send(pid, signal.SIGTERM)
        deadline = time.monotonic() + _END_SECONDS
        while any(map(started, clients)) and time.monotonic() < deadline - _END_SECONDS / 2:
            time.sleep(_LOOK_SECONDS)
        while time.monotonic() < deadline:
            left = self.family()
            for pid in left:
                send(pid, signal.SIGKILL)
            if self._reap() and not left:
                break
            time.sleep(_LOOK_SECONDS)
        if self._terminal is not None:
            self._terminal.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if hasattr(self, "_adopted"):
            adopt_orphans(self._adopted)

    def _reap(self) -> bool:
        """Whether nobody is left. One with many threads is dead for a while before it is reaped."""
        for pid, began in list(self._seen.items()):
            if pid == self.first:
                is_gone = self.process.poll() is not None
            else:
                try:
                    is_gone = os.waitpid(pid, os.WNOHANG)[0] != 0
                except OSError:  # another one's child
                    is_gone = started(pid) != began
            if is_gone:
                del self._seen[pid]
        return not self._seen


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)
