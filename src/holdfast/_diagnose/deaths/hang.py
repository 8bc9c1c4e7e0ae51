"""An end because of a hang: the verdict is that of the hang, not of the kill. And lost runs."""

from __future__ import annotations

from holdfast import _errors, _text
from holdfast._diagnose import advice
from holdfast._diagnose.deaths.ranks import kind_of
from holdfast._diagnose.evidence.case import Case, Finding
from holdfast._diagnose.evidence.evidence import Evidence, Record
from holdfast._diagnose.evidence.memory import moved, read_use, tell_memory
from holdfast._diagnose.hangs.explain import HangFinding, as_told, explain, name_dead_thread
from holdfast._diagnose.hangs.stacks import WAITS_FOR_RANKS, read_thread
from holdfast._diagnose.verdict import Cause, Sure

_ENDED_BY_OTHERS = (-9, -15, -6)  # a kill, a cancel, NCCL's own watchdog


def open_hang(evidence: Evidence) -> Record:
    """The hang that was not over when it ended; empty if there was none."""
    for record in (evidence.hang, _text.record(_text.record(evidence.led).get("hang"))):
        if record and record.get("ended") is None:
            return record
    return {}


def judge_hung(case: Case) -> Finding | None:
    """It was ended because it hung, and its status says so."""
    hang = open_hang(case.evidence)
    records = (case.evidence.exit, _text.record(case.evidence.led))
    statuses = [case.end.status, *(_text.whole(each.get("status")) for each in records)]
    if not hang or (_errors.HUNG not in statuses and hang.get("by") != "leader"):
        return None
    return _of_hang(case, hang, Sure.CERTAIN, "it was then ended for that (--hang-timeout)")


def judge_hung_and_killed(case: Case) -> Finding | None:
    """It hung, and another process or a timeout of its own ended it."""
    hang, end = open_hang(case.evidence), case.end
    if not hang or moved(end.counters).kills:
        return None
    if end.status in _ENDED_BY_OTHERS and end.fault is None:
        return _of_hang(case, hang, Sure.LIKELY, f"it then ended by {end.signal}")
    if kind_of(end) in ("timeout", "peer_lost") and end.fault is not None:
        return _of_hang(case, hang, Sure.LIKELY, f"it then raised {end.fault.sentence(160)}")
    return None


def judge_stacks(case: Case) -> Finding | None:
    """By the stacks in its log, where no other line says why it ended."""
    sign = case.sign("stacks")
    if sign is None:
        return None
    threads = _text.records(sign.details["threads"])
    main = next(each for each in threads if each.get("is_main"))
    if read_thread(main).kind == "backward":  # the thread of autograd says what it waits for
        waiting = (each for each in threads if read_thread(each).kind in WAITS_FOR_RANKS)
        main = next(waiting, main)
    found = explain({"processes": [{"threads": [{**main, "is_main": True}]}]})
    found.sure = Sure.LIKELY
    found.evidence.append(f"by the stacks of {sign.details['by']} up to line {sign.line}")
    return found


def _of_hang(case: Case, hang: Record, sure: Sure, how: str) -> HangFinding:
    found = explain(hang)
    told = as_told(hang)
    if not _text.records(hang.get("looks")):
        found = told
    elif hang.get("by") != "leader" and told.cause is not Cause.UNKNOWN:
        # Its source line may have changed or be gone since.
        found.cause, found.sentence = told.cause, told.sentence
    found.sure = found.sure if found.sure is not Sure.CERTAIN else sure
    name_dead_thread(found, case.evidence.signs)
    found.evidence.append(how)
    found.advice += [
        f"Every thread of every process at that time: {_text_file(case)}",
        *advice.go_on(case),
    ]
    return found


def _text_file(case: Case) -> str:
    found = (path for path in case.evidence.files if path.name.startswith("hang"))
    return str(next((p for p in sorted(found, reverse=True)), "hang.txt in the run folder"))


def tell_hang(evidence: Evidence) -> list[str]:
    """That it hung when another cause ended it."""
    hang = open_hang(evidence)
    if not hang:
        return []
    sentence = _text.one_line(_text.text(hang.get("sentence")), 300)
    return [f"it hung then: {sentence}" if sentence else "it made no more steps then"]


# -- Ends that no process has recorded: the records stop -------------------------------------------

_GONE = (
    "`holdfast run` and its command ended together: a power cut, a container or a job step that "
    "was ended, or a kill of both."
)
_TOGETHER = (
    "Trainer and keeper were killed together: a container or a job step that was ended, or a kill "
    "of both."
)
_AT_ONCE = (
    "Everything of it ended at once: a power cut, a lost node, or a container or job step that was "
    "killed."
)
_OOM = (
    "Trainer and keeper were killed together, with nearly no memory left: most likely by the "
    "kernel's OOM killer (memory.oom.group, or a container's limit)."
)


def judge_lost(case: Case) -> Finding | None:
    """Trainer and keeper are both gone without a record: power, node, container, or one kill."""
    evidence, end, lost = case.evidence, case.end, advice.lost(case)
    if end.is_unreachable:
        sentence = f"{case.opening} cannot be reached: its machine or its network is gone."
        told = ["its keeper gave no sign for a minute, on no connection and in no file"]
        return Finding(Cause.MACHINE_LOST, sentence, Sure.LIKELY, told, lost)
    led = _text.record(evidence.led)
    if led and not end.is_recorded and not evidence.exit and led.get("ended") is None:
        told = ["the record of `holdfast run` has a beginning and no end"]
        return Finding(Cause.KILLED, _GONE, Sure.BY_EXCLUSION, told, lost)
    if evidence.kind != "run" or evidence.exit or end.is_recorded or end.fault is not None:
        return None
    if not evidence.lease and not evidence.beat:
        return None
    told = []
    last = _text.real(evidence.beat.get("time"))
    if last is not None:
        told.append(f"its last heartbeat is of {_text.clock(last)}, and no record is newer")
    sample = _text.record(evidence.beat.get("memory"))
    told += tell_memory([sample], last) if sample else []
    if evidence.run.has_rebooted:
        told.append("the machine has been started again since")
        sentence = "The machine went down with the run: a power cut, a crash or a restart."
        return Finding(Cause.MACHINE_LOST, sentence, Sure.CERTAIN, told, lost)
    if not evidence.beat:
        told.append("it had no keeper yet: it ended while it was being opened")
        sentence = f"{case.opening} ended while the run was being opened, and nothing says why."
        lines = advice.killed(case, knows_counters=False)
        return Finding(Cause.UNKNOWN, sentence, Sure.UNKNOWN, told, lines)
    told.append("trainer and keeper ended at the same time, so neither recorded the end")
    use = read_use(sample)
    if use.is_near_limit or use.is_machine_full:
        cause = Cause.OOM_CGROUP if use.is_near_limit else Cause.OOM_MACHINE
        lines = advice.host_memory(case, use, is_machine=cause is Cause.OOM_MACHINE)
        return Finding(cause, _OOM, Sure.LIKELY, told, lines)
    if evidence.run.is_here:
        told.append("the machine has not been started again since: it was not a power cut")
        return Finding(Cause.KILLED, _TOGETHER, Sure.BY_EXCLUSION, told, lost)
    return Finding(Cause.MACHINE_LOST, _AT_ONCE, Sure.BY_EXCLUSION, told, lost)
