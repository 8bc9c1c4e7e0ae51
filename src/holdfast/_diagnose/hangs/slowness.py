"""Why a run that gets on is slow, or larger than it was: what can be seen of it from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast import _text
from holdfast._diagnose.hangs.process import what_holds
from holdfast._diagnose.hangs.stacks import ThreadStanding, standing_of
from holdfast._diagnose.verdict import Cause
from holdfast._environment.processes.activity import waiting_share

Record = dict[str, Any]

BESIDE = "a TensorBoard writer"  # runs beside the training, in half of all runs
_LARGE = ("memory recording", "torch.profiler", "tracemalloc", "a TensorBoard writer")
_MOST_COMPILES = 8  # of one function, after which torch gives up on it
_MUCH_LARGER = 1.3
_FAR_TOO_MANY = 4  # threads for each core
_CROWDED_SHARE = 0.5  # of the time
_THROTTLED_SHARE = 0.3  # of the periods of a quota

# What profilers and debuggers use themselves.
_MEANS = {
    "sys.settrace": ("a debugger", "coverage"),
    "sys.setprofile": ("torch.profiler", "cProfile", "a profiler"),
}
_LET_GO = {
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
    """`because` goes on after "It is slow: ", `hint` is what to do."""

    because: str
    hint: str
    is_enough: bool = False  # to call it slow, whatever its pace


def find_reasons(looks: list[Record], disturbed: list[str], lately: int | None) -> list[Reason]:
    """All that slows it, the surest first; `lately`: pieces that torch.compile made of late."""
    found: list[Reason] = []
    for look in looks:
        held = what_holds(look)
        if held.cause is Cause.SLOW and "swap" in held.words:
            found.append(Reason(f"{_subject(look, looks)} {held.words}", held.hint, is_enough=True))
    found += (Reason(f"{name} is at work in it", let_go(name)) for name in named_best(disturbed))
    for look in looks:
        found += (reason for reason in _of_look(look, looks, lately) if reason is not None)
    return list(dict.fromkeys(found))


def named_best(disturbed: list[str]) -> list[str]:
    """What slows it, without the means by which another of them does it."""
    slowing = [name for name in disturbed if name != BESIDE]
    by_others = {
        means
        for means, users in _MEANS.items()
        if means in slowing and any(user in slowing for user in users)
    }
    return [name for name in slowing if name not in by_others]


def _of_look(look: Record, looks: list[Record], lately: int | None) -> list[Reason | None]:
    standing = standing_of(look)
    who = _who(look, looks)
    return [
        _out_of_quota(look, _subject(look, looks)),
        _too_many_threads(look, who) or _crowded_out(look, _subject(look, looks)),
        _on_a_crowded_machine(look),
        _recompiles(look, standing, who, lately),
        _waits_for_data(look, standing, _subject(look, looks)),
    ]


def _too_many_threads(look: Record, who: str) -> Reason | None:
    """More threads want to run than there are cores for."""
    cores = _text.whole(look.get("cores")) or 0
    busy = 0
    for process in _text.records(look.get("processes")):
        # Not by what each has computed: many live only for one step.
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
    """Its cgroup may use so many cores, and it wants more."""
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
    return Reason(
        f"the machine has a load of {load:.0f} on {_text.count(cores, 'core')}",
        "See who computes there (top), and let them run elsewhere",
    )


def tell_straggler(found: Record) -> Reason | None:
    """The rank that the others wait for in each step, as the run has measured it."""
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
    """It is ready to run, and other processes do."""
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
    """torch.compile at work again and again, for shapes or values that it has not seen."""
    made = _text.whole(look.get("compiles")) or 0
    is_compiling = standing.kind == "compile"
    if not (lately or 0) >= _MOST_COMPILES and not (is_compiling and made > _MOST_COMPILES):
        return None
    at = f" at {standing.place}" if is_compiling and standing.place else ""
    often = f", {lately} of them of late" if lately else ""
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
    """What to do about a disturbance."""
    return _LET_GO.get(name, "Take it out again")


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _subject(look: Record, looks: list[Record]) -> str:
    return _who(look, looks).removesuffix(": ") or "it"


def _who(look: Record, looks: list[Record]) -> str:
    rank = _text.whole(look.get("rank"))
    return "" if len(looks) < 2 or rank is None else f"rank {rank}: "
