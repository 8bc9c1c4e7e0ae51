"""The evidence of a run folder, or of a record of `holdfast run`.

The folder is only read, and may have been copied from another machine. So processes are looked up
only if they ran on this machine, and a new heartbeat is awaited only after a recent one.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from holdfast import _text
from holdfast._diagnose.evidence.evidence import Evidence, RankEvidence, Record
from holdfast._diagnose.texts.sign import Sign
from holdfast._diagnose.texts.signs import read_signs
from holdfast._environment.processes.identity import host_name, of_process
from holdfast._environment.processes.memory_sample import mounted_rooms
from holdfast._environment.processes.proc import FairDeadline
from holdfast._environment.processes.tree import keepers_of
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import is_live, keeper_of, lease_holder, read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.plain_file import read_end
from holdfast._store.folder.supervised import led_outputs

_OUTPUT_BYTES = 1 << 20  # of the end of a log
_STACKS_BYTES = 1 << 16
_MOST_EVENTS = 5000
_SKEW_SECONDS = 60.0  # by which a clock may have been adjusted since
_OLD_SECONDS = 600.0  # of a heartbeat: clocks differ by less
_WATCH_SECONDS = 5.0  # beats come every other second
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
    found.durable_step = _durable_step(layout, number)
    beats = found.beat.get("ranks")
    beats = beats if isinstance(beats, list) else []
    for rank in _rank_numbers(layout, number, len(beats)):
        found.ranks.append(_rank(layout, number, rank, beats))
    if any(rank.led for rank in found.ranks):  # each rank has a leader of its own
        found.ranks[0].led = found.led or {}
    planned = [_text.whole(rank.error.get("ranks")) or 0 for rank in found.ranks]
    found.run.ranks_planned = min(max([len(found.ranks), *planned]), _MOST_RANKS)
    _read_texts(layout, number, found)
    with contextlib.suppress(OSError):
        files = layout.attempt(number).iterdir()
        found.files = sorted(path for path in files if _TELLING.fullmatch(path.name))
    if hidden := [path.name for path in found.files if not os.access(path, os.R_OK)]:
        found.notes.append(
            f"you may not read {', '.join(hidden[:8])}: ask as the user that started it"
        )
    return found


def gather_led(life_folder: Path) -> Evidence:
    """What `holdfast run` saw of one life of a command, and the run that it opened."""
    led = read_json(life_folder / "led.json")
    opened = read_json(life_folder / "run.json") or _text.record(led.get("run"))
    folder, attempt = _text.text(opened.get("folder")), _text.whole(opened.get("attempt"))
    found = Evidence(kind="led")
    if folder and attempt and RunLayout(Path(folder)).attempt(attempt).is_dir():
        found = gather_run(Path(folder), attempt)
    if found.kind == "led":
        found.subject = str(life_folder)
    found.led = led or found.led
    found.is_live = bool(led) and led.get("ended") is None and _is_leader_alive(led)
    found.hang = found.hang or read_json(life_folder / "hang.json")
    text = _tail(life_folder / "output.log", _OUTPUT_BYTES)
    if text and not found.output:
        found.output = text
        found.signs += read_signs(text)
    if _text.record(found.led).get("host") == host_name():
        look_for_full_disks(found)
    found.files = [
        *(
            path
            for name in ("led.json", "output.log", "hang.json")
            if (path := life_folder / name).exists()
        ),
        *found.files,
    ]
    return found


def look_for_full_disks(found: Evidence) -> None:
    """Where its output tells of a full disk: an error seldom names it."""
    if any(sign.kind in ("disk_full", "torch_save_short") for sign in found.signs):
        found.disks = mounted_rooms()


def _look_where(layout: RunLayout, attempt: int, found: Evidence) -> None:
    """Whether it ran on this machine, and whether the machine has restarted since."""
    holder = lease_holder(layout, attempt)
    if holder is None:
        return
    boot = of_process().boot
    if not holder.boot or not boot:
        return
    found.run.is_here = holder.boot == boot  # in another container its processes are not seen
    beat = _text.real(read_json(layout.heartbeat(attempt)).get("time"))
    booted = _booted_at()
    found.run.has_rebooted = (
        holder.host == host_name()
        and holder.boot != boot
        # Else it was another machine of the same name.
        and (beat is None or booted is None or beat < booted + _SKEW_SECONDS)
    )


def _is_live(layout: RunLayout, attempt: int) -> bool:
    """Whether it still trains; on another machine, by its heartbeat."""
    holder = lease_holder(layout, attempt)
    if holder is None or layout.exit(attempt).exists():
        return False
    if holder.is_here():
        return holder.is_alive()
    beat = read_json(layout.heartbeat(attempt))
    moment = _text.real(beat.get("time"))
    if moment is None or abs(time.time() - moment) > _OLD_SECONDS:
        return False
    return is_live(layout, attempt, _WATCH_SECONDS)


def _await_keeper(layout: RunLayout, attempt: int) -> None:
    """Wait for a live keeper: it is about to write its records."""
    keeper = keeper_of(layout, attempt)
    if keeper is None:
        starting = keepers_of(os.path.realpath(layout.folder), attempt)
        keeper = of_process(starting[0]) if starting else None
    if keeper is None or not keeper.is_here():
        return
    deadline = FairDeadline(_KEEPER_SECONDS, lambda: [keeper.pid])
    while not deadline.is_over() and keeper.is_alive():
        if layout.exit(attempt).exists():
            return
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
    found = {0, *range(min(told, _MOST_RANKS))}
    for folder in (layout.attempt(attempt), layout.ranks(attempt)):
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                match = _OF_A_RANK.fullmatch(path.name)
                if match is not None and int(match[1]) < _MOST_RANKS:
                    found.add(int(match[1]))
    return sorted(found)


def _rank(layout: RunLayout, attempt: int, rank: int, beats: list[object]) -> RankEvidence:
    beat = _text.record(beats[rank]) if rank < len(beats) else {}
    if not beats:
        beat = read_json(layout.heartbeat(attempt))
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
        found.signs += _named(read_signs(text), None if is_one else rank.rank)
        dumps = [sign for sign in read_signs(rank.stacks) if sign.kind == "faulthandler"]
        found.signs += _named(dumps, rank.rank if len(found.ranks) > 1 else None)


def _named(signs: Iterable[Sign], rank: int | None) -> Iterator[Sign]:
    for sign in signs:
        yield sign if sign.rank is not None else replace(sign, rank=rank)


def _tail(path: Path, size_bytes: int) -> str:
    return read_end(path, size_bytes).decode("utf-8", errors="replace")
