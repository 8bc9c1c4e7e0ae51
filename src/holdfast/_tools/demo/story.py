"""The story of the demo: one training undisturbed, and the same one killed and started again.

Nothing here prints. Every process that is started is ended by its own pid, and its keeper has
ended before the folder is removed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from holdfast._environment import variables
from holdfast._errors import FolderError, HoldfastError
from holdfast._store.folder.attempts import find_run, keeper_of
from holdfast._store.folder.layout import RunLayout
from holdfast._store.read.find import remove_leftovers

STEPS = 400
KILL_AT = 290  # the 291st step begins, and is never completed
FRAMEWORKS = {"torch": "PyTorch", "numpy": "NumPy"}
_KEEPER_SECONDS = 30.0
_FIRST_BEAT_SECONDS = 1.0


@dataclass(slots=True)
class DemoAttempt:
    status: int = 0
    begin: int = 0
    attempt: int = 0
    accuracy: float = 0.0
    step_times: dict[int, float] = field(default_factory=dict)  # when each step was complete
    digests: dict[str, str] = field(default_factory=dict)  # of all state, at the end

    @property
    def last_step(self) -> int:
        return max(self.step_times, default=self.begin)

    def seconds_since(self, step: int) -> float:
        """The training time since it had completed `step`."""
        times = self.step_times
        first = times.get(step, min(times.values(), default=0.0))
        return max(times.values(), default=0.0) - first


def choose_framework(wanted: str) -> str:
    """PyTorch if it is installed, unless the user has chosen."""
    has_torch = importlib.util.find_spec("torch") is not None
    if wanted == "auto":
        return "torch" if has_torch else "numpy"
    if wanted == "torch" and not has_torch:
        raise HoldfastError(
            "PyTorch is not installed.\nInstall it (pip install torch), or use: --framework numpy"
        )
    return wanted


@contextlib.contextmanager
def open_stage(keep: Path | None) -> Iterator[Path]:
    """A folder for the two runs, which is removed at the end unless it is to be kept."""
    if keep is not None:
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise FolderError(f"{keep}: is there already.\nChoose a folder that is not there yet.")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    folder = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        with ended_by_signals():
            yield folder
    finally:
        former = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C can wait
        _forget_runs(folder)
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGINT, former)


def _forget_runs(folder: Path) -> None:
    """Remove the memory that waits for another attempt of these runs: none will come."""
    for path in folder.glob(f"*/{RunLayout(Path()).identity.name}"):
        with contextlib.suppress(HoldfastError, OSError):
            remove_leftovers(find_run(path.parent)[1], sys.maxsize, ())


def run_attempt(
    framework: str,
    folder: Path,
    watch: Callable[[int], None],
    *,
    kill_at: int | None = None,
    sabotage: bool = False,
) -> DemoAttempt:
    command = [sys.executable, "-P", "-m", f"holdfast._tools.demo.train_{framework}", str(folder)]
    command += ["--steps", str(STEPS)]
    command += [] if kill_at is None else ["--kill-at", str(kill_at)]
    command += ["--sabotage"] if sabotage else []
    found = DemoAttempt()
    log = folder.with_name(f"{folder.name}.log")
    # The matrices are small: on a busy machine more threads than one only wait for each other.
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {**variables.whole(), **one_thread}
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            _follow(json.loads(line), found, watch)
        found.status = process.wait()
    finally:
        _end(process, RunLayout(folder))
    expected = found.status != 0 if kill_at is not None else found.status == 0
    if not expected or bool(found.digests) == (kill_at is not None):
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise HoldfastError(
            f"the demo's training ended with status {found.status}, which it should not.\n"
            + "\n".join(said[-5:])
        )
    return found


def find_differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """The names of all values that differ.

    >>> find_differences({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"})
    ['b', 'c']
    """
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _follow(message: dict[str, object], found: DemoAttempt, watch: Callable[[int], None]) -> None:
    step = message.get("step")
    if isinstance(step, int):
        found.step_times[step] = time.monotonic()
        watch(step)
        return
    for name, value in message.items():
        setattr(found, name, value)


def _end(process: subprocess.Popen[str], layout: RunLayout) -> None:
    """End the process if it still runs, and wait until its keeper has ended."""
    was_running = process.poll() is None
    if was_running:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
    if not was_running and process.returncode == 0:
        return
    attempt = max(layout.attempt_numbers(), default=0)
    began = time.monotonic()
    # A keeper that has just been started has no heartbeat yet.
    while attempt and time.monotonic() - began < _KEEPER_SECONDS:
        keeper = keeper_of(layout, attempt)
        if keeper is None and time.monotonic() - began > _FIRST_BEAT_SECONDS:
            return
        if keeper is not None and not (keeper.is_here() and keeper.is_alive()):
            return
        time.sleep(0.01)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the context as Ctrl-C does."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    former = {name: signal.signal(getattr(signal, name), leave) for name in names}
    try:
        yield
    finally:
        for name, handler in former.items():
            signal.signal(getattr(signal, name), handler)
