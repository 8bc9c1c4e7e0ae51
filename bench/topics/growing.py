"""How the cost grows: by size, number of tensors, number of checkpoints, length of the journal."""

from __future__ import annotations

import gc
import random
import shutil
import time
from pathlib import Path

import torch

import holdfast
from bench.figures import LIMIT, OURS, Row, Table
from bench.limits import Copy, DirectWrite, allows_direct
from bench.machine import warm
from bench.ours import Holdfast, abandon, copy_run, forget_memory
from bench.plan import Plan
from bench.states import State, many, transformer
from bench.topics.saving import DURABLE, STALL
from bench.turns import Field, once
from bench.ways import Way

MANY, LONG = 3.0, 1.5
SLOWEST_MEGABYTES = 1000  # from here on a state is saved fewer times


def measure(plan: Plan) -> list[Table]:
    return [*by_size(plan), *by_tensors(plan), *by_age(plan)]


# -- size -------------------------------------------------------------------------------


def by_size(plan: Plan) -> list[Table]:
    sizes = (1, 10, 100) if plan.quick else (1, 10, 100, 1000, 4000, 8000)
    stalls: list[Row] = []
    durables: list[Row] = []
    for megabytes in sizes:
        # The state and a slot: where there is no room for two, holdfast uses one.
        if not plan.fits(megabytes, 2.2):
            for rows in (stalls, durables):
                word = "not measured: too little memory for it and its slots"
                rows.append(Row(f"{megabytes:,} MB: holdfast", OURS, word=word))
            continue
        with plan.place("size") as folder:
            direct = allows_direct(folder)
            state = transformer(megabytes)
            state.share()
            ways: list[Way] = [Copy(), *([DirectWrite()] if direct else []), Holdfast()]
            field = Field(ways, state, folder, together=plan.fits(megabytes, 6))
            # A large state is opened few times and saved several times then.
            if megabytes < SLOWEST_MEGABYTES:
                field.run(2 * plan.rounds)
            else:
                field.run(min(plan.rounds, 3), saves=2)
            figures = {each.way.kind + each.way.name: each.figures for each in field.contestants}
            del field, ways, state
            gc.collect()
        targeted = megabytes in (1000, 4000)
        for rows, figure, limit, target in (
            (stalls, "stall", Copy.name, STALL),
            (durables, "durable", DirectWrite.name, DURABLE),
        ):
            plain = f"{megabytes:,} MB: limit"
            rows.append(Row(plain, LIMIT, figures.get(LIMIT + limit, {}).get(figure, [])))
            rows.append(
                Row(
                    f"{megabytes:,} MB: holdfast",
                    OURS,
                    figures[OURS + Holdfast.name][figure],
                    against=plain,
                    at_most=target if targeted and rows[-1].values else None,
                )
            )
    setting = "model + AdamW; limits: a copy into shared memory, a write by O_DIRECT and 2 threads"
    return [
        Table("size-stall", "Stall by size of the state", "ms", stalls, setting),
        Table("size-durable", "Request to durable by size of the state", "ms", durables, setting),
    ]


# -- number of tensors ------------------------------------------------------------------


class ManyTensors(Holdfast):
    """The same bytes in so many tensors."""

    def __init__(self, count: int, megabytes: int) -> None:
        super().__init__()
        self.count = count
        self.name = _tensors(count)
        self.make_state = lambda: many(count, megabytes)

    @property
    def folder_name(self) -> str:
        return f"tensors-{self.count}"


def _tensors(count: int) -> str:
    return f"{count:,} tensors" if count > 1 else "1 tensor"


def by_tensors(plan: Plan) -> list[Table]:
    counts = (1, 100_000) if plan.quick else (1, 10, 100, 1_000, 10_000, 100_000)
    megabytes = plan.megabytes
    tables = []
    with plan.place("tensors") as folder:
        ways = [ManyTensors(count, megabytes) for count in counts]
        together = plan.fits(megabytes, 5 * len(ways))
        field = Field(list(ways), None, folder, together=together)
        field.run(plan.rounds if together else 2, saves=1 if together else 3)
        setting = f"{megabytes} MB of parameters, no optimizer"
        for figure, title in (("stall", "Stall"), ("durable", "Request to durable")):
            rows = [
                _against_one(each.way.name, each.figures[figure], counts[-1])
                for each in field.contestants
            ]
            name = f"tensors-{figure}"
            title = f"{title} by number of tensors, of the same bytes"
            tables.append(Table(name, title, "ms", rows, setting, _tensors(1), "× one tensor"))
        tables.append(_resume_by_tensors(plan, ways, folder, setting))
    return tables


def _against_one(name: str, values: list[float], most: int) -> Row:
    target = MANY if name == _tensors(most) else None
    return Row(name, OURS, values, at_most=target)


def _resume_by_tensors(plan: Plan, ways: list[ManyTensors], folder: Path, setting: str) -> Table:
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    for way in ways:
        (folder / way.folder_name / "run").rename(folder / f"template-{way.count}")
    drawn = random.Random(4)
    for _ in range(2 if plan.quick else 3):
        for way in drawn.sample(ways, len(ways)):
            place = folder / way.folder_name
            copy_run(folder / f"template-{way.count}", place / "run")
            warm(place)

            def load(way: ManyTensors = way, place: Path = place) -> float:
                assert way.make_state is not None
                return way.load(way.make_state(), place)

            found[way.name].append(once(folder / "load.log", load))
    for way in ways:
        forget_memory(folder / f"template-{way.count}")
    rows = [_against_one(name, values, ways[-1].count) for name, values in found.items()]
    return Table(
        "tensors-resume",
        "Resume from disk (warm) by number of tensors, of the same bytes",
        "ms",
        rows,
        setting,
        _tensors(1),
        "× one tensor",
    )


# -- age of the run ---------------------------------------------------------------------


def by_age(plan: Plan) -> list[Table]:
    most = 200 if plan.quick else 1000
    lines = 20_000 if plan.quick else 200_000
    with plan.place("age") as folder:
        found = once(folder / "log", lambda: _save_often(folder / "run", most), seconds=300)
        forget_memory(folder / "run")
        young, old = (
            f"with 5 to {most // 20} checkpoints",
            f"with {most - most // 20:,} to {most:,}",
        )
        saves = Table(
            "checkpoints",
            "Request to durable by number of checkpoints that are kept",
            "ms",
            [
                Row(young, OURS, found[5 : most // 20]),
                Row(old, OURS, found[-(most // 20 - 5) :], at_most=LONG),
            ],
            "a state of 1 MB, keep_last=1000",
            young,
            "× few",
        )
        few, long = folder / "few", folder / "long"
        _thin(folder / "run", few)
        copy_run(few, long)
        _lengthen(long / "journal.jsonl", lines)
        places = {
            "1 checkpoint": few,
            f"{most:,} checkpoints": folder / "run",
            f"1 checkpoint, {lines:,} lines of journal": long,
        }
        rows = {name: Row(name, OURS) for name in places}
        drawn = random.Random(5)
        for _ in range(plan.rounds):
            for name, place in drawn.sample(list(places.items()), len(places)):
                copy_run(place, folder / "copy" / "run")
                seconds = once(folder / "log", lambda: Holdfast().load(_small(), folder / "copy"))
                rows[name].values.append(seconds)
    for row in list(rows.values())[1:]:
        row.at_most = LONG
    opened = Table(
        "age",
        "Start of a run by number of checkpoints and length of the journal, resume included",
        "ms",
        list(rows.values()),
        "a state of 1 MB",
        "1 checkpoint",
        "× young",
    )
    return [saves, opened]


def _small() -> State:
    return State(torch.nn.Linear(500, 500), None)


def _save_often(folder: Path, count: int) -> list[float]:
    state, found = _small(), []
    settings = holdfast.Settings(max_overhead=0, checkpoint_every="10h", keep_last=1000)
    run = holdfast.Run(folder, settings=settings, **state.objects())
    run.__enter__()
    for _ in range(count):
        state.change()
        began = time.perf_counter()
        handle = run.save()
        run.boundary()
        handle.wait()
        found.append(time.perf_counter() - began)
    abandon(run)
    return found


def _thin(run_folder: Path, thinned: Path) -> None:
    """The same run with its newest checkpoint only."""
    copy_run(run_folder, thinned)
    for checkpoint in sorted((thinned / "checkpoints").glob("step-*"))[:-1]:
        shutil.rmtree(checkpoint)


def _lengthen(journal: Path, lines: int) -> None:
    """Make a journal as long as of a run of weeks: its own lines over and over, then itself."""
    text = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    middle = text[1:-1] or text
    repeated = middle * (lines // len(middle))
    journal.write_text("".join([text[0], *repeated, *text[1:]]), encoding="utf-8")
