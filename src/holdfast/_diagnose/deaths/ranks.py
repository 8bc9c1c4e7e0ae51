"""Among several ranks: who is to blame, and what the others then saw.

Whoever loses a peer fails within a moment, and may well be heard first. So an error that only
says that a peer was lost, or that waiting was in vain, blames nobody: guilty is who ended by
itself, and if nobody did, who neither raised nor died while the others waited.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast import _errors, _text
from holdfast._diagnose import advice
from holdfast._diagnose.evidence.case import Case, Finding
from holdfast._diagnose.evidence.ends import End, ends_of, is_ended_by_launcher
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.texts.exceptions import KINDS
from holdfast._diagnose.texts.signs import culprits_of
from holdfast._diagnose.verdict import Cause, Sure

_NEVER = 1e18
_LOOK_SECONDS = 1.0  # a death is noted a little after it, an exception at once
_NOTED_SECONDS = 3.0  # by which the order of two ends is not certain
_UNREACHABLE_SECONDS = 75.0  # until a host counts as lost
_DYING_SECONDS = (
    10.0  # of `_environment/processes/cgroup.py`: for so long counters of before are kept
)
_MOST_OTHERS = 8
_SOCKET_ERRORS = ("ConnectionResetError", "BrokenPipeError", "ConnectionRefusedError")
_SAYS_WHY = ("shm_full", "cuda_oom")
_TIMEOUTS, _LOST = ("nccl_timeout", "gloo_timeout"), ("peer_lost",)


def open_case(evidence: Evidence) -> Case:
    """The case, with the rank to blame."""
    ends = ends_of(evidence)
    if len(ends) == 1:
        child = _child_to_blame(ends[0])
        if child is None:
            return Case(evidence, ends, ends[0])
        why = [f"{child.name()} is the one that ended by itself"]
        return Case(evidence, ends, child, [_then(ends[0])], why)
    for end in [each for each in ends if _was_ended_later(each, ends)]:
        end.was_sent_away = True
    by_itself = [end for end in ends if _is_own(end)]
    hard = [end for end in by_itself if not is_ended_by_launcher(end) or end.status == -9]
    if by_itself:
        # What launchers send to the rest is no cause, as long as there is another.
        culprit = min(hard or by_itself, key=_blame)
        why = _how_found(culprit, by_itself)
    else:
        culprit, why = _absent(ends)
    _lend_what_the_leader_saw(culprit, evidence)
    others = [line for end in ends if end is not culprit and (line := _then(end))]
    if len(others) > _MOST_OTHERS:
        others = [*others[:_MOST_OTHERS], f"and {len(others) - _MOST_OTHERS} more ranks likewise"]
    return Case(evidence, ends, culprit, others, why)


def _was_ended_later(end: End, ends: list[End]) -> bool:
    """Whether a launcher ended it, since another rank had given up by then."""
    if not is_ended_by_launcher(end):
        return False
    for other in ends:
        if kind_of(other) not in ("timeout", "peer_lost"):
            continue
        if end.seen_at is not None and other.seen_at is not None:
            later = end.seen_at - other.seen_at
        elif end.time is not None and other.time is not None:
            later = end.time - other.time - _NOTED_SECONDS
        else:
            # Who waits in vain for minutes gives up first; who loses a peer has lost it before.
            later = 1.0 if kind_of(other) == "timeout" and end.status != -9 else 0.0
        if later > 0:
            return True
    return False


def _child_to_blame(end: End) -> End | None:
    """Ranks that a script forks have no number: the one that died of a signal is to blame."""
    if kind_of(end) not in ("timeout", "peer_lost"):
        return None
    for process in end.children:
        status, pid = _text.whole(process.get("status")), _text.whole(process.get("pid"))
        if status is not None and status < 0 and status not in (-15, -2, -1) and pid != end.pid:
            moment = _text.real(process.get("ended"))
            known = End(host=end.host, pid=pid, time=moment, status=status)
            counters = _text.record(process.get("counters")) or end.counters
            return replace(known, counters=counters, memory=end.memory)
    return None


def _lend_what_the_leader_saw(culprit: End, evidence: Evidence) -> None:
    """Memory and counters, where the rank has none of its own: one cgroup is mostly all of them."""
    led = _text.record(evidence.led)
    lent, ended = _text.record(led.get("counters")), _text.real(led.get("ended"))
    if ended is not None and culprit.time is not None and ended - culprit.time > _DYING_SECONDS:
        # The leader's last look before the end of all is no look before the end of this one.
        lent = {**lent, "before": lent.get("start")}
    culprit.counters = culprit.counters or lent
    culprit.memory = culprit.memory or _text.records(led.get("memory"))


def kind_of(end: End) -> str:
    """What a rank's end says of others: `timeout`, `peer_lost`, or something of its own."""
    if end.fault is not None:
        if end.fault.kind in ("timeout", "peer_lost") and (why := end.has(*_SAYS_WHY)):
            return KINDS[why.kind]  # a library reports its own trouble as that of a peer
        is_socket = end.fault.kind == "plain" and end.fault.type in _SOCKET_ERRORS
        return "peer_lost" if is_socket and end.rank is not None else end.fault.kind
    if end.status == -6 and end.has(*_TIMEOUTS):
        return "timeout"  # NCCL's watchdog aborts its process
    if end.status in (None, 1) and end.has(*_TIMEOUTS):
        return "timeout"
    if end.status in (None, 1, -6) and end.has(*_LOST):
        return "peer_lost"
    return ""


def _is_own(end: End) -> bool:
    """Whether it ended by itself: not for want of another, and not because it was told to."""
    if end.is_unreachable:
        return True
    if end.was_sent_away or kind_of(end) in ("timeout", "peer_lost", "interrupt"):
        return False
    if end.fault is not None:
        return not (end.fault.is_exit and end.status == 0)
    return end.status is not None and end.status not in (_errors.FINISHED, _errors.REQUEUE)


def _blame(end: End) -> tuple[float, int, int]:
    """The first is guilty; of those that are as good as first, who died before who raised.

    A status that nothing explains comes last: launchers and peers leave many a rank with 1.
    """
    moment = end.time if end.time is not None else _NEVER
    died = end.status is not None and end.status < 0 and end.fault is None
    if end.is_unreachable:
        moment -= _UNREACHABLE_SECONDS
    elif died:
        moment -= _LOOK_SECONDS
    return moment, 0 if died else 1 if end.fault is not None else 2, end.rank or 0


def _how_found(culprit: End, by_itself: list[End]) -> list[str]:
    if len(by_itself) == 1:
        return [f"{culprit.name()} is the only one that ended by itself"]
    return [f"{culprit.name()} ended first of {len(by_itself)} that did not only lose a peer"]


def _absent(ends: list[End]) -> tuple[End, list[str]]:
    """Nobody ended by itself: guilty is who was not there."""
    kinds = {id(end): kind_of(end) for end in ends}
    waited = [end for end in ends if kinds[id(end)] in ("timeout", "peer_lost")]
    for rank in culprits_of([sign for end in ends for sign in end.signs]):
        named = next((end for end in ends if end.rank == rank), None)
        if named is not None:
            return named, [f"by what the others printed, {named.name()} did not come"]
    if waited and (left := _left_first(ends, waited)) is not None:
        why = f"{left.name()} had left with status 0 while {waited[0].name()} still trained"
        return left, [why]
    silent = [
        end
        for end in ends
        if kinds[id(end)] == ""
        and (end.was_sent_away or not end.is_recorded or is_ended_by_launcher(end))
    ]
    if waited and silent:
        culprit = min(silent, key=_progress)
        return culprit, [f"{culprit.name()} neither raised nor died while the others waited"]
    steps = sorted({end.step for end in ends if end.step is not None})
    behind = [end for end in ends if steps and end.step == steps[0]]
    if len(steps) > 1 and len(behind) == 1:
        return behind[0], [f"{behind[0].name()} was behind all others, at step {steps[0]}"]
    timed = [end for end in waited if end.time is not None]
    first = min(timed, key=_blame) if timed else (waited or ends)[0]
    return first, []


def _left_first(ends: list[End], waited: list[End]) -> End | None:
    """A rank that had nothing to do any more, before the others gave up."""
    known = [each.time for each in waited if each.time is not None]
    early = [
        end
        for end in ends
        if end.status == 0 and end.fault is None and end.time is not None
        if known and end.time < min(known)
    ]
    return min(early, key=lambda end: end.time or 0.0) if early else None


def _progress(end: End) -> tuple[float, int]:
    return (end.step if end.step is not None else _NEVER), end.rank or 0


def _then(end: End) -> str:
    """What became of a rank that was not to blame."""
    name = end.name()
    if end.fault is not None:
        return f"{name} then saw: {end.fault.sentence(160)}"
    if end.was_sent_away:
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
    """Ranks that waited for one that did not come, or lost one that nobody saw die."""
    kinds = {kind_of(end) for end in case.ends}
    own = kind_of(case.end)
    if own not in ("", "timeout", "peer_lost"):
        return None
    if own == "" and (_is_own(case.end) or not kinds & {"timeout", "peer_lost"}):
        return None
    if case.end.status == 0:
        return _too_few_batches(case)
    named = bool(case.culprit)
    evidence = [_said(end) for end in case.ends if kind_of(end) in ("timeout", "peer_lost")][:4]
    marks = [f"rank {end.rank} at step {end.step}" for end in case.ends if end.step is not None]
    if len(marks) > 1:
        evidence.append(f"the last steps: {', '.join(marks[:_MOST_OTHERS])}")
    if stack := case.stacks_lines():
        evidence.append(f"{case.who} was at: {'; '.join(stack)}")
    if "timeout" in kinds:
        return _timeout(case, named, evidence)
    if not named and len(case.ends) > 1:
        evidence.append("no rank is known to have ended before the others")
    sentence = f"{case.opening} lost its connection to another rank."
    if named:
        sentence = f"{case.opening} ended without a message, and the others lost it."
    return Finding(Cause.PEER_LOST, sentence, Sure.LIKELY, evidence, advice.peer_lost(case))


def judge_mismatch(case: Case) -> Finding | None:
    """Ranks that were in different collectives: which of them died of it is chance."""
    sign = next((s for s in reversed(case.evidence.signs) if s.kind == "collective_mismatch"), None)
    faults = [end.fault for end in case.ends if end.fault is not None]
    fault = next((each for each in faults if each.kind == "mismatch"), None)
    if sign is None and fault is None:
        return None
    said = fault.sentence(400) if fault is not None else _text.one_line(sign.text if sign else "")
    evidence = [f"it printed: {said}"]
    evidence += [_said(end) for end in case.ends if kind_of(end) in ("timeout", "peer_lost")][:4]
    if stack := case.stacks_lines():
        evidence.append(f"{case.who} was at: {'; '.join(stack)}")
    return Finding(
        Cause.HANG_BRANCHES,
        "The ranks were not in the same collective, or gave it tensors of different sizes.",
        Sure.LIKELY,
        evidence,
        advice.mismatched(case),
    )


def _too_few_batches(case: Case) -> Finding:
    evidence = [_said(end) for end in case.ends if kind_of(end) in ("timeout", "peer_lost")][:4]
    return Finding(
        Cause.PEER_LOST,
        f"{case.opening} had finished, with status 0, while the others still waited for it: it had "
        "fewer batches than they.",
        Sure.LIKELY,
        evidence,
        advice.mismatched(case),
    )


def _timeout(case: Case, named: bool, evidence: list[str]) -> Finding:
    waiting = [end.step for end in case.ends if end is not case.end and end.step is not None]
    where = ""
    if case.end.step is not None and waiting and max(waiting) > case.end.step:
        where = f": it was at step {case.end.step} while others waited at step {max(waiting)}"
    elif case.end.step is not None:
        where = f", after step {case.end.step}"
    if named:
        sentence = f"{case.opening} did not come to a collective that the others waited for{where}."
        return Finding(
            Cause.COLLECTIVE_TIMEOUT, sentence, Sure.LIKELY, evidence, advice.timed_out(case)
        )
    sentence = (
        f"A collective timed out; {case.who} was the first to give up, which does not make it "
        "guilty."
    )
    if case.end.rank is None:
        sentence = "A collective timed out: another rank did not come to it in time."
    return Finding(
        Cause.COLLECTIVE_TIMEOUT, sentence, Sure.LIKELY, evidence, advice.timed_out(case)
    )


def _said(end: End) -> str:
    if end.fault is not None:
        return f"{end.name()} raised {end.fault.sentence(240)}"
    sign = end.has(*_TIMEOUTS, *_LOST)
    return f"{end.name()} printed: {_text.one_line(sign.text, 240)}" if sign else end.name()
