"""`holdfast stacks`: its options and its output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from holdfast import _text
from holdfast._diagnose.hangs.stacks import main_thread, merge_looks, read_thread
from holdfast._environment.processes.identity import host_name, of_process
from holdfast._errors import FolderError, HoldfastError, SettingsError
from holdfast._report.status.ask import (
    LOOK_SECONDS,
    ask_look,
    describe_stacks,
    look_at_process,
)
from holdfast._report.status.gather import only_run
from holdfast._store.folder.attempts import is_live, read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._tools.cli.group import AS_JSON, complete_runs, print_json
from holdfast._tools.cli.show import Screen

_KINDS = "Name a run folder or the number of a process: holdfast stacks --help"
_MOST_PIDS = 6
Record = dict[str, Any]


@click.command()
@click.argument("what", metavar="RUN|PID", shell_complete=complete_runs)
@click.option("--all", "wants_all", is_flag=True, help="Every process and thread, with its stack.")
@AS_JSON
def stacks(what: str, wants_all: bool, as_json: bool) -> None:
    """Show where every rank of a run stands now: one line for ranks at the same place.

    The keepers read the stacks. So it works while the training hangs, it stops nothing, and it
    works from any machine that can write into the run folder. PID is any Python process of this
    machine. The stacks are read by py-spy; without it, by a signal that a run answers.

    With --all the stack of every thread of the ranks, their workers and other children follows,
    innermost call first.

    \b
    Example:
      holdfast stacks runs/a
      holdfast stacks runs/a --all
      holdfast stacks 4711
    """
    found = _of_run(Path(what)) if Path(what).exists() else _of_number(what)
    looks = found["looks"]
    lines = [*merge_looks(looks, found["missing"]), *_children(looks)]
    if as_json:
        print_json({**found, "lines": lines})
        return
    screen = Screen()
    screen.write(_headline(found), style="bold")
    for line in lines:
        screen.write(_text.name(line))
    unread = (str(look["stacks_error"]).rstrip(".") for look in looks if look.get("stacks_error"))
    for reason in dict.fromkeys(unread):
        screen.write(_text.name(f"Not all stacks could be read: {reason}."), style="yellow")
    if wants_all:
        for line, is_process in describe_stacks(looks):
            screen.write(line, style="bold" if is_process else "")
    else:
        again = _text.command("stacks", Path(found["subject"]))
        screen.write(f"Every process and thread: {again} --all", "dim")


def _of_run(path: Path) -> Record:
    folder = only_run(path)
    layout = RunLayout(folder)
    attempt = max(layout.attempt_numbers(), default=0)
    if not attempt or not is_live(layout, attempt):
        text = f"{folder}: no process trains here now, so there are no stacks to see.\n"
        if attempt and layout.hang_text(attempt).exists():
            text += f"Those of its last hang: {layout.hang_text(attempt)}\n"
        raise FolderError(f"{text}How it ended: {_text.command('why', folder)}")
    found = ask_look(folder)
    if found is None:
        process = read_json(layout.lease(attempt)).get("process") or {}
        host, pid = process.get("host") or "its machine", process.get("pid") or "PID"
        raise HoldfastError(
            f"{folder}: its keeper on {host} did not answer within {LOOK_SECONDS:.0f} s.\n"
            f"On {host} itself: holdfast stacks {pid}"
        )
    return {"subject": str(folder), **found}


def _of_number(what: str) -> Record:
    if not (what.isascii() and what.isdigit() and len(what) < 10):
        raise SettingsError(
            f"{what}: there is no such folder, and it is not the number of a process.\n{_KINDS}"
        )
    pid = int(what)
    if not of_process(pid).started:
        raise SettingsError(
            f"{pid}: there is no such process on {host_name()}.\n"
            f"If it has ended: holdfast why {pid}"
        )
    looks = look_at_process(pid)
    if not looks:
        raise HoldfastError(
            f"{pid}: nothing of this process can be read.\n"
            "Ask as the user whose process it is, or as root."
        )
    return {"subject": what, "looks": looks, "missing": [], "by": "here"}


def _headline(found: Record) -> str:
    looks = found["looks"]
    ranks = len(looks) + len(found["missing"])
    who = _text.name(found["subject"])
    attempt = found.get("attempt")
    if attempt is None:
        return f"process {who}, {_count(looks[0])}"
    steps = sorted({look["step"] for look in looks if isinstance(look.get("step"), int)})
    where = f", step {steps[0]}" if steps else ""
    where += f" to {steps[-1]}" if len(steps) > 1 else ""
    several = f", {ranks} ranks" if ranks > 1 else f", {_count(looks[0])}"
    return f"{who}: attempt {attempt}{where}{several}"


def _count(look: Record) -> str:
    processes = look.get("processes") or []
    threads = sum(len(each.get("threads") or []) for each in processes)
    own = _text.count(threads, "thread")
    return own if len(processes) < 2 else f"{len(processes)} processes, {own}"


def _children(looks: Sequence[Record]) -> Iterator[str]:
    """The Python children of the ranks, those with the same stack in one line."""
    groups: dict[str, list[str]] = {}
    for look in looks:
        for process in (look.get("processes") or [])[1:]:
            thread = main_thread(process)
            if not thread.get("frames"):
                continue
            standing = read_thread(thread)
            line = standing.where() + ("" if standing.call else f" ({standing.words})")
            rank = look.get("rank")
            of = f" of rank {rank}" if isinstance(rank, int) and len(looks) > 1 else ""
            groups.setdefault(line, []).append(f"{process.get('pid')}{of}")
    for line, pids in sorted(groups.items(), key=lambda each: -len(each[1])):
        shown = ", ".join(pids[:_MOST_PIDS]) + (", …" if len(pids) > _MOST_PIDS else "")
        who = "1 child" if len(pids) == 1 else f"{len(pids)} children"
        yield f"{who} (pid {shown}) {line}"
