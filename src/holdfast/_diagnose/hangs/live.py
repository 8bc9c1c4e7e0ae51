"""A run that has not ended: does it make progress at its usual pace, and if not, what holds it?

It goes by the heartbeat, and by a fresh inspection of all processes where there is one. The
measure is always the run itself: the steps that it made while nothing disturbed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from holdfast import _text
from holdfast._diagnose.advice import LARGER_SHM
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.hangs.explain import (
    HangFinding,
    as_told,
    explain_strictly,
    name_dead_thread,
    tell_limit,
)
from holdfast._diagnose.hangs.process import has_stack, is_computing, what_holds
from holdfast._diagnose.hangs.stacks import (
    WAITS_FOR_RANKS,
    merge_looks,
    standing_of,
    trainer_of,
)
from holdfast._diagnose.verdict import Cause, Sure, Verdict, restart_after
from holdfast._environment.processes.activity import (
    Activity,
    activity_of,
    loop_of,
    waiting_share,
)

Record = dict[str, Any]

_HELD = (Cause.DEBUGGER, Cause.FROZEN, Cause.STOPPED)
_SLOW_TIMES = 3.0
_FAR_TIMES = 15.0  # of its best: no phase of a training is so much slower
_SLOWED_TIMES = 1.3  # where something is seen that slows it
_SLOW_SECONDS = 0.05  # a smaller difference is not worth a word
_LONG_SECONDS = 2.0  # of one step: a busy machine makes single steps longer
_STANDS_TIMES = 10.0
_STANDS_SECONDS = 5.0
_UNMEASURED_SECONDS = 60.0  # of a step, of which no other was measured
_UNKNOWN_SECONDS = 20.0
_AT_WORK = {Activity.MOVING, Activity.BUSY}
_SAME_SECONDS = 1.0  # by which two clocks of one boundary may differ
_MOST_LINES = 8


@dataclass
class _Pace:
    """The time of a step: now, and while nothing disturbed it."""

    usual: float | None = None  # recently
    best: float | None = None  # of the fastest time of this attempt
    now: float | None = None
    age: float | None = None  # of the step in progress
    rests: bool = False  # in a phase, or in work of holdfast: no step is due

    @property
    def current(self) -> float | None:
        """The time of a step now; the step in progress counts if it is long already."""
        known = [self.now] if self.now else []
        if self.age is not None and self.age > _LONG_SECONDS and not self.rests:
            known.append(self.age)
        return max(known, default=None)

    @property
    def is_slow(self) -> bool:
        """Whether a step takes much longer than recently."""
        if self.best and self.current and self.current > _FAR_TIMES * self.best + _SLOW_SECONDS:
            return True  # the usual time may have become slow as well
        if not self.usual or self.current is None:
            return False
        return self.current > max(_SLOW_TIMES * self.usual, self.usual + _SLOW_SECONDS)

    @property
    def measure(self) -> float | None:
        known = [each for each in (self.usual, self.best) if each]
        return min(known, default=None)

    @property
    def may_be_slow(self) -> bool:
        """Whether it was faster before: with a reason for it, that makes it slow."""
        measure = self.measure
        return bool(measure and self.current and self.current > _SLOWED_TIMES * measure)

    @property
    def stands(self) -> bool:
        if self.rests or self.age is None:
            return False
        if not self.usual:  # too few steps to know
            return self.age > _UNKNOWN_SECONDS
        return self.age > max(_STANDS_SECONDS, _STANDS_TIMES * self.usual)


def judge_live(evidence: Evidence) -> Verdict:
    found, beat = _find(evidence), evidence.beat
    return Verdict(
        found.cause,
        found.sentence,
        found.sure,
        tuple(dict.fromkeys([*found.evidence, *evidence.notes])),
        tuple(dict.fromkeys(found.advice)),
        rank=found.rank,
        host=_host(evidence, found),
        step=_text.whole(beat.get("step")),
        durable_step=_text.whole(beat.get("durable_step")),
        others=tuple(found.others),
        restart=restart_after(found.cause),
    )


def _find(evidence: Evidence) -> HangFinding:
    beat, looks = evidence.beat, _text.records(evidence.look.get("looks"))
    found = explain_strictly(evidence.look) if looks else None
    if found is not None:
        name_dead_thread(found, evidence.signs, evidence.journal)
    if found is not None and found.cause in _HELD:
        return _of(evidence, found)
    if found is not None and found.cause is Cause.HANG_LOADER:
        _see_full_shm(evidence, found)
    if (paused := _text.record(beat.get("paused"))) and not looks:
        return _of(evidence, _paused(paused))
    pace, disturbed = _pace_of(beat, looks), _disturbed(beat, looks)
    activities = {activity_of(look) for look in looks}
    # One that moves in one function only computes there.
    moves = any(activity_of(look) is Activity.MOVING and not loop_of(look) for look in looks)
    hang = _open_hang(evidence, looks)
    told = found if found is not None and found.sure is not Sure.UNKNOWN else None
    # A process that computes on one line hangs, too.
    if hang and not moves:
        if found is not None:
            found.evidence += tell_limit(hang)
        return _of(evidence, told or _recorded(hang))
    if told is not None and pace.stands and not activities & _AT_WORK:
        limits = _reals(looks, "patience")
        until = f" before {_text.duration(max(limits))} are over" if limits else " yet"
        told.evidence.append(f"the watch over hangs does not call it one{until}")
        return _of(evidence, told)
    still = _text.real(evidence.look.get("still_seconds"))
    # The store of a rendezvous polls while its process only waits.
    is_meeting = any(standing_of(look).kind == "rendezvous" for look in looks)
    is_still = still and (is_meeting or not activities & _AT_WORK)
    if told is not None and still and is_still and any(map(has_stack, looks)):
        told.sure = Sure.LIKELY if told.sure is Sure.CERTAIN else told.sure
        said = f"in the last {_text.duration(still)} it did nothing"
        told.evidence.append(f"its steps are not counted: {said}")
        return _of(evidence, told)
    lately = _text.whole(_text.record(beat.get("pace")).get("compiles_lately"))
    reasons = [*_straggler(evidence), *_find_reasons(looks, disturbed, lately)]
    if not (pace.is_slow or hang):
        reasons = [each for each in reasons if each.is_enough or pace.may_be_slow]
        if not reasons:
            return _running(evidence, pace, looks, disturbed)
    if not reasons:
        reasons = _find_waits(looks)
    return _slow(evidence, pace, looks, disturbed, reasons)


def _see_full_shm(evidence: Evidence, found: HangFinding) -> None:
    """A worker that could not send a batch goes on, and the trainer waits for it forever."""
    sign = next((each for each in reversed(evidence.signs) if each.kind == "shm_full"), None)
    if sign is None:
        return
    found.cause, found.sure = Cause.SHM_FULL, Sure.LIKELY
    what = "/dev/shm was full, and a worker of the data loader could not hand over a batch"
    found.sentence = f"{what}: {found.sentence[:1].lower()}{found.sentence[1:]}"
    found.evidence.insert(0, f"it printed: {_text.one_line(sign.text)}")
    found.advice = list(LARGER_SHM)


def _open_hang(evidence: Evidence, looks: list[Record]) -> Record:
    """The hang that was found and is not over."""
    record, told = evidence.hang, _text.record(evidence.beat.get("hang"))
    if not record or record.get("ended") is not None:
        return told
    return record if told or not _is_over(record, evidence.beat, looks) else {}


def _is_over(record: Record, beat: Record, looks: list[Record]) -> bool:
    """Whether a step was made since, which its keeper may not have recorded yet."""
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


def _recorded(hang: Record) -> HangFinding:
    """The finding of the watch, without a fresh inspection."""
    if _text.records(hang.get("looks")):
        return explain_strictly(hang)
    told = ["by the run's own watch over hangs"]
    return replace(as_told(hang), evidence=told, advice=[])


def _paused(paused: Record) -> HangFinding:
    by, rank = _text.text(paused.get("by")) or "a debugger", _text.whole(paused.get("rank"))
    who = f"Rank {rank}" if rank else "It"
    said = f"{who} is held by {by}. Let it go on there, and the training goes on."
    advice = ["Let it go on there (c in pdb), and the training goes on."]
    told = ["by the heartbeat of the run"]
    return HangFinding(Cause.DEBUGGER, said, Sure.CERTAIN, told, advice, rank or None)


def _of(evidence: Evidence, found: HangFinding) -> HangFinding:
    """A hang, with the commands for a run that hangs."""
    if found.cause not in _HELD and evidence.kind == "run":
        found.advice.append("Every thread of every process: holdfast stacks RUN --all")
        if found.cause is not Cause.SLOW:
            found.advice.append(
                "To have such a run ended and started again by itself: "
                "holdfast run --hang-timeout auto -- COMMAND"
            )
    return found


def _slow(
    evidence: Evidence,
    pace: _Pace,
    looks: list[Record],
    disturbed: list[str],
    reasons: list[Reason],
) -> HangFinding:
    measured = _times(pace) if pace.is_slow or pace.may_be_slow else ""
    sure = Sure.LIKELY if reasons or not measured else Sure.UNKNOWN
    if reasons:
        because = f"{reasons[0].because}. {reasons[0].hint}."
        said = f"It is slow: {measured}; {because}" if measured else f"It is slow: {because}"
        advice = [f"{reason.hint}." for reason in reasons]
    else:
        said = f"It is slow: {measured}, and nothing is seen that would explain it."
        said = said if measured else "It was taken for hanging, and is at work."
        pid = next((look.get("pid") for look in looks), None)
        advice = [f"See where it spends its time: py-spy top --pid {pid or 'PID'}"]
    told = [*(reason.because for reason in reasons), *_standings(looks)]
    told += _sizes(evidence, disturbed)
    if pace.measure:
        told.append(f"undisturbed, a step of it took {_text.duration(pace.measure)}")
    return HangFinding(Cause.SLOW, said, sure, told, advice)


def _standings(looks: list[Record]) -> list[str]:
    return merge_looks(looks)[:_MOST_LINES] if looks else []


def _times(pace: _Pace) -> str:
    now, usual = pace.current or 0.0, pace.measure or 1.0
    taking = "the step in progress has taken" if now == pace.age else "a step takes"
    times = f"{now / usual:.{0 if now / usual >= 9.5 else 1}f}"
    return f"{taking} {_text.duration(now)}, {times} times its usual {_text.duration(usual)}"


def _running(
    evidence: Evidence, pace: _Pace, looks: list[Record], disturbed: list[str]
) -> HangFinding:
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
    elif pace.age and pace.age > _UNMEASURED_SECONDS and not pace.rests:
        said += f"; this step has taken {_text.duration(pace.age)}, and its usual time is not known"
        sure = Sure.LIKELY
    elif evidence.kind != "run" and looks and activity_of(looks[0]) not in _AT_WORK:
        # Its steps are not counted, so this may last.
        said += f"; just now it {what_holds(looks[0]).words}"
        sure = Sure.LIKELY
    state = _text.one_line(_text.text(_text.record(evidence.process).get("state")), 80)
    told = [*([f"its state is {state}"] if state else []), *_standings(looks)]
    advice = ["To look at it: holdfast status RUN"] if evidence.kind == "run" else []
    for size in _sizes(evidence, disturbed):
        said += f"; {size}"
        told.append(size)
        advice += [f"{_let_go(name)}." for name in _slowing(disturbed)][:2]
    told += [f"{name} is at work in it" for name in disturbed]
    return HangFinding(Cause.RUNNING, f"{said}.", sure, told, advice)


def _pace_of(beat: Record, looks: list[Record]) -> _Pace:
    """Of the whole run; of several ranks that of the slowest."""
    whole = _text.record(beat.get("pace"))
    parts = [whole, *(_text.record(r.get("pace")) for r in _text.records(beat.get("ranks")))]
    usual = _reals(parts, "usual") + _reals(looks, "usual_step_seconds")
    ages = _reals(looks, "boundary_age") if looks else _reals([beat], "boundary_age_seconds")
    rests = any(
        look.get("rests") or look.get("work") or look.get("in_loop") is False for look in looks
    )
    return _Pace(
        min(usual, default=None),
        min(_reals(parts, "best"), default=None),
        max(_reals(parts, "now"), default=None),
        max(ages, default=None),
        bool(rests or _text.text(beat.get("phase"))),
    )


def _reals(records: list[Record], key: str) -> list[float]:
    return [value for each in records if (value := _text.real(each.get(key))) is not None]


def _disturbed(beat: Record, looks: list[Record]) -> list[str]:
    lists = (each.get("disturbed") for each in (_text.record(beat.get("pace")), *looks))
    names = (name for each in lists if isinstance(each, list) for name in each)
    found = dict.fromkeys(_text.one_line(_text.text(name), 40) for name in names)
    return [name for name in found if name]


def _host(evidence: Evidence, found: HangFinding) -> str | None:
    looks = _text.records(evidence.look.get("looks"))
    guilty = [each for each in looks if each.get("rank") == found.rank]
    lease = _text.record(evidence.lease.get("process"))
    known = [_text.text(each.get("host")) for each in (*guilty, lease, *looks)]
    return next((host for host in known if host), None)


# -- Why a run that makes progress is slow, or larger than before ----------------------------------

_HARMLESS = "a TensorBoard writer"  # in half of all runs
_LARGE = ("memory recording", "torch.profiler", "tracemalloc", _HARMLESS)
_MOST_COMPILES = 8  # of one function, after which torch gives up on it
_MUCH_LARGER = 1.3
_FAR_TOO_MANY = 4  # threads for each core
_CROWDED_SHARE = 0.5  # of the time
_LOADED_SHARE = 0.2  # of the time: less does not explain that it is slow
_FAR_COMPUTED_TIMES = 10.0  # of a usual step
_THROTTLED_SHARE = 0.3  # of the periods of a quota

# The means that profilers and debuggers use.
_MEANS = {
    "sys.settrace": ("a debugger", "coverage"),
    "sys.setprofile": ("torch.profiler", "cProfile", "a profiler"),
}
_REMEDIES = {
    "sys.settrace": "Take the tracer out (sys.settrace, a debugger's or coverage's)",
    "sys.setprofile": "Take the profiler out (sys.setprofile)",
    "cProfile": "Profile a few steps only, or sample instead: py-spy record",
    "torch.profiler": "Give torch.profiler a schedule, so that it records a few steps only",
    "memory recording": "Record memory for a few steps only: _record_memory_history(enabled=None)",
    "a debugger": "Detach the debugger, or take its breakpoints out",
    "anomaly detection": "Take autograd's anomaly detection out again",
    "tracemalloc": "Take tracemalloc out again (PYTHONTRACEMALLOC, tracemalloc.stop())",
    "a tracer": "Detach gdb or strace",
    "coverage": "Run it without coverage",
    "a profiler": "Profile a few steps only",
}


@dataclass(frozen=True)
class Reason:
    """`because` continues after "It is slow: ", `hint` is the remedy."""

    because: str
    hint: str
    is_enough: bool = False  # to call it slow at any pace


def _find_reasons(looks: list[Record], disturbed: list[str], lately: int | None) -> list[Reason]:
    """What slows it, the most certain first; `lately`: recent compilations of torch.compile."""
    found: list[Reason] = []
    for look in looks:
        held = what_holds(look)
        if held.cause is Cause.SLOW and "swap" in held.words:
            found.append(Reason(f"{_subject(look, looks)} {held.words}", held.hint, is_enough=True))
    found += (Reason(f"{name} is at work in it", _let_go(name)) for name in _slowing(disturbed))
    computing = [each for look in looks for each in _computes_far(look, _subject(look, looks))]
    found += computing
    for look in looks:
        # Its own work takes the time then, and the other ranks wait for it.
        found += [] if computing else _of_cores(look, looks)
        found += _of_calls(look, looks, lately)
    return list(dict.fromkeys(found))


def _slowing(disturbed: list[str]) -> list[str]:
    """What slows it, without the means that another of them uses."""
    by_others = [means for means, users in _MEANS.items() if set(users) & set(disturbed)]
    return [name for name in disturbed if name != _HARMLESS and name not in by_others]


def _computes_far(look: Record, subject: str) -> Iterator[Reason]:
    """It computes itself, far longer than a step of it took: no lack of processors explains it."""
    ran, usual = _text.real(look.get("step_cpu")), _text.real(look.get("usual_step_seconds"))
    if ran is None or not usual or ran < max(_FAR_COMPUTED_TIMES * usual, _LONG_SECONDS):
        return
    if is_computing(look):
        at = standing_of(look).at
        yield Reason(
            f"{subject} has computed for {_text.duration(ran)} in this step, and is now{at}",
            "See whether that work can end, or is only long: "
            f"py-spy top --pid {trainer_of(look).get('pid')}",
        )


def _of_cores(look: Record, looks: list[Record]) -> Iterator[Reason]:
    """Too few cores for it: by a quota, by its own threads, or by other processes."""
    subject, processes = _subject(look, looks), _text.records(look.get("processes"))
    cores, load = _text.whole(look.get("cores")) or 0, _text.real(look.get("load")) or 0.0
    quota = _text.record(look.get("cpu_quota"))
    throttled, of = _text.real(quota.get("throttled")) or 0.0, _text.real(quota.get("cores"))
    if of is not None and throttled >= _THROTTLED_SHARE:
        yield Reason(
            f"{subject} may use {of:g} cores (the quota of its cgroup), and had used them up in "
            f"{throttled:.0%} of the periods",
            "Raise the quota: docker run --cpus=…, in Kubernetes resources.limits.cpu; or use "
            "fewer threads and workers",
        )
    # Not by computed time: many threads live only for one step.
    threads = [each for process in processes for each in _text.records(process.get("threads"))]
    busy = sum(each.get("state") == "R" for each in threads)
    waited = max(map(waiting_share, processes), default=0.0)
    if cores and busy >= 2 * cores:
        each = max(1, cores // max(1, len(processes)))
        yield Reason(
            f"{_who(look, looks)}{busy} threads of it want to run on {_text.count(cores, 'core')}",
            f"Let it use fewer: OMP_NUM_THREADS={each}, torch.set_num_threads, fewer workers",
            is_enough=busy >= _FAR_TOO_MANY * cores,
        )
    elif waited >= _CROWDED_SHARE:
        yield Reason(
            f"{subject} waits for a processor {waited:.0%} of the time: other processes have them",
            "See which they are (top), and let them run elsewhere, or give it cores of its own",
        )
    age, in_step = _text.real(look.get("boundary_age")), _text.real(look.get("step_waited"))
    if age is not None and in_step is not None and age > _LONG_SECONDS:
        waited = max(waited, in_step / age)
    # A process that sleeps is not slowed by the others.
    if cores and load >= _FAR_TOO_MANY * cores and waited >= _LOADED_SHARE:
        yield Reason(
            f"the machine has a load of {load:.0f} on {_text.count(cores, 'core')}",
            "See who computes there (top), and let them run elsewhere",
        )


def _of_calls(look: Record, looks: list[Record], lately: int | None) -> Iterator[Reason]:
    """torch.compile that compiles again and again, and a data loader that is slow."""
    standing, made = standing_of(look), _text.whole(look.get("compiles")) or 0
    is_compiling = standing.kind == "compile"
    if (lately or 0) >= _MOST_COMPILES or (is_compiling and made > _MOST_COMPILES):
        at = standing.at if is_compiling else ""
        often = f", {lately} of them recently" if lately else ""
        again = f"torch.compile makes code again and again{at}: {made} pieces so far{often}"
        hint = "See why: TORCH_LOGS=recompiles; pad the batches, or torch.compile(…, dynamic=True)"
        yield Reason(f"{_who(look, looks)}{again}", hint, is_enough=True)
    if standing.kind == "loader":
        held = what_holds(look)
        more = "More workers, or less work for each sample"
        hint = held.hint if held.cause is Cause.SLOW else more
        yield Reason(f"{_subject(look, looks)} {held.words}", hint)


def _find_waits(looks: list[Record]) -> list[Reason]:
    """What it waits for, if it sleeps and nothing else slows it; not the other ranks."""
    found = []
    for look in looks:
        kind = standing_of(look).kind
        if not kind or kind in WAITS_FOR_RANKS or is_computing(look):
            continue
        held = what_holds(look)
        if held.cause not in (*_HELD, Cause.SLOW, Cause.HANG_RANK):
            found.append(Reason(f"{_subject(look, looks)} {held.words}", held.hint))
    return found


def _straggler(evidence: Evidence) -> list[Reason]:
    """The rank that the others wait for in each step."""
    noted = (each for each in reversed(evidence.journal) if each.get("event") == "straggler")
    found = _text.record(evidence.beat.get("straggler")) or next(noted, {})
    rank, late = _text.whole(found.get("rank")), _text.real(found.get("seconds"))
    if rank is None or late is None:
        return []
    host = _text.one_line(_text.text(found.get("host")), 60)
    by = f"{_text.duration(late)} later than the others in each step"
    because = f"rank {rank}{f' on {host}' if host else ''} comes {by}"
    return [Reason(because, "See what else runs there, and what its data and its GPU do")]


def _sizes(evidence: Evidence, disturbed: list[str]) -> list[str]:
    """How much larger it is than while nothing disturbed it."""
    memory = _text.record(_text.record(evidence.beat.get("pace")).get("memory"))
    usual, now = _text.real(memory.get("usual")), _text.real(memory.get("now"))
    blamed = [name for name in disturbed if name in _LARGE]
    if not usual or not now or not blamed or now < _MUCH_LARGER * usual:
        return []
    names = f"{', '.join(blamed[:-1])} and {blamed[-1]}" if blamed[1:] else blamed[0]
    return [f"it has {_text.size(now)} instead of {_text.size(usual)} because of {names}"]


def _let_go(name: str) -> str:
    return _REMEDIES.get(name, "Take it out again")


def _subject(look: Record, looks: list[Record]) -> str:
    return _who(look, looks).removesuffix(": ") or "it"


def _who(look: Record, looks: list[Record]) -> str:
    rank = _text.whole(look.get("rank"))
    return "" if len(looks) < 2 or rank is None else f"rank {rank}: "
