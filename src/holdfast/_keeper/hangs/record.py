"""The record of a hang: shortened, explained, and written where `why` finds it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
import traceback
from collections.abc import Callable
from typing import Any

from holdfast._environment import variables
from holdfast._keeper.timers import in_background
from holdfast._store.folder.atomic import write_atomic
from holdfast._store.folder.attempts import write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.supervised import led_output, tell_leader_of_hang
from holdfast._text import printable

_MOST_BYTES = 32 << 20  # of the looks of all ranks together
_MOST_LOOK_BYTES = 1 << 20
_LEAST_LOOK_BYTES = 20_000
NO_HANG = ("slow", "debugger", "stopped", "frozen", "running")  # causes that are no hang


def shorten(look: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Shorten an inspection to fit into a message: drop deep frames and minor threads first."""
    most = max(_LEAST_LOOK_BYTES, min(_MOST_LOOK_BYTES, _MOST_BYTES // max(1, ranks)))
    for frames, threads, processes in ((60, 256, 64), (30, 32, 64), (20, 8, 32), (12, 2, 8)):
        if len(json.dumps(look)) <= most:
            break
        kept = [
            {**process, "threads": _fewer(process.get("threads") or [], threads, frames)}
            for process in (look.get("processes") or [])[:processes]
        ]
        look = {**look, "processes": kept}
    return look


def _fewer(threads: list[dict[str, Any]], most: int, frames: int) -> list[dict[str, Any]]:
    # The main thread first, then those with frames.
    order = sorted(threads, key=lambda t: (not t.get("is_main"), not t.get("frames")))
    return [{**t, "frames": (t.get("frames") or [])[:frames]} for t in order[:most]]


def explain_record(record: dict[str, Any]) -> int | None:
    """Add the cause and a sentence; returns the rank that causes it."""
    try:
        from holdfast._diagnose.hangs.explain import explain  # only in trouble

        led = variables.led_folder()
        found = explain(record, led_output(led) if led is not None else None)
        record["cause"], record["sentence"] = found.cause.value, found.sentence
        return None if found.rank is None else int(found.rank)
    except Exception:  # noqa: BLE001  report the hang without a cause
        traceback.print_exc()
        stood = record["found"] - record["began"]
        record["cause"] = "unknown"
        record["sentence"] = f"no step was made for {stood:.0f} s"
        return None


def told_of(hang: dict[str, Any]) -> str:
    """What a person is told of a hang, by the trainer or in its place."""
    if hang["policy"] == "restart":
        return f"{hang['sentence']}\nIt is made durable and ended for that (--hang-timeout)."
    return f"{hang['sentence']}\nMore: holdfast why {shlex.quote(hang['folder'])}"


def paused_sentence(pause: dict[str, Any]) -> str:
    who = f"rank {pause['rank']}" if pause["of"] > 1 else "the run"
    return f"{who} is held by {pause['by']}: no hang. The watch waits until it goes on."


def say_in_place_of(pid: int, text: str) -> None:
    """Say something on the standard error of a process that cannot do so itself."""

    def act() -> None:
        # By a name of its own: what is set for this one does not change that of the process.
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with contextlib.suppress(OSError):  # a socket cannot be opened
            descriptor = os.open(f"/proc/{pid}/fd/2", flags)
            try:
                # On a terminal the progress line has no end yet.
                begin = "\n" if os.isatty(descriptor) else ""
                os.write(descriptor, f"{begin}holdfast: {printable(text)}\n".encode())
            finally:
                os.close(descriptor)

    in_background(act)  # its disk may be what hangs


def file_hang(
    layout: RunLayout, record: dict[str, Any], done: Callable[[int | None], None] | None
) -> None:
    """Explain and write a record in a thread: the disk may be what hangs."""

    def act() -> None:
        if done is not None:
            done(explain_record(record))
        if record["cause"] in NO_HANG:
            return
        if (place := variables.led_folder()) is not None:
            tell_leader_of_hang(place, record)  # first: the run's folder may not answer
        attempt = record["attempt"]
        with contextlib.suppress(OSError):
            write_json(layout.hang(attempt), record, durable=False)
            text = text_of(record)
            write_atomic(layout.hang_text(attempt), text.encode(errors="replace"), durable=False)

    in_background(act)


def file_look(
    layout: RunLayout,
    attempt: int,
    token: Any,
    looks: dict[int, dict[str, Any]],
    missing: list[int],
) -> None:
    """Write the answer to `holdfast stacks`, in a thread as well."""
    ordered = [looks[rank] for rank in sorted(looks)]
    record = {"token": token, "time": time.time(), "looks": ordered, "missing": missing}

    def act() -> None:
        with contextlib.suppress(OSError):
            write_json(layout.look(attempt), record, durable=False)

    in_background(act)


def text_of(record: dict[str, Any]) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["began"]))
    lines = [record.get("sentence", ""), f"No step since {began}.", ""]
    for look in record["looks"]:
        rank, step = look.get("rank"), look.get("step")
        lines.append(f"rank {rank} on {look.get('host')}, step {step}, phase {look.get('phase')}")
        if look.get("stacks_error"):
            lines.append(f"  no stacks: {look['stacks_error']}")
        for process in look.get("processes") or []:
            head = f"  process {process.get('pid')} ({process.get('name')})"
            lines.append(f"{head}: state {process.get('state')}, cpu {process.get('cpu')}")
            for thread in process.get("threads") or []:
                if thread.get("frames"):
                    holds = ", holds the GIL" if thread.get("owns_gil") else ""
                    lines.append(f"    thread {thread.get('tid')} ({thread.get('name')}){holds}")
                    lines += (
                        f"      {f.get('file')}:{f.get('line')} in {f.get('name')}"
                        for f in thread["frames"]
                    )
        lines.append("")
    if record["missing"]:
        lines.append(f"no answer from the keepers of ranks {record['missing']}")
    return "\n".join(lines)
