"""How an attempt may end, with all that trainer, keeper and scheduler would leave of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast import _errors
from holdfast._keeper.hangs.record import explain_record
from holdfast._store.folder.lineage import note_void
from tests.report_story import GB, Story

_TRACEBACK = """\
Traceback (most recent call last):
  File "/home/ada/vision/train.py", line 88, in <module>
    loss = step(model, batch)
  File "/home/ada/vision/train.py", line 41, in step
    return criterion(model(batch.images), batch.labels)
ValueError: Expected input batch_size (256) to match target batch_size (255).
"""
_QUIET = {"version": 2, "path": "/job", "limit": 256 * GB, "oom": 0, "oom_kill": 0, "max": 0}


def _killed(story: Story) -> None:
    _die(story, -9, "was killed by SIGKILL")


def _crashed(story: Story) -> None:
    story.layout.stacks(story.attempt).write_text(
        "Fatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007f6c5b1fe6c0 (most recent call first):\n"
        '  File "/home/ada/vision/decode.py", line 17 in read_image\n'
        '  File "/home/ada/vision/train.py", line 35 in batches\n'
    )
    _die(story, -11, "was killed by SIGSEGV")


def _out_of_memory(story: Story) -> None:
    for _ in range(7):
        story.leaked_bytes += 10 * GB
        story.train(60)
    figures = {"what": "cgroup", "seconds": 41.0, "bytes_per_second": 90 << 20}
    story.note("memory", step=story.step, used=250 * GB, limit=256 * GB, **figures)
    story.checkpoint("memory")
    story.train(30)
    before = {"cgroup": _QUIET, "vmstat_oom_kill": 3}
    after = {"cgroup": {**_QUIET, "oom_kill": 1}, "vmstat_oom_kill": 4}
    counters = {"start": before, "before": before, "death": after}
    _die(story, -9, "was killed by SIGKILL", counters=counters, is_saved=False)


def _terminated(story: Story) -> None:
    _leave_for(story, "SIGTERM", _errors.TERMINATED)


def _preempted(story: Story) -> None:
    story.note("signal", name="SIGUSR2")
    story.note("job-ends", cause="preempted")
    story.now += 2.5
    story.checkpoint("stop: SIGUSR2")
    story.note("stop", step=story.step, reason="SIGUSR2", status=_errors.REQUEUE)
    said: dict[str, Any] = {"job": story.job, "restarts": story.attempt - 1, "step": story.step}
    said |= {"idle": 0, "said": f"job {story.job} was requeued", "status": _errors.REQUEUE}
    story.note("requeue", attempt=story.attempt, **said)
    story.record(story.layout.requeue(story.attempt), **said)
    story.end(_errors.REQUEUE, "SIGUSR2")


def _asked(story: Story) -> None:
    story.note("request", kind="stop", reason="asked by ada")
    _leave_for(story, None, _errors.PERSON, reason="holdfast stop")


def _interrupted(story: Story) -> None:
    _leave_for(story, "SIGINT", _errors.PERSON, reason="Ctrl-C")


def _failed(story: Story) -> None:
    last = _TRACEBACK.strip().splitlines()[-1]
    story.checkpoint("exception")
    kind, _, message = last.partition(": ")
    told = {"type": kind, "message": message, "traceback": _TRACEBACK}
    path = story.layout.error(story.attempt)
    story.record(path, time=story.now, rank=0, step=story.step, attempt=story.attempt, **told)
    story.layout.output(story.attempt).write_text(f"epoch 3\n{_TRACEBACK}")
    story.end(1, last)


def _bad(story: Story) -> None:
    reason, first = "loss is not finite", story.step - 3
    note_void(story.layout, story.attempt, first, reason)
    told = {"rules": ["stop_on_nan"], "tensors": ["model.head.weight"], "outcome": "failure"}
    bad = {"bad_step": story.step, "void_from": first}
    story.note("rule", step=story.step, reason=reason, **bad, **told)
    story.note("set-aside", name=f"step-{story.step:012d}-a{story.attempt:04d}", why="called bad")
    story.note("stop", step=story.step, reason=reason, status=_errors.BAD)
    story.end(_errors.BAD, reason)


def _full_disk(story: Story) -> None:
    error = "No space left on device: 18.6 GB are needed, 1.1 GB are free"
    story.note("save-failed", step=story.step, error=error)
    story.note("signal", name="SIGTERM")
    story.now += 8
    story.note("save-failed", step=story.step, error=error)
    story.end(_errors.NOT_DURABLE, "SIGTERM")


def _hung(story: Story) -> None:
    began = story.now
    story.now += 660
    frames = [
        {"file": "/usr/lib/python3.12/queue.py", "line": 171, "name": "get"},
        {"file": "/home/ada/vision/train.py", "line": 35, "name": "batches"},
        {"file": "/home/ada/vision/train.py", "line": 80, "name": "<module>"},
    ]
    thread = {"tid": story.pid, "name": "MainThread", "is_main": True, "frames": frames}
    process = {"pid": story.pid, "name": "python", "state": "S", "cpu": 0.0, "threads": [thread]}
    look = {"rank": 0, "host": story.hosts[0], "step": story.step, "mark": 2 * story.step}
    look |= {"boundary_age": 660.0, "processes": [process], "phase": None}
    record: dict[str, Any] = {
        "began": began,
        "found": story.now,
        "ended": None,
        "patience": 600.0,
        "how": "learned",
        "usual_step_seconds": story.pace.step_seconds,
        "activity": "idle",
        "looks": [look],
        "missing": [],
        "attempt": story.attempt,
        "policy": "restart",
    }
    explain_record(record)
    story.record(story.layout.hang(story.attempt), **record)
    told = {"cause": record["cause"], "sentence": record["sentence"]}
    story.note("hang", step=story.step, rank=0, stood=660.0, policy="restart", **told)
    story.checkpoint("hang")
    story.now += 6
    story.end(_errors.HUNG, "hung")


def _paused_and_stopped(story: Story) -> None:
    story.note("paused", step=story.step, rank=0, by="py-spy")
    since = story.now
    story.now += 300
    story.note("resumed", step=story.step, rank=0, by="py-spy", since=since)
    story.train(50)
    story.note("slow", step=story.step, stood=31.0)
    _leave_for(story, "SIGTERM", _errors.TERMINATED)


def _lost(story: Story) -> None:
    story.vanish()


def _rank_died(story: Story) -> None:
    rank = min(5, story.ranks - 1)
    host = story.hosts[rank % len(story.hosts)]
    story.note("rank-died", rank=rank, how="was killed by SIGKILL", host=host)
    reason = f"rank {rank} on {host} was killed by SIGKILL"
    story.note("end", reason=reason, rank=rank, durable_step=story.durable)
    story.end(_errors.REQUEUE, reason)


def _leave_for(story: Story, signal: str | None, status: int, *, reason: str = "") -> None:
    reason = reason or signal or ""
    if signal:
        story.note("signal", name=signal)
    story.now += 1.5 * story.pace.step_seconds
    story.step += 1
    story.checkpoint(f"stop: {reason}")
    story.note("stop", step=story.step, reason=reason, status=status)
    story.end(status, reason)


def _die(
    story: Story,
    status: int,
    how: str,
    *,
    counters: dict[str, Any] | None = None,
    is_saved: bool = True,
) -> None:
    quiet = {"cgroup": _QUIET, "vmstat_oom_kill": 3}
    if is_saved:
        story.checkpoint("death", step=story.step - 2)
    story.record(
        story.layout.death(story.attempt),
        time=story.now,
        host=story.hosts[story.attempt % len(story.hosts)],
        pid=story.pid,
        rank=0,
        attempt=story.attempt,
        status=status,
        counters=counters or dict.fromkeys(("start", "before", "death"), quiet),
        memory=[],
        children=[],
        signals=[],
        step=story.step,
        durable_step=story.durable,
        asked=None,
        left_status=None,
        alive=False,
    )
    story.end(None, how, is_death=True)


ENDS: dict[str, Callable[[Story], None]] = {
    "preempted": _preempted,
    "killed": _killed,
    "terminated": _terminated,
    "hung": _hung,
    "out-of-memory": _out_of_memory,
    "failed": _failed,
    "lost": _lost,
    "asked": _asked,
    "bad": _bad,
    "full-disk": _full_disk,
    "crashed": _crashed,
    "interrupted": _interrupted,
    "paused": _paused_and_stopped,
    "rank-died": _rank_died,
}
