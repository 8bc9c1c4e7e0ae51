"""The story of the demo: one training undisturbed, and the same one killed and started again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast._environment import variables
from holdfast._errors import HoldfastError

STEPS = 400
KILL_AT = 290  # the 291st step begins, and is never completed
FRAMEWORKS = {"torch": "PyTorch", "numpy": "NumPy"}


@dataclass(slots=True)
class DemoAttempt:
    status: int = 0
    begin: int = 0
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
        with process.stdout as lines:
            for line in lines:
                _follow(json.loads(line), found, watch)
        found.status = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
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
