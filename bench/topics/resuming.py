"""Resume: from memory, from disk with a cold page cache, from disk with a warm one.

Each load is made in a process of its own, which has a model with other weights and an optimizer
without moments, as a script has that starts again. The clock runs from there until both have the
state of the checkpoint. holdfast verifies every checksum; no peer does, but for torchsnapshot.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

import holdfast
from bench.figures import LIMIT, OURS, Row, Table
from bench.limits import DirectWrite, Read, allows_direct, copy_back
from bench.machine import cool, cores, disk, warm
from bench.ours import QUIET, Holdfast, abandon, copy_run, forget_memory
from bench.peers import PEERS, Dcp, DLRover, TorchSave, last
from bench.plan import Plan
from bench.states import State, transformer
from bench.topics.saving import sort
from bench.turns import Failed, Field, Seat, once
from bench.ways import Way
from holdfast._run.driver import session_of

FROM_DISK, FROM_MEMORY = 1.2, 1.2
# Of the many ways that DCP saves, one: what they leave behind is read the same way.
LOADED = tuple(p for p in PEERS if not (issubclass(p, Dcp) and p is not Dcp) and p is not DLRover)
READ = "limit: O_DIRECT read, 2 threads"
READ_BUFFERED = "limit: buffered read, 2 threads"
COPY = "limit: copy from shared memory, by threads"


def measure(plan: Plan) -> list[Table]:
    return [*from_disk(plan), from_memory(plan)]


# -- from disk --------------------------------------------------------------------------


def from_disk(plan: Plan) -> list[Table]:
    with plan.place("resuming") as folder:
        ways: list[Way] = [DirectWrite(), Holdfast(), *(peer() for peer in plan.chosen(LOADED))]
        if not allows_direct(folder):
            DirectWrite.flags = 0
        words = _leave_checkpoints(plan, ways, folder)
        template = folder / "Holdfast" / "run"
        template.rename(folder / "template")
        where, tables = disk(folder), []
        for heat in ("cold", "warm"):
            found, how = _load_by_turns(plan, ways, words, folder, heat)
            title = f"Resume from disk, {heat} page cache: until model and optimizer are ready"
            setting = f"{plan.megabytes} MB of model + AdamW, {_rounds(plan)} rounds; {where}"
            if how:
                setting += f"; cold by {how}"
            rows = [
                Row(
                    name,
                    kind,
                    found.get(name, []),
                    at_most=FROM_DISK if kind == OURS else None,
                    word=words.get(name, ""),
                )
                for name, kind in _named(ways)
            ]
            limit = READ if heat == "cold" else READ_BUFFERED
            tables.append(Table(f"resume-{heat}", title, "ms", sort(rows), setting, limit))
        forget_memory(folder / "template")
    return tables


def _rounds(plan: Plan) -> int:
    """Not many: most of a turn is the making of a model to load into."""
    return min(plan.rounds, 4)


def _named(ways: list[Way]) -> list[tuple[str, str]]:
    return [
        (READ, LIMIT),
        (READ_BUFFERED, LIMIT),
        *((_name(way), way.kind) for way in ways if way.kind != LIMIT),
    ]


def _name(way: Way) -> str:
    """Without what it did to save."""
    if isinstance(way, Holdfast):
        return f"{way.name}, every checksum verified"
    return {TorchSave: "torch.load", Dcp: "DCP load"}.get(type(way), way.name.split(",")[0])


def _leave_checkpoints(plan: Plan, ways: list[Way], folder: Path) -> dict[str, str]:
    """Have each way save once; returns words about those that could not."""
    state = transformer(plan.megabytes)
    state.share()
    for way in ways:
        way.warm_ups = 0
    field = Field(ways, state, folder, together=False)
    field.run(1)
    return {_name(each.way): each.word for each in field.contestants if each.word}


def _load_by_turns(
    plan: Plan, ways: list[Way], words: dict[str, str], folder: Path, heat: str
) -> tuple[dict[str, list[float]], str]:
    found: dict[str, list[float]] = {}
    how = ""
    loads = [(READ, None), (READ_BUFFERED, None)]
    loads += [(_name(way), way) for way in ways if way.kind != LIMIT]
    drawn = random.Random(1)
    for _ in range(_rounds(plan)):
        for name, way in drawn.sample(loads, len(loads)):
            if name in words:
                continue
            place = folder / (type(way).__name__ if way else "DirectWrite")
            if isinstance(way, Holdfast):
                copy_run(folder / "template", place / "run")
            if heat == "cold":
                how = cool(place)
            else:
                warm(place)
            work = _loading(plan.megabytes, name, way, place)
            try:
                seconds = once(folder / f"{place.name}.log", work)
                found.setdefault(name, []).append(seconds)
            except Failed as failure:
                if isinstance(way, Holdfast) or way is None:
                    print((folder / f"{place.name}.log").read_text(errors="replace"))
                    raise
                words[name] = f"failed: {failure}"
                found.pop(name, None)
    return found, how


def _loading(megabytes: int, name: str, way: Way | None, place: Path) -> Callable[[], float]:
    def work() -> float:
        if way is None:
            direct = name == READ and bool(DirectWrite.flags)
            return Read(last(place), direct=direct).seconds()
        state = transformer(megabytes, moments=False)
        return way.load(state, place)

    return work


# -- from memory ------------------------------------------------------------------------


def from_memory(plan: Plan) -> Table:
    title = "Resume from memory: until model and optimizer are ready"
    rows = [Row(COPY, LIMIT), Row(_name(Holdfast()), OURS, at_most=FROM_MEMORY)]
    table = Table("resume-memory", title, "ms", rows, limit=COPY)
    if not plan.fits(plan.megabytes, 6):
        rows[1].word = "not measured: too little memory"
        return table
    with plan.place("memory") as folder:
        template, run_folder = folder / "template", folder / "run"
        arena = _leave_arena(plan.megabytes, template, folder / "train.log")
        kept = arena.with_name(f"bench-{arena.name}")
        arena.rename(kept)
        acts: list[tuple[Row, Callable[[], float]]] = [
            (rows[0], lambda: _copy_back(plan.megabytes, kept)),
            (rows[1], lambda: _resume(plan.megabytes, run_folder)),
        ]
        drawn = random.Random(2)
        try:
            for _ in range(plan.rounds):
                for row, act in drawn.sample(acts, 2):
                    copy_run(template, run_folder)
                    with contextlib.suppress(FileNotFoundError):
                        arena.unlink()
                    os.link(kept, arena)
                    os.sync()
                    row.values.append(once(folder / "resume.log", act))
        finally:
            kept.unlink()
            forget_memory(template)
    table.setting = (
        f"{plan.megabytes} MB of model + AdamW, {plan.rounds} rounds; "
        "trainer and keeper were killed by SIGKILL before"
    )
    return table


def _leave_arena(megabytes: int, run_folder: Path, log: Path) -> Path:
    """Train in a process until its newest snapshot has checksums, then kill it and its keeper."""
    from holdfast._store.folder.attempts import read_json
    from holdfast._store.memory.arena import Arena
    from holdfast._store.memory.backing import find_leftovers, open_leftover

    def train() -> str:
        state = transformer(megabytes)
        settings = holdfast.Settings(max_overhead=1.0, checkpoint_every="10h")
        run = holdfast.Run(run_folder, settings=settings, **state.objects())
        run.__enter__()
        while session_of(run).saver.newest is None or session_of(run).saver.newest.sequence < 3:
            state.change()
            run.boundary()
            time.sleep(0.2)
        (path,) = find_leftovers(read_json(run_folder / "run.json")["run_id"])
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with Arena(open_leftover(path)) as arena:
                if arena.whole()[0].is_hashed:
                    break
            time.sleep(0.05)
        os.kill(session_of(run).keeper.keeper_pid, signal.SIGKILL)
        return str(path)

    seat = Seat(log, lambda: {"do": train})
    try:
        return Path(seat.ask("do").value)
    finally:
        seat.kill()
        seat.leave()


def _copy_back(megabytes: int, arena_path: Path) -> float:
    from holdfast._store.memory.arena import Arena

    state = transformer(megabytes, moments=False)
    live = state.model.state_dict()
    arena = Arena(os.open(arena_path, os.O_RDWR))
    slot = arena.whole()[0].slot
    stored, image = [], arena.image(slot)
    for spec, offset in arena.plan(slot).in_file_order():
        if spec.kind == "torch":  # generators: a few kilobytes
            raw = torch.frombuffer(image[offset : offset + spec.size_bytes], dtype=torch.uint8)
            stored.append((spec.name, raw.view(getattr(torch, spec.dtype)).view(spec.shape)))
    began = time.perf_counter()
    targets = [
        live[name.removeprefix("model.")] if name.startswith("model.") else torch.empty_like(tensor)
        for name, tensor in stored
    ]
    copy_back([tensor for _, tensor in stored], targets, cores())
    return time.perf_counter() - began


def _resume(megabytes: int, run_folder: Path) -> float:
    state: State = transformer(megabytes, moments=False)
    run = holdfast.Run(run_folder, settings=QUIET, **state.objects())
    began = time.perf_counter()
    run.__enter__()
    seconds = time.perf_counter() - began
    abandon(run)
    journal = (run_folder / "journal.jsonl").read_text()
    if '"source": "memory"' not in journal and '"source":"memory"' not in journal:
        raise RuntimeError("the run did not resume from memory")
    return seconds
