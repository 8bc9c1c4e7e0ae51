"""Stall of a save, request to durable, and peak extra memory: one field, the same rounds."""

from __future__ import annotations

from bench.figures import LIMIT, OURS, Row, Table
from bench.limits import BufferedWrite, Copy, DirectWrite, allows_direct
from bench.machine import disk
from bench.ours import Holdfast
from bench.peers import PEERS
from bench.plan import Plan
from bench.states import transformer
from bench.turns import Contestant, Field
from bench.ways import Way

STALL, DURABLE, SLOTS, KEEPER_BYTES = 1.1, 1.3, 2.1, 40e6


def measure(plan: Plan) -> list[Table]:
    state = transformer(plan.megabytes)
    state.share()
    size = state.size_bytes
    with plan.place("saving") as folder:
        direct = allows_direct(folder)
        ways: list[Way] = [Copy(), *([DirectWrite()] if direct else []), BufferedWrite()]
        ways += [Holdfast(), *(peer() for peer in plan.chosen(PEERS))]
        # Ours holds two or three copies, limits and most peers one; some need another for a while.
        together = plan.fits(plan.megabytes, 13 if plan.peers else 8)
        field = Field(ways, state, folder, together=together)
        field.run(plan.rounds)
        where = disk(folder)
    count = sum(1 for _ in state.tensors())
    setting = f"{size / 1e6:.0f} MB of model + AdamW in {count:,} tensors, {plan.rounds} rounds"
    if not together:
        setting += ", each way in a process that is started anew for each turn"
    limit = (DirectWrite if direct else BufferedWrite).name
    return [
        Table(
            "stall",
            "Stall: until training may change its tensors again",
            "ms",
            _rows(field, "stall", STALL),
            setting,
            Copy.name,
        ),
        Table(
            "durable",
            "Request to durable: until everything is fsynced",
            "ms",
            _rows(field, "durable", DURABLE),
            f"{setting}; {where}" + ("" if direct else "; O_DIRECT is refused here"),
            limit,
        ),
        memory(field, size, setting),
    ]


def _rows(field: Field, figure: str, at_most: float) -> list[Row]:
    rows = []
    for each in field.contestants:
        if each.way.kind == LIMIT and figure not in each.figures:
            continue
        target = at_most if each.way.kind == OURS else None
        values = each.figures.get(figure, [])
        rows.append(Row(each.way.name, each.way.kind, values, at_most=target, word=each.word))
    return sort(rows)


def sort(rows: list[Row]) -> list[Row]:
    """Limits, ours, then peers from the quickest on; who has no figures comes last."""
    order = {LIMIT: 0, OURS: 1}
    return sorted(
        rows,
        key=lambda row: (order.get(row.kind, 2), not row.values, row.median if row.values else 0),
    )


def memory(field: Field, size: int, setting: str) -> Table:
    rows = [Row("the state itself", LIMIT, [float(size)])]
    for each in field.contestants:
        if each.way.kind == LIMIT:
            continue
        values = [float(each.extra_bytes)] if each.figures else []
        target = SLOTS * size + KEEPER_BYTES if each.way.kind == OURS else None
        word = each.word or _kind_of_memory(each)
        rows.append(Row(each.way.name, each.way.kind, values, at_most_value=target, word=word))
    return Table(
        "memory",
        "Peak extra memory, of all processes, beside the state itself; without page cache",
        "bytes",
        sort(rows),
        setting,
        "the state itself",
        "× state",
    )


def _kind_of_memory(each: Contestant) -> str:
    return "2 slots and the keeper" if each.way.kind == OURS else ""
