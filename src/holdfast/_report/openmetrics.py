"""The state of runs as metrics, for Prometheus and other readers of its text format.

Only what both formats allow is used: OpenMetrics, which a server asks for, and the older text
that the node exporter reads from files. So there are gauges only, and times are moments, which
stay true in a file that is read later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence

from holdfast._report.status.gather import RunSummary

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_STATES = (
    *("new", "starting", "training", "stuck", "paused", "stopping"),
    *("finished", "closed", "stopped", "failed", "died", "could not start"),
)

Value = float | int | None
_TOLD = {
    "is_live": "Whether a process trains there now.",
    "step": "Steps that are complete.",
    "steps_wanted": "Steps that it is to make.",
    "epoch": "The epoch that it is in, from 1 on.",
    "attempt": "How often it was started.",
    "ranks": "Its processes.",
    "memory_step": "The newest step in memory.",
    "disk_step": "The newest step that is durable.",
    "memory_timestamp_seconds": "When the newest snapshot was taken.",
    "disk_timestamp_seconds": "When the newest checkpoint was made.",
    "boundary_timestamp_seconds": "When its last step was complete.",
    "disk_size_bytes": "The size of the newest checkpoint.",
    "straggler_wait_seconds": "How long the ranks wait for the slowest in each step.",
    "job_end_timestamp_seconds": "When SLURM ends its job.",
    "job_restarts": "How often SLURM has started its job again.",
    "exit_status": "What its last attempt left with; nothing if it died without one.",
}


def _figures(run: RunSummary, now: float) -> dict[str, Value]:
    job, slowest, ended = run.job, run.trouble.straggler, run.last_exit
    left = None if job is None else job.seconds_left
    return {
        "is_live": run.is_live,
        "step": run.step,
        "steps_wanted": run.total,
        "epoch": run.outlook.epoch,
        "attempt": run.attempt,
        "ranks": max(1, len(run.ranks)),
        "memory_step": run.safe.memory_step,
        "disk_step": run.safe.disk_step,
        "memory_timestamp_seconds": _moment(run.safe.memory_age_seconds, now),
        "disk_timestamp_seconds": _moment(run.safe.disk_age_seconds, now),
        "boundary_timestamp_seconds": _moment(run.outlook.boundary_age_seconds, now),
        "disk_size_bytes": run.safe.disk_size_bytes,
        "straggler_wait_seconds": None if slowest is None else slowest.seconds,
        "job_end_timestamp_seconds": None if left is None else now + left,
        "job_restarts": None if job is None else job.restarts,
        "exit_status": None if ended is None else ended.status,
    }


def render(runs: Sequence[RunSummary]) -> str:
    now = time.time()
    lines = list(_family("info", "What the run is.", ((run, _info(run), 1) for run in runs)))
    states = ((run, {"state": each}, run.state == each) for run in runs for each in _STATES)
    lines += _family("state", "1 for the state that it is in, 0 for the others.", states)
    found = [(run, _figures(run, now)) for run in runs]
    for name, told in _TOLD.items():
        lines += _family(name, told, ((run, {}, figures[name]) for run, figures in found))
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


def _moment(age: float | None, now: float) -> float | None:
    return None if age is None else now - age


def _escape(text: str) -> str:
    text = text.encode("utf-8", errors="replace").decode()
    # A carriage return would be read as the end of a line.
    text = text.replace("\r", " ")
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
