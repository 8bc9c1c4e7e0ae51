"""The evidence of a run folder, a record of `holdfast run`, a log, a process or a job of SLURM.

A folder is only read, and may have been copied from another machine. So processes are looked up
only if they ran on this machine, and a new heartbeat is awaited only after a recent one.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast import _text
from holdfast._diagnose.evidence.evidence import LIVE_STATES, Evidence, RankEvidence, Record
from holdfast._diagnose.texts.log_file import read_log
from holdfast._diagnose.texts.sign import Sign
from holdfast._diagnose.texts.signs import read_signs
from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name, of_process
from holdfast._environment.processes.memory_sample import mounted_rooms, room
from holdfast._environment.processes.proc import FairDeadline
from holdfast._environment.processes.tree import keepers_of
from holdfast._environment.slurm.controller import can_ask, describe_job
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import is_live, keeper_of, lease_holder, read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.plain_file import read_end
from holdfast._store.folder.supervised import (
    led_output,
    led_outputs,
    led_record,
    lives,
    supervisions,
)

_OUTPUT_BYTES = 1 << 20  # of the end of a log
_STACKS_BYTES = 1 << 16
_MOST_EVENTS = 5000
_SKEW_SECONDS = 60.0  # by which a clock may have been adjusted since
_OLD_SECONDS = 600.0  # of a heartbeat: clocks differ by less
_WATCH_SECONDS = 5.0  # beats come every other second
_RECORD_BYTES = 16 << 10  # that the records of an end take
_KEEPER_SECONDS = 3.0  # for a keeper that is still writing its records
_OF_A_RANK = re.compile(r"(?:(?:error|death|led|stacks|output)-)?(\d{5,9})\.(?:json|txt|log)")
_TELLING = re.compile(
    r"(?:error|death|led|exit|hang|stacks|output|trouble)(?:-\d+)?\.(?:json|txt|log)"
)
_MOST_RANKS = 100_000


def gather_lives(folder: Path) -> list[Evidence]:
    """The evidence of each attempt, oldest first; a long journal is read once."""
    layout = RunLayout(folder)
    numbers = layout.attempt_numbers()
    journal_of = _events(layout, set(numbers))
    return [gather_run(folder, number, journal_of[number]) for number in numbers]


def gather_run(
    folder: Path,
    attempt: int | None = None,
    events: list[Record] | None = None,
    *,
    waits: bool = True,
) -> Evidence:
    """What a run folder knows of an attempt; the newest if none is named.

    `events` are those of its journal, where they are known already. `waits`: for a keeper that
    still writes its records.
    """
    layout = RunLayout(folder)  # as it was named: the paths of its records are shown
    numbers: list[int] = []
    with contextlib.suppress(OSError):
        numbers = layout.attempt_numbers()
    newest = numbers[-1] if numbers else 0
    number = newest if attempt is None else attempt
    found = Evidence(subject=str(folder), kind="run", attempt=number or None)
    if number not in numbers:
        found.notes.append("there is no attempt yet" if not numbers else f"no attempt {number}")
        return found
    found.run.newest = newest
    _look_where(layout, number, found)
    if number == newest:
        found.is_live = _is_live(layout, number)
        if waits and not found.is_live:
            _await_keeper(layout, number)
    found.lease = read_json(layout.lease(number))
    found.beat = read_json(layout.heartbeat(number))
    found.exit = read_json(layout.exit(number))
    found.run.requeue = read_json(layout.requeue(number))
    found.led = read_json(layout.led(number)) or None
    found.hang = read_json(layout.hang(number))
    found.journal = _events(layout, {number})[number] if events is None else events
    found.run.durable_step = _durable_step(layout, number)
    beats = found.beat.get("ranks")
    beats = beats if isinstance(beats, list) else []
    numbers = _rank_numbers(layout, number, len(beats))
    found.ranks = [_rank(layout, number, rank, beats) for rank in numbers]
    if any(rank.led for rank in found.ranks):  # each rank has a leader of its own
        found.ranks[0].led = found.led or {}
    planned = [_text.whole(rank.error.get("ranks")) or 0 for rank in found.ranks]
    found.run.ranks_planned = min(max([len(found.ranks), *planned]), _MOST_RANKS)
    _read_texts(layout, number, found)
    with contextlib.suppress(OSError):
        files = layout.attempt(number).iterdir()
        found.files = sorted(path for path in files if _TELLING.fullmatch(path.name))
    if hidden := [path.name for path in found.files if not os.access(path, os.R_OK)]:
        names = ", ".join(hidden[:8])
        found.notes.append(f"you may not read {names}: ask as the user that started it")
    return found


def gather_led(life_folder: Path) -> Evidence:
    """What `holdfast run` saw of one life of a command, and the run that it opened."""
    led = read_json(life_folder / "led.json")
    opened = read_json(life_folder / "run.json") or _text.record(led.get("run"))
    folder, attempt = _text.text(opened.get("folder")), _text.whole(opened.get("attempt"))
    found = Evidence(kind="led", subject=str(life_folder))
    if folder and attempt and RunLayout(Path(folder)).attempt(attempt).is_dir():
        found = gather_run(Path(folder), attempt)
    found.led = led or found.led
    found.is_live = bool(led) and led.get("ended") is None and _is_leader_alive(led)
    found.hang = found.hang or read_json(life_folder / "hang.json")
    text = _tail(life_folder / "output.log", _OUTPUT_BYTES)
    if text and not found.output:
        found.output = text
        found.signs += read_signs(text)
    if _text.record(found.led).get("host") == host_name():
        look_for_full_disks(found)
    names = ("led.json", "output.log", "hang.json")
    own = [path for name in names if (path := life_folder / name).exists()]
    found.files = [*own, *found.files]
    return found


def look_for_full_disks(found: Evidence) -> None:
    """Where its output tells of a full disk: an error seldom names it."""
    if any(sign.kind in ("disk_full", "torch_save_short") for sign in found.signs):
        found.disks = mounted_rooms()


def _look_where(layout: RunLayout, attempt: int, found: Evidence) -> None:
    """Whether it ran on this machine, whether that has restarted since, and has room on disk."""
    space = room(layout.folder)
    if space is not None and space["total"]:
        found.run.is_disk_full = space["free"] < _RECORD_BYTES
    holder, boot = lease_holder(layout, attempt), of_process().boot
    if holder is None or not holder.boot or not boot:
        return
    found.run.is_here = holder.boot == boot  # in another container its processes are not seen
    beat, booted = _text.real(read_json(layout.heartbeat(attempt)).get("time")), _booted_at()
    # Else it was another machine of the same name.
    is_before = beat is None or booted is None or beat < booted + _SKEW_SECONDS
    is_same = holder.host == host_name() and holder.boot != boot
    found.run.has_rebooted = is_same and is_before


def _is_live(layout: RunLayout, attempt: int) -> bool:
    """Whether it still trains; on another machine, by its heartbeat."""
    holder = lease_holder(layout, attempt)
    if holder is None or layout.exit(attempt).exists():
        return False
    if holder.is_here():
        return holder.is_alive()
    moment = _text.real(read_json(layout.heartbeat(attempt)).get("time"))
    is_recent = moment is not None and abs(time.time() - moment) <= _OLD_SECONDS
    return is_recent and is_live(layout, attempt, _WATCH_SECONDS)


def _await_keeper(layout: RunLayout, attempt: int) -> None:
    """Wait for a live keeper: it is about to write its records."""
    keeper = keeper_of(layout, attempt)
    if keeper is None:
        starting = keepers_of(os.path.realpath(layout.folder), attempt)
        keeper = of_process(starting[0]) if starting else None
    if keeper is None or not keeper.is_here():
        return
    deadline, ended = FairDeadline(_KEEPER_SECONDS, lambda: [keeper.pid]), layout.exit(attempt)
    while not deadline.is_over() and keeper.is_alive() and not ended.exists():
        time.sleep(0.02)


def _is_leader_alive(led: Record) -> bool:
    pid = _text.whole(led.get("leader_pid"))
    if pid is None or _text.text(led.get("host")) != host_name():
        return False
    started = of_process(pid).started
    began, booted = _text.real(led.get("began")), _booted_at()
    if not started.isdigit() or began is None or booted is None:
        return bool(started)
    # A pid is used again: the leader's process began before its record.
    return booted + int(started) / os.sysconf("SC_CLK_TCK") < began + _SKEW_SECONDS


def _booted_at() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    return None


def _events(layout: RunLayout, attempts: set[int]) -> dict[int, list[Record]]:
    """The events of these attempts in the journal."""
    found: dict[int, list[tuple[int, Record]]] = {attempt: [] for attempt in attempts}
    untold: list[tuple[int, bytes]] = []  # events without an attempt belong to the next start

    def add(number: int, event: Record | None, started: object = None) -> None:
        of = None if event is None else event.get("attempt", started)
        if event is not None and isinstance(of, int) and len(found.get(of, ())) < _MOST_EVENTS:
            found.get(of, []).append((number, event))

    # Newest first, and parsed only where needed: a journal may have hundreds of thousands of lines.
    with contextlib.suppress(OSError):
        for number, line in enumerate(journal.read_back(layout.journal)):
            event = journal.parse(line) if b'"start"' in line else None
            if event is not None and event.get("event") == "start":
                for earlier, text in untold:
                    add(earlier, journal.parse(text), event.get("attempt"))
                untold.clear()
                add(number, event)
            elif b'"attempt"' not in line:
                untold.append((number, line))
            elif any(len(events) < _MOST_EVENTS for events in found.values()):
                event = journal.parse(line)
                if event is not None and "attempt" not in event:  # it is deeper in the line
                    untold.append((number, line))
                add(number, event)
            elif not untold:
                break
    return {
        attempt: [event for _, event in sorted(events, key=lambda pair: -pair[0])]
        for attempt, events in found.items()
    }


def _durable_step(layout: RunLayout, attempt: int) -> int | None:
    """The step that a next attempt would continue from, by the folder alone."""
    known: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        known = [(of, step) for step, of, _ in layout.checkpoint_folders() if of <= attempt]
    steps = [step for of, step in known if of == attempt]
    if steps:
        return max(steps)
    if layout.origin(attempt).exists():
        return _text.whole(read_json(layout.origin(attempt)).get("step"))
    return max(known)[1] if known else None  # it had not found its step yet


def _rank_numbers(layout: RunLayout, attempt: int, told: int) -> list[int]:
    """Every rank that has a file; 0 for a run of one process."""
    found = {0, *range(told)}
    for folder in (layout.attempt(attempt), layout.ranks(attempt)):
        with contextlib.suppress(OSError):
            names = (_OF_A_RANK.fullmatch(path.name) for path in folder.iterdir())
            found |= {int(name[1]) for name in names if name is not None}
    return sorted(rank for rank in found if rank < _MOST_RANKS)


def _rank(layout: RunLayout, attempt: int, rank: int, beats: list[object]) -> RankEvidence:
    beat = _text.record(beats[rank]) if rank < len(beats) else {}
    beat = beat if beats else read_json(layout.heartbeat(attempt))
    process = read_json(layout.rank(attempt, rank))
    holder = _text.record(process.get("process")) or _text.record(process.get("trainer"))
    if rank == 0 and not holder:
        holder = _text.record(read_json(layout.lease(attempt)).get("process"))
    return RankEvidence(
        rank=rank,
        host=_text.text(beat.get("host")) or _text.text(holder.get("host")) or None,
        pid=_text.whole(beat.get("pid")) or _text.whole(holder.get("pid")),
        error=read_json(layout.error(attempt, rank)),
        death=read_json(layout.death(attempt, rank)),
        exit=read_json(layout.exit(attempt)) if rank == 0 else {},
        process=process,
        led=read_json(layout.led(attempt, rank)) if rank else {},
        stacks=_tail(layout.stacks(attempt, rank), _STACKS_BYTES),
        step=_text.whole(beat.get("step")),
        durable_step=_text.whole(beat.get("durable_step")),
    )


def _read_texts(layout: RunLayout, attempt: int, found: Evidence) -> None:
    """The printed lines. With several leaders, each has printed for its own rank."""
    is_one = not any(rank.led for rank in found.ranks)
    for rank in found.ranks:
        text = _tail(layout.output(attempt, rank.rank), _OUTPUT_BYTES)
        if found.is_live and rank.rank == 0:  # its leader copies the output when the command ends
            printed = (_tail(path, _OUTPUT_BYTES) for path in led_outputs(layout.folder, attempt))
            text = text or next(printed, "")
        if rank.rank == 0:
            found.output = text
        of_one, of_many = (None if is_one else rank.rank), rank.rank if found.ranks[1:] else None
        signs = [(sign, of_one) for sign in read_signs(text)]
        dumps = [(sign, of_many) for sign in read_signs(rank.stacks) if sign.kind == "faulthandler"]
        for sign, of in (*signs, *dumps):
            found.signs.append(sign if sign.rank is not None else replace(sign, rank=of))


def _tail(path: Path, size_bytes: int) -> str:
    return read_end(path, size_bytes).decode("utf-8", errors="replace")


# -- A log -----------------------------------------------------------------------------------------

_NEAR_THE_END = 60  # lines; torchrun's summary is that long with a few ranks


def gather_log(path: Path) -> Evidence:
    evidence = Evidence(subject=str(path), kind="log", files=[path])
    try:
        signs, tail = read_log(path)
    except OSError as error:
        evidence.notes.append(f"{path} cannot be read: {error.strerror or error}.")
        return evidence
    evidence.signs, evidence.output = signs, tail
    look_for_full_disks(evidence)
    if not tail.strip():
        evidence.notes.append(f"{path} is empty: nothing was written to it.")
    ends = [s for s in signs if s.kind != "holdfast_start" and not s.details.get("is_past")]
    is_told = any(sign.from_end < _NEAR_THE_END for sign in ends)
    writers = _writers(path)
    for pid, comm in writers[:4]:
        evidence.notes.append(f"Process {pid} ({comm}) still has this file open for writing.")
    # A shell or `tee` may outlive its command: if the log tells of an end, it ended.
    evidence.is_live = bool(writers) and not is_told
    return evidence


def _writers(path: Path) -> list[tuple[int, str]]:
    """The processes that have a file open for writing, as far as /proc shows them."""
    found: list[tuple[int, str]] = []
    try:
        wanted = path.stat()
        names = os.listdir("/proc") if sys.platform == "linux" else []  # noqa: PTH208  quicker
    except OSError:
        return found
    for name in names:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError, ValueError):
            for number in os.listdir(f"/proc/{name}/fd"):  # noqa: PTH208  quicker than a Path
                opened = os.stat(f"/proc/{name}/fd/{number}")  # noqa: PTH116  quicker than pathlib
                if (opened.st_dev, opened.st_ino) != (wanted.st_dev, wanted.st_ino):
                    continue
                flags = Path(f"/proc/{name}/fdinfo/{number}").read_text().partition("flags:")[2]
                if int(flags.split()[0], 8) & (os.O_WRONLY | os.O_RDWR):
                    comm = Path(f"/proc/{name}/comm").read_text(errors="replace").strip()
                    found.append((int(name), comm))
                    break
    return found


# -- A process by its pid: alive, or dead and recorded somewhere -----------------------------------

_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting in the kernel, for a disk or a network",
    "T": "stopped (kill -CONT goes on with it)",
    "t": "stopped by a debugger",
    "Z": "ended, and not yet awaited by its parent",
    "I": "idle",
}
_KERNEL_SECONDS = 3.0


def gather_pid(pid: int) -> Evidence:
    """The evidence of a process that runs or has run on this machine."""
    evidence = Evidence(subject=f"process {pid}", kind="pid")
    process = look_at(pid)
    if process is not None and process.get("state") != "Z":
        evidence.process, evidence.is_live = process, True
        state = _STATES.get(str(process.get("state")), "alive")
        command = " ".join(process.get("command") or [str(process.get("comm", ""))])[:200]
        evidence.notes.append(f"Process {pid} is {state}: {command}")
        return evidence
    found = _find_led(pid)
    if found is not None:
        return found
    evidence.signs = kernel_signs(pid)
    evidence.notes += [f"The kernel's log has: {sign.text}" for sign in evidence.signs]
    if process is not None:
        evidence.process = process
        _add_zombie(evidence, pid, process)
    elif not evidence.signs:
        may_read = os.access("/dev/kmsg", os.R_OK)
        evidence.notes += [
            f"There is no process {pid} on {host_name()}. Neither `holdfast run` nor the kernel's "
            f"log has a record of one{'' if may_read else ', which only root may read here'}.",
            "Linux keeps nothing of a process that has ended. What its parent saw is lost; its "
            "output may tell: holdfast why LOGFILE. For the next time: holdfast run -- COMMAND",
        ]
    return evidence


def look_at(pid: int) -> Record | None:
    """A process as /proc has it; None if there is none, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None if sys.platform == "linux" or not _answers(pid) else {"pid": pid}
    comm = text[text.find("(") + 1 : text.rfind(")")]
    fields = text.rpartition(")")[2].split()
    process: Record = {"pid": pid, "comm": comm}
    with contextlib.suppress(IndexError, ValueError, OSError):
        ticks = os.sysconf("SC_CLK_TCK")
        process["state"] = fields[0]
        process["parent"] = int(fields[1])
        process["cpu_seconds"] = (int(fields[11]) + int(fields[12])) / ticks
        process["rss"] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        process["started"] = time.time() - uptime + int(fields[19]) / ticks
        process["exit_code"] = int(fields[49])
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        process["command"] = [os.fsdecode(word) for word in command if word][:64]
    with contextlib.suppress(OSError):
        process["cwd"] = str(Path(f"/proc/{pid}/cwd").readlink())
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{process.get('parent', 0)}/comm").read_text(errors="replace")
        process["parent_comm"] = said.strip()
    return process


def kernel_signs(pid: int) -> list[Sign]:
    """The lines of the kernel's log about a process, where they may be read."""
    own = re.compile(rf"(?:[Pp]rocess |pid[ =]|\[){pid}\b")
    lines = [line for line in kernel_log() if own.search(line)]
    kinds = ("kernel_oom", "kernel_segfault", "kernel_trap", "cuda_error")
    signs = [sign for sign in read_signs("\n".join(lines)) if sign.kind in kinds]
    is_of_cgroup = any("constraint=CONSTRAINT_MEMCG" in line for line in lines)
    for sign in signs:
        if sign.kind == "kernel_oom" and is_of_cgroup:
            sign.details["of_cgroup"] = True
    return [sign for sign in signs if sign.details.get("pid", pid) == pid]


def kernel_log() -> list[str]:
    """The kernel's messages, oldest first; empty where only root may read them."""
    return _printed_by("dmesg", "--notime", timeout=_KERNEL_SECONDS).splitlines()


def _printed_by(*command: str, timeout: float, **more: str) -> str:
    """What a command prints; empty if it fails, or takes too long."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            command,
            env={**variables.child_environment(), **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
        )
        return said.stdout if said.returncode == 0 else ""
    return ""


def _find_led(pid: int) -> Evidence | None:
    """By the records of `holdfast run`; a pid is used again, so the newest counts."""
    for supervision in reversed(supervisions()):
        for life in reversed(lives(supervision)):
            led = read_json(led_record(life))
            which = _which(led, pid)
            if which is None:
                continue
            evidence = gather_led(life)
            evidence.subject = f"process {pid}"
            if not evidence.signs:
                with contextlib.suppress(OSError):
                    evidence.signs, evidence.output = read_log(led_output(life))
            evidence.notes.append(which)
            return evidence
    return None


def _which(led: Record, pid: int) -> str | None:
    """What the process was in a life of a command; None if it was not part of it."""
    if led.get("host") not in (None, host_name()):
        return None
    if led.get("child_pid") == pid:
        return f"Process {pid} was led by `holdfast run`."
    if led.get("leader_pid") == pid:
        return f"Process {pid} was `holdfast run` itself; this is of the command that it led."
    for each in _text.records(led.get("processes")):
        if each.get("pid") == pid:
            comm, status = each.get("comm"), _status_words(each.get("status"))
            who = f"Process {pid}{f' ({comm})' if comm else ''}"
            return f"{who} was a descendant of the command that `holdfast run` led{status}."
    return None


def _status_words(status: object) -> str:
    if not isinstance(status, int):
        return ""
    name = _text.signal_name(status)
    return f", and died of {name}" if name else f", and left with status {status}"


def _add_zombie(evidence: Evidence, pid: int, process: Record) -> None:
    """A zombie has its status before its parent asks."""
    code = process.get("exit_code")
    parent: Any = process.get("parent_comm") or "its parent"
    said = ""
    if isinstance(code, int) and (code or os.geteuid() == 0):
        status = -(code & 0x7F) if code & 0x7F else code >> 8
        said = _status_words(status)
        evidence.led = {"child_pid": pid, "status": status, "host": host_name()}
    evidence.notes.append(f"Process {pid} has ended{said}; {parent} has not awaited it yet.")


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


# -- A job: from SLURM's controller and accounting, and from its output ----------------------------

JOB = re.compile(r"\d+(?:_\d+|_\[[\d,%:-]+\]|\+\d+)?(?:\.\w+)?")
_ANSWER_SECONDS = 15.0
_FIELD = re.compile(r"(?:^|\s)([A-Z][A-Za-z:/_]*)=")
_ACCOUNTED = (
    *("JobID", "JobName", "State", "ExitCode", "DerivedExitCode", "Reason", "NodeList"),
    *("MaxRSS", "ReqMem", "End", "Comment"),
)
_ENDED = ("CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
          "DEADLINE", "BOOT_FAIL", "LAUNCH_FAILED")  # fmt: skip


def is_job(word: str) -> bool:
    """Whether a word could name a job: 12, 12_3 of an array, 12+1 of a heterogeneous one."""
    return JOB.fullmatch(word) is not None


def gather_slurm(job: str) -> Evidence:
    job = job.partition(".")[0]  # a step's end is told by its job
    evidence = Evidence(subject=f"job {job}", kind="slurm")
    if not is_job(job):
        evidence.notes = [f"{job} is not a job of SLURM: jobs are numbers, as 12, 12_3 or 12+1."]
        return evidence
    # The controller forgets a job minutes after its end. Of an array: the task that tells most.
    lines = describe_job(job) if can_ask() else []
    records = [each for each in map(parse_job, lines) if each.get("JobState")]
    controller = min(records, key=_rank_of_state, default={})
    command = ("sacct", "-j", job, "-P", "-n", "-D", f"--format={','.join(_ACCOUNTED)}")
    said = _printed_by(*command, timeout=_ANSWER_SECONDS, SLURM_TIME_FORMAT="%s")
    accounting = parse_accounting(said)
    if not controller and not accounting:
        evidence.notes.append(
            f"SLURM does not know job {job} (the controller forgets a job minutes after its end, "
            "and accounting is not kept here or does not know it): holdfast why LOGFILE"
            if can_ask()
            else "There is no scontrol here: ask on a node of the cluster."
        )
        return evidence
    evidence.job = facts = _merge(controller, accounting)
    state = str(facts.get("state", ""))
    has_ended = any(word in state for word in _ENDED)
    evidence.is_live = not has_ended and any(word in state for word in LIVE_STATES)
    _add_outputs(evidence, controller)
    return evidence


def parse_job(line: str) -> Record:
    """All fields of what `scontrol show job -o` prints; values may have spaces in them."""
    found: Record = {}
    # The name comes second and can be anything, also something that looks like a field.
    number, _, rest = line.partition(" UserId=")
    for part in (number.partition(" ")[0], f"UserId={rest}"):
        marks = list(_FIELD.finditer(part))
        ends = [*(mark.start() for mark in marks[1:]), len(part)]
        for mark, end in zip(marks, ends, strict=False):
            found.setdefault(mark[1], part[mark.end() : end].strip())
    return found


def _rank_of_state(record: Record) -> int:
    state = str(record.get("JobState"))
    order = ("OUT_OF_MEMORY", "FAILED", "NODE_FAIL", "TIMEOUT", "PREEMPTED", "CANCELLED", "RUNNING")
    return next((n for n, word in enumerate(order) if word in state), len(order))


def parse_accounting(text: str) -> list[dict[str, str]]:
    """The lines of `sacct -P`; the name may hold the separator, so count from both ends."""
    found = []
    for line in text.splitlines():
        cells = line.split("|")
        behind = len(_ACCOUNTED) - 2
        if len(cells) < len(_ACCOUNTED):
            continue
        # A comment may hold a separator, too, but few jobs have one.
        name = "|".join(cells[1 : len(cells) - behind])
        found.append(dict(zip(_ACCOUNTED, [cells[0], name, *cells[-behind:]], strict=True)))
    return found


def _merge(controller: Record, accounting: list[dict[str, str]]) -> Record:
    wholes = [row for row in accounting if "." not in row["JobID"]]
    whole: dict[str, str] = wholes[-1] if wholes else {}  # the last attempt of a requeued job
    end = _moment(controller.get("EndTime") or whole.get("End"))
    facts: Record = {
        "state": controller.get("JobState") or whole.get("State"),
        "exit_code": controller.get("ExitCode") or whole.get("ExitCode"),
        "derived": controller.get("DerivedExitCode") or whole.get("DerivedExitCode"),
        "reason": controller.get("Reason") or whole.get("Reason"),
        "node": controller.get("NodeList") or whole.get("NodeList"),
        "end": _text.clock(end) if end is not None else None,
    }
    nothing = ("", "None", "(null)", "N/A", "None assigned")
    return {key: value for key, value in facts.items() if str(value or "") not in nothing}


def _add_outputs(evidence: Evidence, controller: Record) -> None:
    named = [str(controller[key]) for key in ("StdErr", "StdOut") if controller.get(key)]
    for name in dict.fromkeys(named):
        path = Path(name)
        if not path.is_absolute() or name == "/dev/null":
            continue
        try:
            signs, tail = read_log(path)
        except OSError as error:
            evidence.notes.append(f"Its output {path} cannot be read: {error.strerror or error}.")
            continue
        evidence.signs += signs
        evidence.output = tail if not evidence.output.strip() else evidence.output
        evidence.files.append(path)
    if not named:
        evidence.notes.append(
            "Where its output is, only the controller knows, and it has forgotten the job: "
            "holdfast why LOGFILE says more."
        )


def _moment(value: object) -> float | None:
    text = str(value or "")
    if text.isdigit():
        return float(text) or None
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return None
