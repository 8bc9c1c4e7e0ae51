"""`holdfast why`: what it takes, and what it prints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from holdfast import _text
from holdfast._diagnose.deaths.judge import judge
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.evidence.gather import (
    JOB,
    gather_led,
    gather_lives,
    gather_log,
    gather_pid,
    gather_run,
    gather_slurm,
)
from holdfast._diagnose.verdict import Verdict
from holdfast._environment.processes.activity import Activity, activity_of
from holdfast._environment.slurm.controller import can_ask
from holdfast._errors import HoldfastError, NotARun, SettingsError
from holdfast._report.status.ask import ask_look, look_at_process
from holdfast._report.status.gather import RunFinder, is_run, only_run
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.supervised import led_record, lives, supervisions
from holdfast._tools.cli.group import AS_JSON, print_json
from holdfast._tools.cli.show import Screen

_SURE = {
    "certain": "certain",
    "likely": "likely, not certain",
    "by-exclusion": "by exclusion: every other known cause was ruled out",
    "unknown": "not known",
}
_LIVE = ("debugger", "stopped", "frozen", "slow", "running")
_STYLES = {
    **dict.fromkeys(_LIVE, "yellow"),
    **{"finished": "bold green", "running": "green", "asked": "yellow", "unknown": "yellow"},
}
_LOOK_SECONDS = 10.0  # for a keeper that may be busy saving; without an answer the records do
_MOST_FILES = 8
_SCRIPTS = (".py", ".ipynb")
_MOST_CHARACTERS = 100
_STILL_SECONDS = 3.0  # in which a process that works does something


@click.command()
@click.argument("what", metavar="[WHAT]", required=False)
@click.option("--attempt", metavar="N", type=click.IntRange(min=1), help="Of a run: its attempt N.")
@click.option("--all", "wants_all", is_flag=True, help="Of a run or a command: all attempts.")
@click.option("--pid", "is_pid", is_flag=True, help="WHAT is the number of a process.")
@click.option("--job", "is_job", is_flag=True, help="WHAT is the number of a job of SLURM.")
@AS_JSON
def why(
    what: str | None,
    attempt: int | None,
    wants_all: bool,
    is_pid: bool,
    is_job: bool,
    as_json: bool,
) -> None:
    """Say why a training ended: one verdict, how sure it is, the evidence, and what to do.

    Of a training that still runs, it says whether it advances, is slow, is held in a debugger or
    hangs, and on which line.

    WHAT is a run folder, also one that was copied from another machine; a record of `holdfast run`;
    a log file; the number of a process or of a SLURM job. Without it: what ended last, of the runs
    below the current folder and of all that `holdfast run` has led on this machine.

    It only reads. The exit status is 0, also if the cause is not known, and 2 if WHAT is none of
    these.

    \b
    Example:
      holdfast why runs/a
      holdfast why slurm-4711.out
      holdfast why 4711
    """
    try:
        found = _find(what, attempt, wants_all, is_pid, is_job)
    except OSError as error:
        said = error.strerror or error
        raise SettingsError(f"{what}: cannot be read ({said}).\n{_KINDS}") from error
    for evidence in found:
        if evidence.is_live:
            _look_at(evidence)
    verdicts = [(each, judge(each)) for each in found]
    if as_json:
        trees = [_tree(*each) for each in verdicts]
        print_json(trees if wants_all else trees[0])
        return
    screen = Screen()
    for number, (evidence, verdict) in enumerate(verdicts):
        if number:
            screen.write()
        _show(screen, evidence, verdict)


def _look_at(evidence: Evidence) -> None:
    """See what its processes do just now, where that can be had in a moment."""
    # The process that was named, or a command that `holdfast run` leads.
    pid = (evidence.process or {}).get("pid") or (evidence.led or {}).get("child_pid")
    try:
        if evidence.kind == "run":
            evidence.look = ask_look(Path(evidence.subject), _LOOK_SECONDS) or {}
        elif isinstance(pid, int):
            evidence.look = _look_at_pid(pid)
    except (HoldfastError, OSError):
        return  # it has ended meanwhile, or its folder does not answer: the records tell the rest


def _look_at_pid(pid: int) -> dict[str, Any]:
    """One look; if nothing happened, a second look later: there is no step counter."""
    first = look_at_process(pid)
    if not first:
        return {}
    if not _all_rest(first):
        return {"looks": first, "missing": []}
    time.sleep(_STILL_SECONDS)
    last = look_at_process(pid)
    still = {"still_seconds": _STILL_SECONDS} if last and _all_rest(last) else {}
    return {"looks": last or first, "missing": [], **still}


def _all_rest(looks: list[dict[str, Any]]) -> bool:
    return all(activity_of(look) in (Activity.IDLE, Activity.DISK) for look in looks)


def _find(
    what: str | None, attempt: int | None, wants_all: bool, is_pid: bool, is_job: bool
) -> list[Evidence]:
    if is_pid and is_job:
        raise SettingsError(
            "--pid and --job are two things.\nChoose one of them: holdfast why --pid 4711"
        )
    if (is_pid or is_job) and not what:
        raise SettingsError("There is no number.\nName it: holdfast why --pid 4711")
    if what is None:
        return _of_newest(attempt, wants_all)
    path = Path(what)
    if not is_pid and not is_job and path.exists():
        return _of_path(path, attempt, wants_all)
    if attempt is not None:
        raise SettingsError(f"--attempt is for run folders, and {what} is not one.\n{_KINDS}")
    return [_of_number(what, is_pid, is_job)]


_KINDS = "Name a run folder, a log file, a process or a job: holdfast why --help"


def _of_newest(attempt: int | None, wants_all: bool) -> list[Evidence]:
    """What ended last: of the runs here, and of all that `holdfast run` has led."""
    places: list[tuple[float, Path]] = []
    for run in RunFinder(Path()).find()[0]:
        layout = RunLayout(run)
        numbers = layout.attempt_numbers()
        if numbers:
            of_attempt = [layout.exit(numbers[-1]), layout.heartbeat(numbers[-1])]
            places.append((max(map(_written, [*of_attempt, layout.lease(numbers[-1])])), run))
    for supervision in reversed(supervisions() if attempt is None else []):
        if found := lives(supervision):
            places.append((_written(led_record(found[-1])), supervision))
            break
    if not places:
        raise NotARun(f"There is no run here, and no record of `holdfast run`.\n{_KINDS}")
    return _of_path(max(places)[1], attempt, wants_all)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _of_path(path: Path, attempt: int | None, wants_all: bool) -> list[Evidence]:
    if path.is_dir() and is_run(path):
        return _of_run(path, attempt, wants_all)
    run = path.absolute().parent.parent
    if path.is_dir() and path.absolute().name.isdigit() and is_run(run):
        return _of_run(run, int(path.absolute().name), False)
    if attempt is not None:
        raise NotARun(f"{path}: there is no run here.\n--attempt is for run folders. {_KINDS}")
    if not path.is_dir():
        if not path.is_fifo():  # opening it would tell its writer that there is no reader
            path.open("rb").close()
        if path.suffix in _SCRIPTS:
            raise SettingsError(
                f"{path} is a script, which has no record of how it ended.\n"
                "Name its log or its run folder, or start it with: "
                f"holdfast run -- python {path}"
            )
        return [gather_log(path)]
    if led_record(path).exists():
        return [gather_led(path)]
    if found := lives(path):
        return [gather_led(life) for life in (found if wants_all else found[-1:])]
    return _of_run(only_run(path), None, wants_all)


def _of_run(path: Path, attempt: int | None, wants_all: bool) -> list[Evidence]:
    numbers = RunLayout(path).attempt_numbers()
    if attempt is not None and attempt not in numbers:
        there = f"It has {numbers[0]} to {numbers[-1]}." if numbers else "It has none yet."
        raise SettingsError(f"{path}: there is no attempt {attempt}.\n{there}")
    if wants_all and attempt is None and numbers:
        return gather_lives(path)
    return [gather_run(path, attempt)]


def _of_number(what: str, is_pid: bool, is_job: bool) -> Evidence:
    is_number = what.isascii() and what.isdigit() and len(what) < 10
    if is_pid and not is_number:
        raise SettingsError(
            f"{what}: this is not the number of a process.\nName one: holdfast why --pid 4711"
        )
    if not JOB.fullmatch(what):
        raise SettingsError(f"{what}: there is no such file or folder.\n{_KINDS}")
    if is_job or not is_number:
        return gather_slurm(what)
    found = gather_pid(int(what))
    is_known = found.is_live or found.led or found.signs or found.process
    if is_pid or not can_ask():
        return found
    job = gather_slurm(what)
    if job.job and is_known:
        raise SettingsError(
            f"{what} is a process here and a job of SLURM.\n"
            f"Say which: holdfast why --pid {what}, or holdfast why --job {what}"
        )
    return job if job.job else found


def _tree(evidence: Evidence, verdict: Verdict) -> dict[str, Any]:
    return {
        "subject": evidence.subject,
        "kind": evidence.kind,
        "attempt": evidence.attempt,
        **verdict.to_json(),
        "files": [str(path) for path in evidence.files],
    }


def _show(screen: Screen, evidence: Evidence, verdict: Verdict) -> None:
    subject = _text.name(evidence.subject)
    if evidence.kind == "led":
        subject = _command(evidence) or subject
    if evidence.attempt is not None and evidence.kind == "run":
        subject += f", attempt {evidence.attempt}"
    cause = verdict.cause.value
    screen.write(Text.assemble((subject, "bold"), ": ", (cause, _STYLES.get(cause, "bold red"))))
    screen.write(_text.name(verdict.sentence))
    screen.write(Text.assemble(("How sure: ", "bold"), _SURE[verdict.sure.value]))
    _section(screen, "Evidence", verdict.evidence, numbered=True)
    is_death = not cause.startswith("hang-") and cause not in _LIVE
    others = "What the others then saw" if is_death else "Where the others stand"
    _section(screen, others, verdict.others)
    _section(screen, "What to do", verdict.advice)
    files = [_text.name(path) for path in evidence.files]
    if len(files) > _MOST_FILES:
        files = [*files[:_MOST_FILES], f"and {len(files) - _MOST_FILES} more"]
    _section(screen, "Records", files)


def _command(evidence: Evidence) -> str:
    """What `holdfast run` was given, and which life of it this was."""
    led = evidence.led or {}
    command, life = led.get("command"), led.get("life")
    if not isinstance(command, list) or not command:
        return ""
    shown = " ".join(_text.name(str(word)) for word in command)
    shown = _text.cut(shown, _MOST_CHARACTERS)
    return f"{shown} (attempt {life})" if isinstance(life, int) and life > 1 else shown


def _section(screen: Screen, title: str, lines: Sequence[str], *, numbered: bool = False) -> None:
    if not lines:
        return
    screen.write(f"{title}:", style="bold")
    signs = [f"  {number}." if numbered else "  -" for number in range(1, len(lines) + 1)]
    rows = zip((Text(sign, style="dim") for sign in signs), map(_text.name, lines), strict=True)
    screen.grid((">=", ""), rows, gap=1)
