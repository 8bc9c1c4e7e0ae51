"""The state of runs as metrics, for Prometheus and other readers of its text format.

Only what both formats allow is used: OpenMetrics, which a server asks for, and the older text
that the node exporter reads from files. So there are gauges only, and times are moments, which
stay true in a file that is read later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast._report.status.gather import RunSummary

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_STATES = (
    *("new", "starting", "training", "stuck", "paused", "stopping"),
    *("finished", "closed", "stopped", "failed", "died", "could not start"),
)

Value = float | int | None
# For each metric what it tells, and how it is read from a run; times are moments, not ages.
_GAUGES: dict[str, tuple[str, Callable[[RunSummary], Value]]] = {
    "is_live": ("Whether a process trains there now.", lambda run: run.is_live),
    "step": ("Steps that are complete.", lambda run: run.step),
    "steps_wanted": ("Steps that it is to make.", lambda run: run.total),
    "epoch": ("The epoch that it is in, from 1 on.", lambda run: run.outlook.epoch),
    "attempt": ("How often it was started.", lambda run: run.attempt),
    "ranks": ("Its processes.", lambda run: max(1, len(run.ranks))),
    "memory_step": ("The newest step in memory.", lambda run: run.safe.memory_step),
    "disk_step": ("The newest step that is durable.", lambda run: run.safe.disk_step),
    "memory_timestamp_seconds": (
        "When the newest snapshot was taken.", lambda run: _ago(run.safe.memory_age_seconds)
    ),
    "disk_timestamp_seconds": (
        "When the newest checkpoint was made.", lambda run: _ago(run.safe.disk_age_seconds)
    ),
    "boundary_timestamp_seconds": (
        "When its last step was complete.", lambda run: _ago(run.outlook.boundary_age_seconds)
    ),
    "disk_size_bytes": (
        "The size of the newest checkpoint.", lambda run: run.safe.disk_size_bytes
    ),
    "straggler_wait_seconds": (
        "How long the ranks wait for the slowest in each step.",
        lambda run: None if (slow := run.trouble.straggler) is None else slow.seconds,
    ),
    "job_end_timestamp_seconds": (
        "When SLURM ends its job.",
        lambda run: None if run.job is None else _ago(run.job.seconds_left, -1),
    ),
    "job_restarts": (
        "How often SLURM has started its job again.",
        lambda run: None if run.job is None else run.job.restarts,
    ),
    "exit_status": (
        "What its last attempt left with; nothing if it died without one.",
        lambda run: None if run.last_exit is None else run.last_exit.status,
    ),
}  # fmt: skip


def render(runs: Sequence[RunSummary]) -> str:
    lines = list(_family("info", "What the run is.", ((run, _info(run), 1) for run in runs)))
    states = ((run, {"state": each}, run.state == each) for run in runs for each in _STATES)
    lines += _family("state", "1 for the state that it is in, 0 for the others.", states)
    for name, (told, read) in _GAUGES.items():
        lines += _family(name, told, ((run, {}, read(run)) for run in runs))
    return "\n".join([*lines, "# EOF", ""])


def _info(run: RunSummary) -> dict[str, str]:
    job = "" if run.job is None else run.job.id
    return {"id": run.run_id, "host": run.process.host or "", "job": job}


def _family(
    name: str, told: str, samples: Iterable[tuple[RunSummary, dict[str, str], Value]]
) -> Iterator[str]:
    """One metric; nothing if no run has it."""
    is_first = True
    for run, labels, value in samples:
        if value is None or not math.isfinite(value):
            continue
        if is_first:
            yield f"# HELP holdfast_run_{name} {told}"
            yield f"# TYPE holdfast_run_{name} gauge"
        is_first = False
        shown = {"run": run.folder, **labels}
        text = ",".join(f'{key}="{_escape(each)}"' for key, each in shown.items())
        number = round(value, 3) if isinstance(value, float) else int(value)
        yield f"holdfast_run_{name}{{{text}}} {number}"


def _ago(age: float | None, sign: int = 1) -> float | None:
    return None if age is None else time.time() - sign * age


def _escape(text: str) -> str:
    text = text.encode("utf-8", errors="replace").decode()
    # A carriage return would be read as the end of a line.
    text = text.replace("\r", " ")
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
