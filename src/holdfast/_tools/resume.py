"""`holdfast resume`: starts a run again by the record of how it was started.

A wrong start is worse than none: it would train another folder, or with another environment. So
everything that is not as recorded is an error or a note, and nothing is guessed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast import _text
from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name
from holdfast._environment.secrets import LEFT_OUT
from holdfast._environment.slurm import controller
from holdfast._environment.started import environment_again
from holdfast._errors import FolderError
from holdfast._report.status.gather import summarize
from holdfast._store.folder import attempts
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.plain_file import open_plain, read_plain
from holdfast._tools.submit import call_sbatch

_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT", "REVOKED"),
)
_GIVEN = "the given command"  # in place of a launcher
_COMPLETING_SECONDS = 30.0
_OPEN_SECONDS = 120.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Resumption:
    layout: RunLayout
    attempt: int  # whose record it follows
    launcher: str
    command: list[str]
    cwd: Path
    environment: dict[str, str]
    script: str | None = None  # of a batch job, where it is not a file
    notes: list[str] = field(default_factory=list)


def plan_resumption(folder: Path, given: Sequence[str] = ()) -> Resumption:
    """How the run is started again; FolderError if it must not be, or cannot be.

    `given` is a command that takes the place of the recorded one.
    """
    layout, _ = attempts.find_run(folder)
    _refuse_if_live_or_finished(folder)
    attempt, record = _newest_record(layout, folder)
    started = _text.record(record.get("start"))
    # Another user could have written the command that would run as this user.
    if hasattr(os, "geteuid") and layout.start(attempt).lstat().st_uid != os.geteuid():
        return _by_given_command(layout, attempt, folder, given)
    _refuse_another_folder(layout, folder, record)
    _refuse_if_launched(folder, started)
    batch, job = _text.record(record.get("batch")), _text.text(record.get("job"))
    _refuse_if_queued(folder, job)
    is_batch = bool(batch) and not given
    now, recorded = variables.whole(), _texts(record.get("environment"))
    hidden = _words(record.get("left_out"))
    is_in_job = "SLURM_JOB_ID" in now and bool(job) and not is_batch
    environment = environment_again(
        recorded, now, hidden, was_in_job=bool(job), is_in_job=is_in_job
    )
    notes = _notes(record, hidden, now)
    place, script = Path(_text.text(started.get("cwd"))), None
    if is_batch:
        launcher, place = "sbatch", Path(_text.text(batch.get("folder")))
        command, script = _submission(folder, batch)
    elif given:
        launcher, command = _GIVEN, list(given)
        environment["PATH"] = os.pathsep.join(filter(None, [recorded.get("PATH"), now.get("PATH")]))
    else:
        _refuse_what_no_command_starts(layout, attempt, record, folder, now)
        launcher, command = _text.text(record.get("launcher")), _recorded_command(started, folder)
    found = Resumption(layout, attempt, launcher, command, place, environment, script, notes)
    _refuse_missing(found, folder)
    return found


def _by_given_command(
    layout: RunLayout, attempt: int, folder: Path, given: Sequence[str]
) -> Resumption:
    """Nothing of another user's record is used: neither its command nor its variables."""
    if not given:
        raise FolderError(
            f"{folder}: another user has started it, and its recorded command would run as you.\n"
            f"Give the command: {_text.command('resume', folder)} -- python train.py"
        )
    found = Resumption(layout, attempt, _GIVEN, list(given), Path.cwd(), variables.whole())
    _refuse_missing(found, folder)
    return found


def _texts(value: object) -> dict[str, str]:
    found = _text.record(value).items()
    return {n: each for n, each in found if isinstance(each, str) and n and "=" not in n}


def _words(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _can_be_passed(value: object) -> bool:
    """False for a NUL or half a character anywhere: no process can be given that."""
    if isinstance(value, str):
        try:
            return b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:
            return False
    if isinstance(value, dict):
        return all(_can_be_passed(each) for pair in value.items() for each in pair)
    return not isinstance(value, list) or all(map(_can_be_passed, value))


def _refuse_if_live_or_finished(folder: Path) -> None:
    found = summarize(folder)
    if found.is_live:
        raise FolderError(
            f"{folder}: is live: pid {found.process.pid} on {found.process.host} trains it.\n"
            f"To look: {_text.command('status', folder)}\n"
            f"To stop it: {_text.command('stop', folder)}"
        )
    if found.state == "finished":
        raise FolderError(
            f"{folder}: has finished, at step {found.step}. Nothing is left to train.\n"
            "To train further, start the script with a larger total."
        )


def _newest_record(layout: RunLayout, folder: Path) -> tuple[int, dict[str, Any]]:
    """The newest attempt that began to train and has a record; else the newest with one."""
    found: tuple[int, dict[str, Any]] | None = None
    for number in reversed(layout.attempt_numbers()):
        record = attempts.read_json(layout.start(number))
        used = [record.get(key) for key in ("start", "batch", "environment", "folder", "job")]
        if not _text.record(used[0]) or not _can_be_passed(used):
            continue
        found = found or (number, record)
        how = str(attempts.read_json(layout.exit(number)).get("how", ""))
        if not how.startswith("could not start"):
            return number, record
    if found is None:
        raise FolderError(
            f"{folder}: there is no record of how it was started, or it is damaged.\n"
            "Start the script itself, as before: it goes on from its last state."
        )
    return found


def _refuse_another_folder(layout: RunLayout, folder: Path, record: dict[str, Any]) -> None:
    then = _text.text(record.get("folder"))
    with contextlib.suppress(OSError):
        if Path(then).samefile(layout.folder):
            return
    raise FolderError(
        f"{folder}: was started as {_text.name(then)}, and its command would train there.\n"
        "The folder was moved or copied. Start the script with this folder."
    )


def _refuse_if_launched(folder: Path, started: dict[str, Any]) -> None:
    """A launcher that lives may start the run again by itself."""
    process = attempts.identity_in(started.get("process"))
    if process is not None and process.is_here() and process.is_alive():
        raise FolderError(
            f"{folder}: the process that started it still runs (pid {process.pid}), and may start "
            f"it again by itself.\nTo look: {_text.command('status', folder)}. To end it: kill "
            f"{process.pid}"
        )


def _refuse_if_queued(folder: Path, job: str) -> None:
    """The same for its job: SLURM starts a requeued one by itself."""
    if not job or not controller.can_ask():
        return
    deadline = time.monotonic() + _COMPLETING_SECONDS
    while (facts := controller.show_job(job)) is not None and facts.state not in _ENDED:
        if facts.state != "COMPLETING" or time.monotonic() > deadline:
            raise FolderError(
                f"{folder}: job {job} is {facts.state.lower()}, and may start it again by itself.\n"
                f"To look: squeue -j {job}. To end it: scancel {job}"
            )
        time.sleep(0.5)


def _refuse_what_no_command_starts(
    layout: RunLayout, attempt: int, record: dict[str, Any], folder: Path, now: dict[str, str]
) -> None:
    launcher, job = _text.text(record.get("launcher")), _text.text(record.get("job"))
    process = attempts.identity_in(_text.record(record.get("start")).get("process"))
    holder = attempts.lease_holder(layout, attempt)
    ranks = _text.whole(record.get("ranks")) or 1
    is_by_hand = launcher == "python" and process == holder and ranks > 1
    how = ""
    if launcher == "interactive":
        how = "It was started from a notebook or a prompt. Run its cells again."
    elif launcher == "ray":
        how = "A worker of Ray trained it. Start the script that calls Ray again."
    elif job and ranks > 1 and launcher in ("python", "holdfast run"):
        how = f"srun started its {ranks} ranks, outside of a batch job. Start srun again."
    elif is_by_hand:
        how = f"Its {ranks} ranks were started one by one. Start each of them again."
    elif job and "SLURM_JOB_ID" not in now:
        how = (
            f"It ran in job {job}, whose script is not recorded. Submit it again, or call "
            f"{_text.command('resume', folder)} within an allocation."
        )
    elif not job and "SLURM_PROCID" in _texts(record.get("environment")):
        how = "It was a task of SLURM. Submit it again."
    if how:
        raise FolderError(f"{folder}: one command cannot start it again.\n{how}")


def _recorded_command(started: dict[str, Any], folder: Path) -> list[str]:
    command, left_out = _words(started.get("command")), _words(started.get("left_out"))
    if left_out:
        shown = shlex.join(word.replace(LEFT_OUT, "VALUE") for word in command)
        values = "a secret, which is" if len(left_out) == 1 else "secrets, which are"
        raise FolderError(
            f"{folder}: its command has {values} not recorded: {', '.join(left_out)}.\n"
            f"Give the whole command: {_text.command('resume', folder)} -- {shown}"
        )
    if len(command) < 2 or command[1] == "-":
        raise FolderError(
            f"{folder}: its script was read from standard input, and is not recorded.\n"
            f"Give the whole command: {_text.command('resume', folder)} -- python train.py"
        )
    return command


def _submission(folder: Path, batch: dict[str, Any]) -> tuple[list[str], str | None]:
    """The command that submits the job again, and the script if no file has it."""
    options, arguments = _words(batch.get("options")), _words(batch.get("arguments"))
    path, text = _text.text(batch.get("path")), batch.get("script")
    with contextlib.suppress(OSError, ValueError):
        # It may be a link, but no FIFO: the record may name anything.
        script = read_plain(Path(os.path.realpath(path))).decode() if path else ""
        is_same = path and controller.digest_of(script) == batch.get("digest")
        if is_same and not any(LEFT_OUT in each for each in arguments):
            return ["sbatch", "--parsable", *options, path, *arguments], None
    if batch.get("has_left_out") or not isinstance(text, str):
        what = "a secret in it" if batch.get("has_left_out") else "too long a text"
        raise FolderError(
            f"{folder}: its batch script is not recorded, since there is {what}.\n"
            f"Submit it again: sbatch {shlex.quote(path) if path else 'THE-SCRIPT'}"
        )
    words = ["/dev/stdin", *arguments] if arguments else []
    return ["sbatch", "--parsable", *options, *words], text


def _notes(record: dict[str, Any], hidden: Sequence[str], now: dict[str, str]) -> list[str]:
    found, is_batch = [], bool(record.get("batch"))
    host = _text.text(record.get("host"))
    if host and host != host_name() and not is_batch:
        found.append(f"it ran on {_text.name(host)}, and this is {host_name()}.")
    missing = [name for name in hidden if name not in now]
    if missing:
        verb = "was" if len(missing) == 1 else "were"
        found.append(
            f"{_text.name(', '.join(missing[:8]))} {verb} set then, and not recorded, as a secret. "
            "Set it first if the script needs it."
        )
    environment = _texts(record.get("environment"))
    local, world = environment.get("LOCAL_WORLD_SIZE"), environment.get("WORLD_SIZE")
    has_nodes = record.get("launcher") in ("torchrun", "accelerate") and local != world
    if has_nodes and not is_batch:
        found.append("it had several nodes: start it on each of the others too.")
    tasks = environment.get("SLURM_ARRAY_TASK_COUNT", "1")
    if is_batch and tasks != "1":
        found.append(
            f"it was one of the {tasks} tasks of an array, and is submitted alone, with the same "
            "SLURM_ARRAY_TASK_ID. SLURM_ARRAY_TASK_COUNT is 1 then."
        )
    return found


def _refuse_missing(found: Resumption, folder: Path) -> None:
    """The folder, the program and the script must be there."""
    is_given = found.launcher == _GIVEN
    program = found.command[0]
    there = shutil.which(program, path=found.environment.get("PATH")) is not None
    if "/" in program:
        there = (found.cwd / program).is_file()
    # The first word that is no option, or the option for a module.
    words = (word for word in found.command[1:] if word == "-m" or not word.startswith("-"))
    script = found.cwd / next(words, "")
    first, missing = "", ""
    if not found.cwd.is_dir():
        missing = f"the folder that it was started in is gone: {_text.name(found.cwd)}"
    elif not there and is_given:
        missing = f"there is no such program: {_text.name(program)}"
    elif not there:
        what = "its interpreter is gone" if "python" in program else "there is no such program here"
        missing, first = f"{what}: {_text.name(program)}", "Make its virtual environment again. "
    elif script.suffix == ".py" and not script.exists():
        what = "there is no such script" if is_given else "its script is gone"
        missing = f"{what}: {_text.name(script)}"
    if missing:
        other = f"{first}{'Give another' if is_given else 'Or give a'} command"
        again = f"{_text.command('resume', folder)} -- python train.py"
        raise FolderError(f"{folder}: {missing}\n{other}: {again}")


def replace_this_process(found: Resumption) -> None:
    """Become the command: it gets our terminal, our signals and our exit status."""
    os.chdir(found.cwd)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(found.command[0], found.command, found.environment)


@dataclass(frozen=True)
class Detached:
    pid: int
    status: int | None  # with which it has ended already
    attempt: int | None  # that it has opened


def start_detached(found: Resumption) -> Detached:
    """Start it in a session of its own, and wait until it has opened the run or has ended."""
    before = found.layout.attempt_numbers()[-1]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    log = open_plain(found.layout.resume_log, flags, 0o600)
    try:
        process = subprocess.Popen(
            found.command,
            cwd=found.cwd,
            env=found.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
    deadline = time.monotonic() + _OPEN_SECONDS
    while time.monotonic() < deadline:
        newest = found.layout.attempt_numbers()[-1]
        if newest > before and attempts.is_live_here(found.layout, newest) is not False:
            return Detached(process.pid, None, newest)
        if process.poll() is not None:
            return Detached(process.pid, process.returncode, newest if newest > before else None)
        time.sleep(_POLL_SECONDS)
    return Detached(process.pid, None, None)


def submit_again(found: Resumption) -> str:
    options = {"cwd": found.cwd, "env": found.environment, "stderr": subprocess.PIPE}
    remedy = "Resume it on a machine of the cluster."
    done = call_sbatch(found.command, found.script, remedy, **options)
    if done.returncode != 0:
        what = f"{found.layout.folder}: sbatch has refused the job."
        raise FolderError(f"{what}\n{done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
