"""A run that has not ended: does it make progress at its usual pace, and if not, what holds it?

It goes by the heartbeat, and by a fresh inspection of all processes where there is one. The
measure is always the run itself: the steps that it made while nothing disturbed it.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    ThreadStanding,
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
        name_dead_thread(found, evidence.signs)
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
    # A process that computes on one line hangs, too.
    if hang and not moves:
        if found is not None:
            found.evidence += tell_limit(hang)
        return _of(evidence, found if found is not None and _saw(found) else _recorded(hang))
    if pace.stands and found is not None and not activities & _AT_WORK and _saw(found):
        found.evidence.append(_not_yet(looks))
        return _of(evidence, found)
    still = _text.real(evidence.look.get("still_seconds"))
    is_seen = found is not None and any(map(has_stack, looks))
    # The store of a rendezvous polls while its process only waits.
    is_meeting = any(standing_of(look).kind == "rendezvous" for look in looks)
    is_still = is_meeting or not activities & _AT_WORK
    if still and found is not None and is_seen and is_still and _saw(found):
        found.sure = Sure.LIKELY if found.sure is Sure.CERTAIN else found.sure
        found.evidence.append(
            f"its steps are not counted: in the last {_text.duration(still)} it did nothing"
        )
        return _of(evidence, found)
    lately = _text.whole(_text.record(beat.get("pace")).get("compiles_lately"))
    reasons = find_reasons(looks, disturbed, lately)
    if (late := tell_straggler(_straggler(evidence))) is not None:
        reasons.insert(0, late)
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


def _straggler(evidence: Evidence) -> Record:
    told = _text.record(evidence.beat.get("straggler"))
    noted = (each for each in reversed(evidence.journal) if each.get("event") == "straggler")
    return told or next(noted, {})


def _not_yet(looks: list[Record]) -> str:
    limits = _reals(looks, "patience")
    until = f" before {_text.duration(max(limits))} are over" if limits else " yet"
    return f"the watch over hangs does not call it one{until}"


def _open_hang(evidence: Evidence, looks: list[Record]) -> Record:
    """The hang that was found and is not over."""
    record, told = evidence.hang, _text.record(evidence.beat.get("hang"))
    if not record or record.get("ended") is not None:
        return told
    if told or not _is_over(record, evidence.beat, looks):
        return record
    return {}


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


def _saw(found: HangFinding) -> bool:
    return found.sure is not Sure.UNKNOWN


def _recorded(hang: Record) -> HangFinding:
    """The finding of the watch, without a fresh inspection."""
    if _text.records(hang.get("looks")):
        return explain_strictly(hang)
    found = as_told(hang)
    found.evidence, found.advice = ["by the run's own watch over hangs"], []
    return found


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
    return HangFinding(Cause.SLOW, said, sure, told, advice)


def _times(pace: _Pace) -> str:
    now, usual = pace.current or 0.0, pace.measure or 1.0
    taking = "the step in progress has taken" if now == pace.age else "a step takes"
    times = now / usual
    shown = f"{times:.0f}" if times >= 9.5 else f"{times:.1f}"
    return f"{taking} {_text.duration(now)}, {shown} times its usual {_text.duration(usual)}"


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
    return HangFinding(Cause.RUNNING, f"{said}.", sure, told, advice)


def _sizes(evidence: Evidence, disturbed: list[str]) -> list[str]:
    memory = _text.record(_text.record(evidence.beat.get("pace")).get("memory"))
    said = larger(_text.real(memory.get("usual")), _text.real(memory.get("now")), disturbed)
    return [said] if said else []


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
    found: dict[str, None] = {}
    pace = _text.record(beat.get("pace"))
    for names in (pace.get("disturbed"), *(look.get("disturbed") for look in looks)):
        for name in names if isinstance(names, list) else []:
            found[_text.one_line(_text.text(name), 40)] = None
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


def find_reasons(looks: list[Record], disturbed: list[str], lately: int | None) -> list[Reason]:
    """What slows it, the most certain first; `lately`: recent compilations of torch.compile."""
    found: list[Reason] = []
    for look in looks:
        held = what_holds(look)
        if held.cause is Cause.SLOW and "swap" in held.words:
            found.append(Reason(f"{_subject(look, looks)} {held.words}", held.hint, is_enough=True))
    found += (Reason(f"{name} is at work in it", let_go(name)) for name in named_best(disturbed))
    computing = [reason for look in looks if (reason := _computes_far(look, _subject(look, looks)))]
    found += computing
    for look in looks:
        # Its own work takes the time then, and the other ranks wait for it.
        if not computing:
            found += (reason for reason in _of_cores(look, looks) if reason is not None)
        found += (reason for reason in _of_look(look, looks, lately) if reason is not None)
    return list(dict.fromkeys(found))


def named_best(disturbed: list[str]) -> list[str]:
    """What slows it, without the means that another of them uses."""
    slowing = [name for name in disturbed if name != _HARMLESS]
    by_others = {
        means
        for means, users in _MEANS.items()
        if means in slowing and any(user in slowing for user in users)
    }
    return [name for name in slowing if name not in by_others]


def _of_cores(look: Record, looks: list[Record]) -> list[Reason | None]:
    subject = _subject(look, looks)
    return [
        _out_of_quota(look, subject),
        _too_many_threads(look, _who(look, looks)) or _crowded_out(look, subject),
        _on_a_crowded_machine(look),
    ]


def _of_look(look: Record, looks: list[Record], lately: int | None) -> list[Reason | None]:
    standing = standing_of(look)
    who = _who(look, looks)
    return [
        _recompiles(look, standing, who, lately),
        _waits_for_data(look, standing, _subject(look, looks)),
    ]


def _too_many_threads(look: Record, who: str) -> Reason | None:
    cores = _text.whole(look.get("cores")) or 0
    busy = 0
    for process in _text.records(look.get("processes")):
        # Not by computed time: many threads live only for one step.
        busy += sum(t.get("state") == "R" for t in _text.records(process.get("threads")))
    if not cores or busy < 2 * cores:
        return None
    told = f"{who}{busy} threads of it want to run on {_text.count(cores, 'core')}"
    each = max(1, cores // max(1, len(_text.records(look.get("processes")))))
    return Reason(
        told,
        f"Let it use fewer: OMP_NUM_THREADS={each}, torch.set_num_threads, fewer workers",
        is_enough=busy >= _FAR_TOO_MANY * cores,
    )


def _out_of_quota(look: Record, subject: str) -> Reason | None:
    quota = _text.record(look.get("cpu_quota"))
    share, cores = _text.real(quota.get("throttled")) or 0.0, _text.real(quota.get("cores"))
    if cores is None or share < _THROTTLED_SHARE:
        return None
    return Reason(
        f"{subject} may use {cores:g} cores (the quota of its cgroup), and had used them up in "
        f"{share:.0%} of the periods",
        "Raise the quota: docker run --cpus=…, in Kubernetes resources.limits.cpu; or use fewer "
        "threads and workers",
    )


def _on_a_crowded_machine(look: Record) -> Reason | None:
    load, cores = _text.real(look.get("load")), _text.whole(look.get("cores"))
    if load is None or not cores or load < _FAR_TOO_MANY * cores:
        return None
    if _waited_share(look) < _LOADED_SHARE:
        return None  # a process that sleeps is not slowed by the others
    return Reason(
        f"the machine has a load of {load:.0f} on {_text.count(cores, 'core')}",
        "See who computes there (top), and let them run elsewhere",
    )


def _waited_share(look: Record) -> float:
    """The share of the time in which it was ready to run and had no processor."""
    shares = [*map(waiting_share, _text.records(look.get("processes")))]
    age, waited = _text.real(look.get("boundary_age")), _text.real(look.get("step_waited"))
    if age is not None and waited is not None and age > _LONG_SECONDS:
        shares.append(waited / age)
    return max(shares, default=0.0)


def _computes_far(look: Record, subject: str) -> Reason | None:
    """It computes itself, far longer than a step of it took: no lack of processors explains it."""
    ran, usual = _text.real(look.get("step_cpu")), _text.real(look.get("usual_step_seconds"))
    if ran is None or not usual or ran < max(_FAR_COMPUTED_TIMES * usual, _LONG_SECONDS):
        return None
    if not is_computing(look):
        return None
    at = standing_of(look).at
    return Reason(
        f"{subject} has computed for {_text.duration(ran)} in this step, and is now{at}",
        "See whether that work can end, or is only long: "
        f"py-spy top --pid {trainer_of(look).get('pid')}",
    )


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


def tell_straggler(found: Record) -> Reason | None:
    """The rank that the others wait for in each step."""
    rank, late = _text.whole(found.get("rank")), _text.real(found.get("seconds"))
    if rank is None or late is None:
        return None
    host = _text.one_line(_text.text(found.get("host")), 60)
    where = f" on {host}" if host else ""
    return Reason(
        f"rank {rank}{where} comes {_text.duration(late)} later than the others in each step",
        "See what else runs there, and what its data and its GPU do",
    )


def _crowded_out(look: Record, subject: str) -> Reason | None:
    share = max(map(waiting_share, _text.records(look.get("processes"))), default=0.0)
    if share < _CROWDED_SHARE:
        return None
    return Reason(
        f"{subject} waits for a processor {share:.0%} of the time: other processes have them",
        "See which they are (top), and let them run elsewhere, or give it cores of its own",
    )


def _recompiles(
    look: Record, standing: ThreadStanding, who: str, lately: int | None
) -> Reason | None:
    made = _text.whole(look.get("compiles")) or 0
    is_compiling = standing.kind == "compile"
    if not (lately or 0) >= _MOST_COMPILES and not (is_compiling and made > _MOST_COMPILES):
        return None
    at = standing.at if is_compiling else ""
    often = f", {lately} of them recently" if lately else ""
    return Reason(
        f"{who}torch.compile makes code again and again{at}: {made} pieces so far{often}",
        "See why: TORCH_LOGS=recompiles; pad the batches, or torch.compile(…, dynamic=True)",
        is_enough=True,
    )


def _waits_for_data(look: Record, standing: ThreadStanding, subject: str) -> Reason | None:
    if standing.kind != "loader":
        return None
    held = what_holds(look)
    hint = held.hint if held.cause is Cause.SLOW else "More workers, or less work for each sample"
    return Reason(f"{subject} {held.words}", hint)


def larger(usual: float | None, now: float | None, disturbed: list[str]) -> str:
    """How much larger it is than while nothing disturbed it; empty if it is not."""
    blamed = [name for name in disturbed if name in _LARGE]
    if not usual or not now or not blamed or now < _MUCH_LARGER * usual:
        return ""
    return f"it has {_text.size(now)} instead of {_text.size(usual)} because of {_listed(blamed)}"


def let_go(name: str) -> str:
    return _REMEDIES.get(name, "Take it out again")


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _subject(look: Record, looks: list[Record]) -> str:
    return _who(look, looks).removesuffix(": ") or "it"


def _who(look: Record, looks: list[Record]) -> str:
    rank = _text.whole(look.get("rank"))
    return "" if len(looks) < 2 or rank is None else f"rank {rank}: "
