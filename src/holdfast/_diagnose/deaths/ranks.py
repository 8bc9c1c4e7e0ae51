"""Among several ranks: the one to blame, and what the others then saw.

A rank that loses a peer fails at once, and its error may be the first. So an error that only says
that a peer was lost, or that a wait timed out, blames no rank. To blame is the rank that ended by
itself; without one, the rank that neither raised nor died while the others waited.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from holdfast import _errors, _text
from holdfast._diagnose import advice
from holdfast._diagnose.evidence.case import Case, End, Finding, ends_of, is_ended_by_launcher
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.hangs.stacks import name_ranks
from holdfast._diagnose.texts.exceptions import KINDS, fault_of_signs
from holdfast._diagnose.texts.python import shape_of
from holdfast._diagnose.texts.signs import IN_VAIN, SYSTEM_ERROR, calls_of, culprits_of
from holdfast._diagnose.verdict import Cause, Sure

_NEVER = 1e18
_LATE_SECONDS = 1.0  # a death is recorded a little later, an exception at once
_NOTED_SECONDS = 3.0  # ends closer together than this have no certain order
_UNREACHABLE_SECONDS = 75.0  # until a host counts as lost
# As in `_environment/processes/cgroup.py`: counters from before a death are kept for so long.
_DYING_SECONDS = 10.0
_MOST_OTHERS = 8
_SOCKET_ERRORS = ("ConnectionResetError", "BrokenPipeError", "ConnectionRefusedError")
_NEVER_CONNECTED = re.compile(r"Connection refused|\bConnect to \S+ failed")
_COMPLETION = re.compile(r"Got completion from peer ([\w.:-]+)\S* with status=(\d+)")
# Of InfiniBand and RoCE.
_STATUS_12 = ": its retries were used up, so a link, a switch or that machine did not answer"
_RUNNING = re.compile(r"Rank (\d+) is running collective: \w+\([^()]*?OpType=(\w+)")
_SILENT_TASK = re.compile(r"heartbeats\):\s+/job:\w+/replica:\d+/task:(\d{1,6})\b")  # of JAX
_LAST_WORDS = ("faulthandler", "cxx_exception", "heap_damage")  # of a process that crashes
_OF_DEVICE = ("cuda_error", "cuda_assert", "cuda_oom")  # NCCL's watchdog tells of it, and aborts
_OF_A_GROUP = re.compile(r"Dist(?:Backend|Network|Store)Error|HorovodInternalError")
_SAYS_WHY = ("shm_full", "cuda_oom")
_TIMEOUTS, _LOST = ("nccl_timeout", "gloo_timeout"), ("peer_lost",)
_OF_PEERS = ("timeout", "peer_lost")  # kinds of an end that blame another rank


def open_case(evidence: Evidence) -> Case:
    ends = ends_of(evidence)
    if len(ends) == 1:
        (only,), child = ends, _child_to_blame(ends[0])
        if child is None:
            return Case(evidence, ends, only, [], _one_of(only), _is_only_cause(only))
        why = [f"{child.name()} is the one that ended by itself"]
        return Case(evidence, ends, child, [_then(only)], why)
    for end in [each for each in ends if _was_ended_later(each, ends)]:
        end.was_sent_away = True
    if any(kind_of(end) == "timeout" for end in ends):
        for end in filter(_is_aborted, ends):
            end.was_sent_away = True
    by_itself = [end for end in ends if _is_own(end)]
    hard = [end for end in by_itself if not is_ended_by_launcher(end) or end.status == -9]
    # One that did not find the others, that an error of a connection between them ended, or that
    # aborted without a word, is no cause, as long as another raised by itself.
    other = [
        end
        for end in hard
        if kind_of(end) != "rendezvous"
        and not _is_aborted(end)
        and (end.fault is None or end.fault.kind != "plain" or not _OF_A_GROUP.fullmatch(_why(end)))
    ]
    hard = other if any(end.fault is not None for end in other) else hard
    if by_itself:
        # A signal of the launcher is no cause, as long as there is another.
        culprit = min(hard or by_itself, key=_blame)
        # The other ranks that may have been first: no record tells.
        rivals = [each for each in hard or by_itself if each is not culprit and each.time is None]
        rivals = [] if culprit.time is not None or culprit.is_unreachable else rivals
        is_ordered = {*map(_why, rivals)} <= {_why(culprit)} and _is_only_cause(culprit)
        why = [*_how_found(culprit, by_itself, is_ordered=not rivals), *_one_of(culprit)]
        raised = culprit.fault.sentence() if culprit.fault is not None else None
        if same := [end for end in rivals if end.fault and end.fault.sentence() == raised]:
            who = ", ".join(end.name() for end in same[:_MOST_OTHERS])
            told = f"{who} raised the same, in no known order"
            why = [told, *(why if len(same) < len(rivals) else [])]
            ends = [end for end in ends if end not in same]
    else:
        culprit, why = _absent(ends)
        is_ordered = True
    _lend_what_the_leader_saw(culprit, evidence)
    others = _lines_of([end for end in ends if end is not culprit], _then)
    if len(others) > _MOST_OTHERS:
        others = [*others[:_MOST_OTHERS], f"and {len(others) - _MOST_OTHERS} more ranks likewise"]
    return Case(evidence, ends, culprit, others, why, is_ordered)


def _was_ended_later(end: End, ends: list[End]) -> bool:
    """Whether a launcher ended it after another rank had given up."""
    return is_ended_by_launcher(end) and any(
        _is_later(end, each) for each in ends if kind_of(each) in _OF_PEERS
    )


def _is_later(end: End, other: End) -> bool:
    if end.seen_at is not None and other.seen_at is not None:
        return end.seen_at > other.seen_at
    if end.time is not None and other.time is not None:
        return end.time > other.time + _NOTED_SECONDS
    # A timeout comes before the launcher's signal; a lost peer was lost before.
    return kind_of(other) == "timeout" and end.status != -9


def _is_aborted(end: End) -> bool:
    """Whether it aborted without a word, as NCCL's watchdog does where several ranks give up."""
    told = end.has(*_LAST_WORDS, *_OF_DEVICE)
    return end.status == -6 and end.fault is None and told is None


def _child_to_blame(end: End) -> End | None:
    """The child that died of a signal, if the process only tells that it lost one.

    It may be a forked rank without a number, or one whose messages no longer came.
    """
    told = end.has("launcher_exit")
    of_a_signal = told is not None and (_text.whole(told.details.get("exitcode")) or 0) < 0
    is_report = end.fault is None and end.status == 1 and of_a_signal
    fault = end.fault
    in_vain = fault is not None and fault.type in IN_VAIN and fault.kind == "plain"
    if kind_of(end) not in _OF_PEERS and not is_report and not in_vain:
        return None
    for process in end.children:
        status, pid = _text.whole(process.get("status")), _text.whole(process.get("pid"))
        if status is None and in_vain:
            status = _text.whole(process.get("exitcode"))  # as the trainer recorded it
        if status is not None and status < 0 and status not in (-15, -2, -1) and pid != end.pid:
            found = End(host=end.host, pid=pid, status=status, is_child=True, memory=end.memory)
            found.time = _text.real(process.get("ended"))
            found.counters = _text.record(process.get("counters")) or end.counters
            found.signs = [sign for sign in end.signs if sign.kind in _LAST_WORDS]
            return found
    return None


def _lend_what_the_leader_saw(culprit: End, evidence: Evidence) -> None:
    """Memory and counters, where the rank has none: mostly all ranks share one cgroup."""
    led = _text.record(evidence.led)
    lent, ended = _text.record(led.get("counters")), _text.real(led.get("ended"))
    if ended is not None and culprit.time is not None and ended - culprit.time > _DYING_SECONDS:
        # The leader's last sample is from after the end of this rank.
        lent = {**lent, "before": lent.get("start")}
    culprit.counters = culprit.counters or lent
    culprit.memory = culprit.memory or _text.records(led.get("memory"))


def kind_of(end: End) -> str:
    """What a rank's end says of others: `timeout`, `peer_lost`, or something of its own."""
    why = end.has(*_SAYS_WHY)  # a library reports its own trouble as that of a peer
    if end.fault is not None and end.fault.type == "UnavailableError":
        why = why or end.has("rendezvous")  # it was never there
    if end.fault is not None:
        is_socket = end.fault.kind == "plain" and end.fault.type in _SOCKET_ERRORS
        kind = "peer_lost" if is_socket and end.rank is not None else end.fault.kind
        return KINDS[why.kind] if why and end.fault.kind in _OF_PEERS else kind
    if end.status not in (None, 1, -6):  # NCCL's watchdog aborts its process
        return ""
    if end.has(*_TIMEOUTS):
        return "timeout"
    if end.has(*_LOST):
        return KINDS[why.kind] if why else "peer_lost"
    return ""


def _is_own(end: End) -> bool:
    """Whether it ended by itself: not because of another rank, and not because it was told to."""
    if end.is_unreachable:
        return True
    if end.was_sent_away or kind_of(end) in ("timeout", "peer_lost", "interrupt"):
        return False
    if end.fault is not None:
        return not (end.fault.is_exit and end.status == 0)
    return end.status is not None and end.status not in (_errors.FINISHED, _errors.REQUEUE)


def _blame(end: End) -> tuple[float, int, bool, int]:
    """The first end is to blame; of ends at the same time, a death before an exception.

    A status without an explanation comes last: a rank that lost a peer often leaves with 1.
    """
    moment = end.time if end.time is not None else _NEVER
    died = end.status is not None and end.status < 0 and end.fault is None
    if end.is_unreachable:
        moment -= _UNREACHABLE_SECONDS
    elif died:
        moment -= _LATE_SECONDS
    is_explained = end.fault is not None or end.has(*KINDS) is not None
    kind = 0 if died else 1 if is_explained else 2
    return moment, kind, end.has("slurm_oom") is None, end.rank or 0


def _how_found(culprit: End, by_itself: list[End], *, is_ordered: bool) -> list[str]:
    who, count = culprit.name(), len(by_itself)
    if count == 1 and culprit.fault is not None and culprit.fault.by.startswith("thread"):
        return [f"only a thread of {who} had failed, and no other rank by itself"]
    if count == 1:
        return [f"{who} is the only one that ended by itself"]
    if not is_ordered:
        return [f"{who} is one of {count} that ended by themselves, in no known order"]
    return [f"{who} ended first of {count} that did not only lose a peer"]


def _one_of(end: End) -> list[str]:
    numbers = ", ".join(map(str, end.one_of[:_MOST_OTHERS]))
    more = ", …" if len(end.one_of) > _MOST_OTHERS else ""
    late = "did not come to the collective that the others waited for"
    how = late if end.status is None else f"left with status {end.status}"
    who = f"the ranks {numbers}{more}" if len(end.one_of) > 1 else f"rank {numbers}"
    return [f"its lines name no rank: {who} {how}"] if end.one_of else []


def _is_only_cause(end: End) -> bool:
    """Whether one kind of exception is all that ranks without a number raised by themselves."""
    if end.one_of and end.status is None:
        return False
    raised = (fault_of_signs([sign]) for sign in end.signs if end.one_of)
    return len({each.type for each in raised if each and each.kind not in _OF_PEERS}) <= 1


def _why(end: End) -> str:
    return end.fault.type if end.fault is not None else str(end.signal or "")


def _absent(ends: list[End]) -> tuple[End, list[str]]:
    """No rank ended by itself: to blame is the rank that was missing."""
    kinds = {id(end): kind_of(end) for end in ends}
    waited = [end for end in ends if kinds[id(end)] in _OF_PEERS]
    for rank in culprits_of([sign for end in ends for sign in end.signs]):
        named = next((end for end in ends if end.rank == rank and not _is_aborted(end)), None)
        if named is not None:
            return named, [f"by what the others printed, {named.name()} did not come"]
    if waited and (left := _left_first(ends, waited)) is not None:
        why = f"{left.name()} had left with status 0 while {waited[0].name()} still trained"
        return left, [why]
    silent = [
        end
        for end in ends
        if kinds[id(end)] == ""
        and not _is_aborted(end)
        and (end.was_sent_away or not end.is_recorded or is_ended_by_launcher(end))
    ]
    if waited and silent:
        progress = {id(end): _NEVER if end.step is None else end.step for end in silent}
        culprit = min(silent, key=lambda end: (progress[id(end)], end.rank or 0))
        return culprit, [f"{culprit.name()} neither raised nor died while the others waited"]
    steps = sorted({end.step for end in ends if end.step is not None})
    behind = [end for end in ends if steps and end.step == steps[0]]
    if len(steps) > 1 and len(behind) == 1:
        return behind[0], [f"{behind[0].name()} was behind all others, at step {steps[0]}"]
    if timed := [end for end in waited if end.time is not None]:
        return min(timed, key=_blame), []
    gave_up = {  # where in the log
        id(end): [sign.line for sign in end.signs if sign.kind in _TIMEOUTS] for end in ends
    }
    return min(waited or ends, key=lambda end: min(gave_up[id(end)], default=1 << 60)), []


def _lines_of(ends: list[End], tell: Callable[[End], str]) -> list[str]:
    """A line of each rank, or one line of several that tell the same except for numbers."""
    same: dict[str, list[End]] = {}
    for end in ends:
        told = shape_of(tell(end).removeprefix(end.name())) if end.rank is not None else ""
        same.setdefault(told or str(id(end)), []).append(end)
    lines = []
    for each in same.values():
        first = tell(each[0])
        if len(each) > 2 and first.startswith(each[0].name()):
            ranks = _ranks([end.rank for end in each if end.rank is not None])
            lines.append(f"{ranks}{first.removeprefix(each[0].name())}")
        else:
            lines += map(tell, each)
    return list(filter(None, lines))


def _ranks(numbers: Iterable[int]) -> str:
    ranks = sorted(numbers)
    if len(ranks) > 2 and ranks == [*range(ranks[0], ranks[-1] + 1)]:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return name_ranks(ranks).replace(" and ", ", ")


def _left_first(ends: list[End], waited: list[End]) -> End | None:
    """A rank that had finished before the others gave up."""
    known = [each.time for each in waited if each.time is not None]
    early = [end for end in ends if end.status == 0 and end.fault is None and end.time is not None]
    early = [end for end in early if known and (end.time or 0.0) < min(known)]
    return min(early, key=lambda end: end.time or 0.0, default=None)


def _then(end: End) -> str:
    name = end.name()
    if end.fault is not None:
        return f"{name} then saw: {end.fault.sentence(160)}"
    if end.was_sent_away and not _is_aborted(end):
        return f"{name} was then told to leave"
    if (sign := end.has(*_TIMEOUTS, *_LOST)) is not None:
        return f"{name} then saw: {_text.one_line(sign.text, 160)}"
    if end.signal is not None:
        by = ", as launchers do with those that are left" if is_ended_by_launcher(end) else ""
        return f"{name} then ended by {end.signal}{by}"
    if end.status:
        return f"{name} then left with status {end.status}"
    return ""


def judge_collective(case: Case) -> Finding | None:
    """Ranks that waited for another that did not come, or lost one without a recorded death."""
    kinds = {kind_of(end) for end in case.ends}
    own = kind_of(case.end)
    if own not in ("", "timeout", "peer_lost"):
        return None
    if own == "" and (_is_own(case.end) or not kinds & {"timeout", "peer_lost"}):
        return None
    evidence = _said_of_peers(case)
    if case.end.status == 0:
        said = "with status 0, while the others still waited for it: it had fewer batches"
        sentence, lines = f"{case.opening} had finished, {said}.", advice.advise(case, "mismatched")
        return Finding(Cause.PEER_LOST, sentence, Sure.LIKELY, evidence, lines)
    named = bool(case.culprit) and not case.end.one_of
    marks = [f"rank {end.rank} at step {end.step}" for end in case.ends if end.step is not None]
    if len(marks) > 1:
        evidence.append(f"the last steps: {', '.join(marks[:_MOST_OTHERS])}")
    if stack := case.stacks_lines():
        evidence.append(f"{case.who} was at: {'; '.join(stack)}")
    if "timeout" in kinds:
        return _timeout(case, named, evidence)
    if not named and len(case.ends) > 1:
        evidence.append("no rank is known to have ended before the others")
    # They have no more than NCCL's "unhandled system error".
    messages = [end.fault.message if end.fault is not None else "" for end in case.ends]
    tells_no_call = all(SYSTEM_ERROR in said and "Last error:" not in said for said in messages)
    have_left = all(end.status in (None, 1) for end in case.ends)
    if (fault := case.end.fault) is not None and tells_no_call and have_left:
        sentence = f"{case.opening} raised {fault.sentence()}: NCCL did not say which call failed."
        lines = advice.advise(case, "system_error")
        return Finding(Cause.PYTHON_EXCEPTION, sentence, Sure.LIKELY, evidence, lines)
    sentence = f"{case.opening} lost its connection to another rank."
    if any(map(_NEVER_CONNECTED.search, evidence)):
        why = "it had ended, or was not reached"
        sentence = f"{case.opening} could not connect to another rank: {why}."
    if told := _COMPLETION.search("\n".join(sign.text for sign in case.evidence.signs)):
        why = _STATUS_12 if told[2] == "12" else ""
        sentence = f"{case.opening} lost its connection to {told[1]} (status {told[2]}{why})."
    absent, lines = case.sign("peer_lost"), advice.advise(case, "peer_lost")
    silent = _SILENT_TASK.findall(case.evidence.output)
    if missing := (absent.details.get("missing") if absent is not None else None) or silent:
        sentence = f"Rank {missing[0]} stopped sending heartbeats, and the others lost it."
        told_where = f"See the log of rank {missing[0]} and its machine: it was preempted, or died."
        lines = [told_where, *lines]
    elif absent is not None and (machine := absent.details.get("machine")):
        sentence = f"{case.opening} lost its connection to {machine}."
    elif named:
        sentence = f"{case.opening} ended without a message, and the others lost it."
    return Finding(Cause.PEER_LOST, sentence, Sure.LIKELY, evidence, lines)


def judge_mismatch(case: Case) -> Finding | None:
    """Ranks that were in different collectives: which of them died of it is chance."""
    sign = case.sign("collective_mismatch")
    faults = [end.fault for end in case.ends if end.fault is not None]
    fault = next((each for each in faults if each.kind == "mismatch"), None)
    calls = {} if _is_own(case.end) else calls_of(case.evidence.signs)
    if sign is None and fault is None and not calls:
        return None
    told = [f"in {call}: rank {', '.join(map(str, sorted(calls[call])))}" for call in calls]
    said = fault.sentence(400) if fault is not None else _text.one_line(sign.text if sign else "")
    sentence = "The ranks were not in the same collective, or gave it tensors of different sizes."
    lines = advice.advise(case, "mismatched")
    if running := _RUNNING.findall(fault.message if fault is not None else said):
        at = f", at {fault.place}" if fault is not None and fault.place else ""
        which = ", ".join(f"rank {rank} in {call}" for rank, call in running)
        sentence = f"The ranks were not in the same collective{at}: {which}."
        lines = [line for line in lines if "DETAIL" not in line]  # it was on
    evidence = [*([f"it printed: {said}"] if said else told), *_said_of_peers(case)]
    if stack := case.stacks_lines():
        evidence.append(f"{case.who} was at: {'; '.join(stack)}")
    return Finding(Cause.HANG_BRANCHES, sentence, Sure.LIKELY, evidence, lines)


def _timeout(case: Case, named: bool, evidence: list[str]) -> Finding:
    waiting = [end.step for end in case.ends if end is not case.end and end.step is not None]
    where = ""
    if case.end.step is not None and waiting and max(waiting) > case.end.step:
        where = f": it was at step {case.end.step} while others waited at step {max(waiting)}"
    elif case.end.step is not None:
        where = f", after step {case.end.step}"
    sentence = f"{case.opening} did not come to a collective that the others waited for{where}."
    if not named:
        first = f"{case.who} was the first to give up, which does not make it the cause"
        none = ": another rank did not come to it in time"
        sentence = f"A collective timed out{none if case.end.rank is None else f'; {first}'}."
    progress = [sign for end in case.ends for sign in end.signs if sign.kind == "nccl_progress"]
    completed = {_text.whole(sign.details.get("completed")) for sign in progress}
    if progress and not case.end.step and completed <= {-1, 0}:
        evidence.append(
            "it was the first collective: none had completed, so NCCL may never have connected"
        )
    lines = advice.advise(case, "timed_out")
    if calls := _waits(case):
        lines = [line for line in lines if "which collective" not in line]  # it is known
        evidence[1:1] = [f"{_ranks(calls[call])} waited in {call}" for call in sorted(calls)]
    count = sum(map(len, calls.values()))
    if len(calls) == 1 and not named and len(case.ends) == count > 1:
        sentence = f"All {count} ranks waited in the same {next(iter(calls))}."
        evidence.append("so no rank was missing, and unequal batches are not why")
        evidence.append(f"{case.who} was the first to give up")
        lines = advice.advise(case, "timed_out_all")
    elif at := _where_they_waited(case):
        sentence = f"{sentence[:-1]}: {at}." if named else f"{sentence[:-1]} ({at})."
    told = [sign for end in case.ends for sign in end.signs if sign.kind in _TIMEOUTS]
    if told and all("is_stuck" in sign.details for sign in told):
        sentence = f"NCCL's watchdog thread of {case.who} was stuck, and its process was ended."
        lines = advice.advise(case, "stuck")
    elif named:
        lines = [*advice.lines_of(case, "timed_out_rank"), *lines]
    return Finding(Cause.COLLECTIVE_TIMEOUT, sentence, Sure.LIKELY, evidence, lines)


def _waits(case: Case) -> dict[str, set[int]]:
    """The ranks in each collective of NCCL that timed out, where they are all of one group."""
    first: dict[int, tuple[int, str]] = {}
    groups = set()
    for sign in case.evidence.signs:
        number, timeout = map(_text.whole, map(sign.details.get, ("sequence", "timeout_ms")))
        if sign.kind != "nccl_timeout" or sign.rank is None or number is None:
            continue
        groups.add(sign.text.rpartition(" Rank ")[0].rpartition("[")[2])
        after = f" for {timeout // 1000} s" if timeout else ""
        told = number, f"{sign.details.get('operation')} (no. {number}){after}"
        first[sign.rank] = min(told, first.get(sign.rank, told))
    calls: dict[str, set[int]] = {}
    for rank, (_, call) in first.items():
        calls.setdefault(call, set()).add(rank)
    return calls if len(groups - {""}) < 2 else {}  # older versions name no group


def _where_they_waited(case: Case) -> str:
    """The call of torch in which a rank timed out, and the line of the script that made it."""
    faults = [end.fault for end in case.ends if kind_of(end) == "timeout" and end.fault]
    frames = faults[0].record.get("frames") if faults else None
    frames = frames[::-1] if isinstance(frames, list) else []
    is_of_torch = ["/torch/" in str(frame[0]).replace("\\", "/") for frame in frames]
    if not is_of_torch or not is_of_torch[0] or all(is_of_torch):
        return ""
    file, line, function = frames[is_of_torch.index(False)]
    return f"{frames[0][2]}(), at {file}:{line} in {function}"


def _said_of_peers(case: Case) -> list[str]:
    return _lines_of([end for end in case.ends if kind_of(end) in _OF_PEERS], _said)[:4]


def _said(end: End) -> str:
    if end.fault is not None:
        return f"{end.name()} raised {end.fault.sentence(240)}"
    sign = end.has(*_TIMEOUTS, *_LOST)
    if sign is None:
        return end.name()
    who = "it was" if sign.rank is None and end.rank is not None else end.name()
    return f"{who} printed: {_text.one_line(sign.text, 240)}"
