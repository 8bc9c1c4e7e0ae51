"""Why it makes no progress: from what every process was doing, one cause and one sentence.

Of several ranks mostly all but one wait, and their stacks only tell that they wait. So they are
compared: to blame is the rank that is not where the others are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast import _text
from holdfast._diagnose.evidence.case import Finding
from holdfast._diagnose.hangs.process import Held, is_computing, what_holds
from holdfast._diagnose.hangs.stacks import (
    WAITS_FOR_RANKS,
    ThreadStanding,
    merge_looks,
    name_ranks,
    rank_of,
)
from holdfast._diagnose.texts.exceptions import fault_of_error, fault_of_signs
from holdfast._diagnose.texts.log_file import read_log
from holdfast._diagnose.texts.sign import Sign
from holdfast._diagnose.verdict import Cause, Sure

Record = dict[str, Any]

_NO_HANG = (Cause.DEBUGGER, Cause.FROZEN, Cause.STOPPED)  # in the order in which they explain
_WORK_AGREES = 3  # as in `_store/memory/control.py`: it waits at a boundary for the other ranks
_MOST_LINES = 12


@dataclass
class HangFinding(Finding):
    """A finding, with the rank that the others wait for."""

    rank: int | None = None
    others: list[str] = field(default_factory=list)  # where the others stand


@dataclass
class _Rank:
    look: Record
    held: Held
    number: int | None
    mark: int | None
    waits: bool  # for other ranks

    @property
    def name(self) -> str:
        host = _text.text(self.look.get("host"))
        where = f" on {host}" if host else ""
        return f"rank {self.number}{where}" if self.number is not None else "it"

    @property
    def standing(self) -> ThreadStanding:
        return self.held.standing


def explain(record: Record, output: Path | None = None) -> HangFinding:
    """What holds it, from hang.json, look.json or a single inspection. Never raises.

    `output` is the file that has what it printed.
    """
    try:
        found = explain_strictly(record)
        if output is not None:
            with contextlib.suppress(OSError):
                name_dead_thread(found, read_log(output)[0])
        return found
    except Exception as error:  # noqa: BLE001  a keeper must go on with any record
        return HangFinding(
            Cause.UNKNOWN,
            "It makes no progress, and its records cannot be understood.",
            Sure.UNKNOWN,
            [f"{type(error).__name__}: {error}"],
        )


def name_dead_thread(
    found: HangFinding, signs: Iterable[Sign], journal: Iterable[Record] = ()
) -> None:
    """A wait for another thread may be in vain because that thread has raised."""
    died = fault_of_signs(sign for sign in signs if sign.details.get("thread"))
    for event in journal:
        if event.get("event") == "thread-died":
            died = fault_of_error(event) or died
    if died is None or not died.place or found.cause is not Cause.HANG_LOCK:
        return
    found.sure = Sure.LIKELY  # that this thread was to end the wait is not told
    found.advice.insert(0, f"Look at {died.place} first.")
    if died.place not in found.sentence:
        found.sentence += f" Before that, {died.sentence(160)} was raised at {died.place}."


def explain_strictly(record: Record) -> HangFinding:
    """The same, for tests: what goes wrong here is a bug."""
    looks = _text.records(record.get("looks")) or ([record] if record.get("processes") else [])
    told = record.get("missing")
    numbers = map(_text.whole, told if isinstance(told, list) else [])
    missing = [number for number in numbers if number is not None]
    if not looks:
        why = f"{name_ranks(missing)} gave no answer" if missing else "could not be inspected"
        said = f"It makes no progress, and {why}."
        return HangFinding(Cause.UNKNOWN, said, Sure.UNKNOWN, rank=next(iter(missing), None))
    ranks = [_rank(look, is_alone=len(looks) + len(missing) == 1) for look in looks]
    if len(ranks) == 1 and not missing:
        found = _alone(ranks[0])
    else:
        found = _among(ranks, missing)
        found.evidence = [*merge_looks(looks, missing)[:_MOST_LINES], *found.evidence]
    since = _since(record, looks)
    if since and found.cause not in _NO_HANG:
        found.sentence = f"{since}: {found.sentence}"
    else:
        found.sentence = found.sentence[:1].upper() + found.sentence[1:]
    found.evidence += tell_limit(record)
    known = (_text.real(each.get("usual_step_seconds")) for each in (record, looks[0]))
    if usual := next((each for each in known if each is not None), None):
        found.evidence.append(f"a step of it usually takes {_text.duration(usual)}")
    return found


def _rank(look: Record, *, is_alone: bool) -> _Rank:
    held = what_holds(look)
    standing = held.standing
    waits = standing.kind in WAITS_FOR_RANKS or _text.whole(look.get("work")) == _WORK_AGREES
    if not is_alone and not waits:
        # A reducer waits in backward(), `work.wait()` waits in C, and a GPU that waits in a
        # collective makes its process spin.
        is_in_c = standing.kind == "event" and not standing.call
        waits = standing.kind == "device" or (
            (standing.kind == "backward" or is_in_c) and not is_computing(look)
        )
    waits = waits and held.cause not in _NO_HANG and held.cause is not Cause.HANG_GIL
    mark = _text.whole(look.get("mark"))
    if mark is None:
        step = _text.whole(look.get("step"))
        mark = 2 * step if step is not None else None
    return _Rank(look, held, rank_of(look), mark, waits)


def _alone(rank: _Rank) -> HangFinding:
    held = rank.held
    who = rank.name if rank.number else "it"
    return HangFinding(
        held.cause,
        _sentence(f"{who} {held.words}", held.hint),
        held.sure,
        list(held.evidence),
        held.advice,
        rank.number or None,
    )


def _among(ranks: list[_Rank], missing: list[int]) -> HangFinding:
    for cause in _NO_HANG:
        if held := [rank for rank in ranks if rank.held.cause is cause]:
            return _one_to_blame(held[0], ranks, is_waited_for=True)
    busy = [rank for rank in ranks if not rank.waits]
    if missing and not busy:
        return _absent(ranks, missing)
    if not busy:
        return _all_wait(ranks)
    causes, places = {rank.held.cause for rank in busy}, {rank.standing.place for rank in busy}
    if len(busy) == len(ranks) > 1 and len(causes) == len(places) == 1:
        first = ranks[0].held
        said = f"all {len(ranks)} ranks are held alike: {ranks[0].name} {first.words}"
        told = [*_marks(ranks), *first.evidence]
        return HangFinding(first.cause, _sentence(said, first.hint), first.sure, told, first.advice)
    return _one_to_blame(min(busy, key=_order), ranks, is_waited_for=len(busy) < len(ranks))


def _order(rank: _Rank) -> tuple[float, bool, int]:
    """The rank behind all others first; of equals one that computes last: it may go on."""
    mark = rank.mark if rank.mark is not None else 1 << 62
    return mark, rank.held.cause in (Cause.SLOW, Cause.HANG_COMPUTING), rank.number or 0


def _one_to_blame(guilty: _Rank, ranks: list[_Rank], *, is_waited_for: bool) -> HangFinding:
    held = guilty.held
    others = [rank for rank in ranks if rank is not guilty]
    waiting = [rank for rank in others if rank.waits]
    said = f"{guilty.name} {held.words}"
    if is_waited_for and waiting:
        wait = "waits" if len(waiting) == 1 else "wait"
        said = f"{said}, while {_named(waiting)} {wait} for it {waiting[0].standing.where()}"
    cause = held.cause if held.cause in (*_NO_HANG, Cause.SLOW) else Cause.HANG_RANK
    if not waiting and cause is Cause.HANG_RANK:
        cause = held.cause  # no rank waits for it: the cause is its own
    evidence = [*_marks(ranks), *held.evidence]
    if cause is Cause.HANG_RANK:
        evidence.append(f"by itself that is: {held.cause.value}")
    return HangFinding(
        cause,
        _sentence(said, held.hint),
        held.sure,
        evidence,
        held.advice,
        guilty.number,
        _stand(others),
    )


def _absent(ranks: list[_Rank], missing: list[int]) -> HangFinding:
    where, marks = ranks[0].standing.where(), _marks(ranks)
    said = f"{name_ranks(missing)} gave no answer, while {_named(ranks)} wait {where}"
    hint = "See whether its machine is there, and what holds its keeper"
    advice, others, said = [f"{hint}: holdfast status RUN"], _stand(ranks), _sentence(said, hint)
    return HangFinding(Cause.HANG_RANK, said, Sure.LIKELY, marks, advice, missing[0], others)


def _all_wait(ranks: list[_Rank]) -> HangFinding:
    """All wait for each other: in the same collective, or in different ones."""
    groups: dict[tuple[Any, ...], list[_Rank]] = {}
    for rank in ranks:
        key = (rank.standing.call, rank.standing.path, rank.mark)
        groups.setdefault(key, []).append(rank)
    if len(groups) == 1:
        where = ranks[0].standing.where()
        said = f"all {len(ranks)} ranks wait {where}, and none of them is missing"
        hint = (
            "See the network between them (NCCL_DEBUG=INFO, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
            " and the GPUs: holdfast doctor tries a real all_reduce"
        )
        sentence, marks = _sentence(said, hint), _marks(ranks)
        return HangFinding(Cause.HANG_CALL, sentence, Sure.LIKELY, marks, [f"{hint}."])
    parties = sorted(groups.values(), key=lambda each: (len(each), _order(each[0])))
    odd, most = parties[0], parties[-1]
    odd_at, most_at = _where_differ(odd[0].standing, most[0].standing)
    steps = ""
    if odd[0].mark != most[0].mark and odd[0].mark is not None and most[0].mark is not None:
        steps = f" (after step {odd[0].mark // 2}, the others after step {most[0].mark // 2})"
    said = (
        f"the ranks have taken different ways: {_named(odd)} wait{'s' * (len(odd) == 1)} {odd_at}"
        f"{steps}, {_named(most)} {most_at}"
    )
    hint = (
        "Every rank must call the same collectives in the same order: look for a condition between "
        "these lines that depends on the rank or its data"
    )
    return HangFinding(
        Cause.HANG_BRANCHES,
        _sentence(said, hint),
        Sure.LIKELY,
        _marks(ranks),
        [
            f"{hint}.",
            "For parameters that not every batch uses: DistributedDataParallel(…, "
            "find_unused_parameters=True); for uneven batches: a DistributedSampler, or "
            "drop_last=True. TORCH_DISTRIBUTED_DEBUG=DETAIL names the collective that does not "
            "match.",
        ],
        odd[0].number if len(odd) < len(most) or odd[0].mark != most[0].mark else None,
        _stand([rank for rank in ranks if rank is not odd[0]]),
    )


def _where_differ(one: ThreadStanding, other: ThreadStanding) -> tuple[str, str]:
    """Where both stand; on the same line, the lines that called it."""
    pairs = zip(one.path, other.path, strict=False)
    differ = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if one.path[:1] != other.path[:1] or one.call != other.call or differ is None:
        return one.where(), other.where()
    mine, theirs = (f"called from {file.rsplit('/', 1)[-1]}:{line}" for file, line in differ)
    return f"{one.where()}, {mine}", theirs


def _stand(ranks: list[_Rank]) -> list[str]:
    return [f"{rank.name} {rank.held.words}" for rank in ranks][:_MOST_LINES]


def _named(ranks: list[_Rank]) -> str:
    return name_ranks(rank.number for rank in ranks)


def _marks(ranks: list[_Rank]) -> list[str]:
    steps: dict[int, list[int | None]] = {}
    for rank in ranks:
        if rank.mark is not None:
            steps.setdefault(rank.mark // 2, []).append(rank.number)
    if len(steps) < 2:
        return []
    told = (f"{name_ranks(who)} after step {step}" for step, who in sorted(steps.items()))
    return ["; ".join(told)]


def _sentence(said: str, hint: str) -> str:
    return f"{said}. {hint}." if hint else f"{said}."


def _since(record: Record, looks: list[Record]) -> str:
    """How long it has made no progress."""
    quiet = _text.real(record.get("quiet_seconds"))
    if quiet is not None:  # a command whose steps are not counted
        return f"No output and no work for {_text.duration(quiet)}"
    began, found = _text.real(record.get("began")), _text.real(record.get("found"))
    if began is not None and found is not None and found > began:
        return f"No step for {_text.duration(found - began)}"
    ages = [age for look in looks if (age := _text.real(look.get("boundary_age"))) is not None]
    longest = max(ages, default=0.0)
    return f"No step for {_text.duration(longest)}" if longest >= 1.0 else ""


def tell_limit(record: Record) -> list[str]:
    patience = _text.real(record.get("patience"))
    how = "given" if record.get("how") == "given" else "learned from its own pace"
    return [] if patience is None else [f"the limit was {_text.duration(patience)} ({how})"]


def as_told(record: Record) -> HangFinding:
    """The finding of a hang of which only the words were recorded."""
    try:
        cause = Cause(record.get("cause"))
    except ValueError:
        cause = Cause.UNKNOWN
    sentence = _text.one_line(_text.text(record.get("sentence")), 600) or "It makes no step."
    lists = (
        each if isinstance(each := record.get(k), list) else [] for k in ("evidence", "advice")
    )
    told, advice = ([_text.one_line(_text.text(line), 400) for line in lines] for lines in lists)
    return HangFinding(cause, sentence, Sure.LIKELY, [*filter(None, told)], [*filter(None, advice)])
