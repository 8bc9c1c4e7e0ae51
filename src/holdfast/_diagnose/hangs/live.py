"""A run that has not ended: does it get on, as fast as ever, and if not, what holds it?

By its heartbeat, and by a fresh look at all its processes where one could be had. The measure
is always the run itself: the steps that it made while nothing disturbed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast import _text
from holdfast._diagnose.advice import LARGER_SHM
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.hangs.judge import HangFinding, explain_strictly, tell_limit
from holdfast._diagnose.hangs.process import has_stack, what_holds
from holdfast._diagnose.hangs.slowness import (
    Reason,
    find_reasons,
    larger,
    let_go,
    named_best,
    tell_straggler,
)
from holdfast._diagnose.hangs.stacks import merge_looks
from holdfast._diagnose.verdict import Cause, Sure, Verdict, restart_after
from holdfast._environment.processes.activity import Activity, activity_of

Record = dict[str, Any]

_HELD = (Cause.DEBUGGER, Cause.FROZEN, Cause.STOPPED)
_SLOW_TIMES = 3.0
_FAR_TIMES = 15.0  # of its best: no phase of a training is so much slower
_SLOWED_TIMES = 1.3  # where something is seen that slows it
_SLOW_SECONDS = 0.05  # less more than usual is not worth a word
_LONG_SECONDS = 2.0  # of one step alone: a busy machine makes many a step somewhat longer
_STANDS_TIMES = 10.0
_STANDS_SECONDS = 5.0
_UNKNOWN_SECONDS = 20.0
_AT_WORK = {Activity.MOVING, Activity.BUSY}
_SAME_SECONDS = 1.0  # by which two clocks of one boundary may differ
_MOST_LINES = 8


@dataclass
class _Pace:
    """How fast it is, and was while nothing disturbed it."""

    usual: float | None = None  # of late
    best: float | None = None  # of the fastest time of this attempt
    now: float | None = None
    age: float | None = None  # of the step under way
    rests: bool = False  # in a phase, or in something of holdfast's own: no step is due

    @property
    def current(self) -> float | None:
        """What a step takes now; the one under way counts if it is long already."""
        known = [self.now] if self.now else []
        if self.age is not None and self.age > _LONG_SECONDS and not self.rests:
            known.append(self.age)
        return max(known, default=None)

    @property
    def is_slow(self) -> bool:
        """Whether a step takes much longer than of late."""
        if self.best and self.current and self.current > _FAR_TIMES * self.best + _SLOW_SECONDS:
            return True  # for however long: the recent usual time has become slow too
        if not self.usual or self.current is None:
            return False
        return self.current > max(_SLOW_TIMES * self.usual, self.usual + _SLOW_SECONDS)

    @property
    def measure(self) -> float | None:
        """What a step takes when all is well."""
        known = [each for each in (self.usual, self.best) if each]
        return min(known, default=None)

    @property
    def may_be_slow(self) -> bool:
        """Whether it was faster once: that may be as it should, but where there is a reason."""
        measure = self.measure
        return bool(measure and self.current and self.current > _SLOWED_TIMES * measure)

    @property
    def stands(self) -> bool:
        """Whether a step is overdue by far."""
        if self.rests or self.age is None:
            return False
        if not self.usual:  # too few steps to know
            return self.age > _UNKNOWN_SECONDS
        return self.age > max(_STANDS_SECONDS, _STANDS_TIMES * self.usual)


def judge_live(evidence: Evidence) -> Verdict:
    """How it is."""
    beat, looks = evidence.beat, _text.records(evidence.look.get("looks"))
    found = explain_strictly(evidence.look) if looks else None
    if found is not None and found.cause in _HELD:
        return _of(evidence, found)
    if found is not None and found.cause is Cause.HANG_LOADER:
        _see_full_shm(evidence, found)
    if (paused := _text.record(beat.get("paused"))) and not looks:
        return _of(evidence, _paused(paused))
    pace, disturbed = _pace_of(beat, looks), _disturbed(beat, looks)
    activities = {activity_of(look) for look in looks}
    moves = Activity.MOVING in activities
    hang = _open_hang(evidence, looks)
    # One that computes at one line hangs all the same.
    if hang and not moves:
        if found is not None:
            found.evidence += tell_limit(hang)
        return _of(evidence, found if found is not None and _saw(found) else _recorded(hang))
    if pace.stands and found is not None and not activities & _AT_WORK and _saw(found):
        found.evidence.append(_not_yet(looks))
        return _of(evidence, found)
    still = _text.real(evidence.look.get("still_seconds"))
    is_seen = found is not None and any(map(has_stack, looks))
    if still and found is not None and is_seen and not activities & _AT_WORK and _saw(found):
        found.sure = Sure.LIKELY if found.sure is Sure.CERTAIN else found.sure
        found.evidence.append(
            f"its steps are not counted: in the last {_text.duration(still)} it did nothing"
        )
        return _of(evidence, found)
    reasons = find_reasons(looks, disturbed, _compiled_lately(evidence.beat))
    if (late := tell_straggler(_straggler(evidence))) is not None:
        reasons.insert(0, late)
    if not (pace.is_slow or hang):
        reasons = [each for each in reasons if each.is_enough or pace.may_be_slow]
        if not reasons:
            return _running(evidence, pace, looks, disturbed)
    return _slow(evidence, pace, looks, disturbed, reasons)


def _see_full_shm(evidence: Evidence, found: HangFinding) -> None:
    """A worker that could not send a batch goes on; the trainer waits for that batch for ever."""
    sign = next((each for each in reversed(evidence.signs) if each.kind == "shm_full"), None)
    if sign is None:
        return
    found.cause, found.sure = Cause.SHM_FULL, Sure.LIKELY
    what = "/dev/shm was full, and a worker of the data loader could not hand over a batch"
    found.sentence = f"{what}: {found.sentence[:1].lower()}{found.sentence[1:]}"
    found.evidence.insert(0, f"it printed: {_text.one_line(sign.text)}")
    found.advice = list(LARGER_SHM)


def _straggler(evidence: Evidence) -> Record:
    """As the last heartbeat has it, else the journal."""
    told = _text.record(evidence.beat.get("straggler"))
    noted = (each for each in reversed(evidence.journal) if each.get("event") == "straggler")
    return told or next(noted, {})


def _not_yet(looks: list[Record]) -> str:
    limits = [limit for look in looks if (limit := _text.real(look.get("patience"))) is not None]
    until = f" before {_text.duration(max(limits))} are over" if limits else " yet"
    return f"the watch over hangs does not call it one{until}"


def _open_hang(evidence: Evidence, looks: list[Record]) -> Record:
    """The hang that has been found and is not over; its whole record where there is one."""
    record, told = evidence.hang, _text.record(evidence.beat.get("hang"))
    if not record or record.get("ended") is not None:
        return told
    if told or not _is_over(record, evidence.beat, looks):
        return record
    return {}


def _is_over(record: Record, beat: Record, looks: list[Record]) -> bool:
    """Whether a step was made since, which its keeper may not have noted yet."""
    began, found = _text.real(record.get("began")), _text.real(record.get("found"))
    passed = [
        moment - age
        for look in looks
        if (moment := _text.real(look.get("time"))) is not None
        and (age := _text.real(look.get("boundary_age"))) is not None
    ]
    if passed and began is not None:
        return min(passed) > began + _SAME_SECONDS
    written = _text.real(beat.get("time"))
    return written is None or found is None or written > found


def _saw(found: HangFinding) -> bool:
    return found.sure is not Sure.UNKNOWN


def _recorded(hang: Record) -> HangFinding:
    """What the watch has found, where no fresh look could be had."""
    if _text.records(hang.get("looks")):
        return explain_strictly(hang)
    try:
        cause = Cause(hang.get("cause"))
    except ValueError:
        cause = Cause.UNKNOWN
    sentence = _text.one_line(_text.text(hang.get("sentence")), 600) or "It makes no step."
    return HangFinding(cause, sentence, Sure.LIKELY, ["by the run's own watch over hangs"])


def _paused(paused: Record) -> HangFinding:
    by, rank = _text.text(paused.get("by")) or "a debugger", _text.whole(paused.get("rank"))
    who = f"Rank {rank}" if rank else "It"
    return HangFinding(
        Cause.DEBUGGER,
        f"{who} is held by {by}. Let it go on there, and the training goes on.",
        Sure.CERTAIN,
        ["by the heartbeat of the run"],
        ["Let it go on there (c in pdb), and the training goes on."],
        rank or None,
    )


def _of(evidence: Evidence, found: HangFinding) -> Verdict:
    advice = list(found.advice)
    if found.cause not in _HELD and evidence.kind == "run":
        advice.append("Every thread of every process: holdfast stacks RUN --all")
        if found.cause is not Cause.SLOW:
            advice.append(
                "To have such a run ended and started again by itself: "
                "holdfast run --hang-timeout auto -- COMMAND"
            )
    return _verdict(
        evidence, found.cause, found.sentence, found.sure, found.evidence, advice, found
    )


def _slow(
    evidence: Evidence,
    pace: _Pace,
    looks: list[Record],
    disturbed: list[str],
    reasons: list[Reason],
) -> Verdict:
    told = merge_looks(looks)[:_MOST_LINES] if looks else []
    advice = [f"{reason.hint}." for reason in reasons]
    sure = Sure.LIKELY
    measured = _times(pace) if pace.is_slow or pace.may_be_slow else ""
    if reasons:
        because = f"{reasons[0].because}. {reasons[0].hint}."
        said = f"It is slow: {measured}; {because}" if measured else f"It is slow: {because}"
        told = [*(reason.because for reason in reasons), *told]
    elif measured:
        said = f"It is slow: {measured}, and nothing is seen that would explain it."
        sure = Sure.UNKNOWN
    else:
        said = "It was taken for hanging, and is at work."
    if not reasons:
        pid = next((look.get("pid") for look in looks), None)
        advice.append(f"See where it spends its time: py-spy top --pid {pid or 'PID'}")
    told += _sizes(evidence, disturbed)
    if pace.measure:
        told.append(f"undisturbed, a step of it took {_text.duration(pace.measure)}")
    return _verdict(evidence, Cause.SLOW, said, sure, told, advice)


def _times(pace: _Pace) -> str:
    now, usual = pace.current or 0.0, pace.measure or 1.0
    taking = "the step under way has taken" if now == pace.age else "a step takes"
    times = now / usual
    shown = f"{times:.0f}" if times >= 9.5 else f"{times:.1f}"
    return f"{taking} {_text.duration(now)}, {shown} times its usual {_text.duration(usual)}"


def _running(evidence: Evidence, pace: _Pace, looks: list[Record], disturbed: list[str]) -> Verdict:
    step, sure = _text.whole(evidence.beat.get("step")), Sure.CERTAIN
    said = "It has not ended: it is running" + ("" if step is None else f", at step {step}")
    phase = _text.text(evidence.beat.get("phase"))
    if phase and pace.rests:
        said += f", in the phase {_text.one_line(phase, 60)}"
    elif pace.now:
        as_ever = ", as ever" if pace.measure and not pace.may_be_slow else ""
        if pace.best and pace.now > _SLOW_TIMES * pace.best:
            as_ever = f"; in its fastest time it was {_text.duration(pace.best)}"
        said += f", with {_text.duration(pace.now)} a step{as_ever}"
    elif evidence.kind != "run" and looks and activity_of(looks[0]) not in _AT_WORK:
        # Its steps are not counted, so this may last.
        said += f"; just now it {what_holds(looks[0]).words}"
        sure = Sure.LIKELY
    told: list[str] = []
    process = _text.record(evidence.process)
    if state := _text.text(process.get("state")):
        told.append(f"its state is {_text.one_line(state, 80)}")
    told += merge_looks(looks)[:_MOST_LINES] if looks else []
    advice = ["To look at it: holdfast status RUN"] if evidence.kind == "run" else []
    sizes = _sizes(evidence, disturbed)
    if sizes:
        said += f"; {sizes[0]}"
        advice += [f"{let_go(name)}." for name in named_best(disturbed)][:2]
    told += sizes
    told += [f"{name} is at work in it" for name in disturbed]
    return _verdict(evidence, Cause.RUNNING, f"{said}.", sure, told, advice)


def _sizes(evidence: Evidence, disturbed: list[str]) -> list[str]:
    """Its memory against that of its own undisturbed time."""
    memory = _text.record(_text.record(evidence.beat.get("pace")).get("memory"))
    said = larger(_text.real(memory.get("usual")), _text.real(memory.get("now")), disturbed)
    return [said] if said else []


def _pace_of(beat: Record, looks: list[Record]) -> _Pace:
    """Of the whole run; of several ranks that of the slowest."""
    whole = _text.record(beat.get("pace"))
    parts = [whole, *(_text.record(r.get("pace")) for r in _text.records(beat.get("ranks")))]
    usual = [u for p in parts if (u := _text.real(p.get("usual"))) is not None]
    best = [b for p in parts if (b := _text.real(p.get("best"))) is not None]
    usual += [u for k in looks if (u := _text.real(k.get("usual_step_seconds"))) is not None]
    now = [n for p in parts if (n := _text.real(p.get("now"))) is not None]
    ages = [a for look in looks if (a := _text.real(look.get("boundary_age"))) is not None]
    if not looks and (age := _text.real(beat.get("boundary_age_seconds"))) is not None:
        ages = [age]
    rests = any(
        look.get("rests") or look.get("work") or look.get("in_loop") is False for look in looks
    )
    return _Pace(
        min(usual, default=None),
        min(best, default=None),
        max(now, default=None),
        max(ages, default=None),
        bool(rests or _text.text(beat.get("phase"))),
    )


def _disturbed(beat: Record, looks: list[Record]) -> list[str]:
    found: dict[str, None] = {}
    pace = _text.record(beat.get("pace"))
    for names in (pace.get("disturbed"), *(look.get("disturbed") for look in looks)):
        for name in names if isinstance(names, list) else []:
            found[_text.one_line(_text.text(name), 40)] = None
    return [name for name in found if name]


def _compiled_lately(beat: Record) -> int | None:
    return _text.whole(_text.record(beat.get("pace")).get("compiles_lately"))


def _verdict(
    evidence: Evidence,
    cause: Cause,
    sentence: str,
    sure: Sure,
    told: list[str],
    advice: list[str],
    found: HangFinding | None = None,
) -> Verdict:
    beat = evidence.beat
    return Verdict(
        cause,
        sentence,
        sure,
        tuple(dict.fromkeys([*told, *evidence.notes])),
        tuple(dict.fromkeys(advice)),
        rank=None if found is None else found.rank,
        host=_host(evidence, found),
        step=_text.whole(beat.get("step")),
        durable_step=_text.whole(beat.get("durable_step")),
        others=() if found is None else tuple(found.others),
        restart=restart_after(cause),
    )


def _host(evidence: Evidence, found: HangFinding | None) -> str | None:
    """Of the rank to blame; else of the first."""
    looks = _text.records(evidence.look.get("looks"))
    guilty = [each for each in looks if found is not None and each.get("rank") == found.rank]
    lease = _text.record(evidence.lease.get("process"))
    known = [_text.text(each.get("host")) for each in (*guilty, lease, *looks)]
    return next((host for host in known if host), None)
