"""An end that came since it hung: the verdict is that of the hang, not of who ended it."""

from __future__ import annotations

from holdfast._why import advice, words
from holdfast._why import case as cases
from holdfast._why.case import Case, Finding
from holdfast._why.evidence import Evidence, Record
from holdfast._why.hang import HangFinding, explain
from holdfast._why.judge_ranks import kind_of
from holdfast._why.memory import moved
from holdfast._why.verdict import Cause, Sure

_ENDED_BY_OTHERS = (-9, -15, -6)  # a kill, a cancel, NCCL's own watchdog


def open_hang(evidence: Evidence) -> Record:
    """The hang that was not over when it ended; empty if there was none."""
    for record in (evidence.hang, words.record(words.record(evidence.led).get("hang"))):
        if record and record.get("ended") is None:
            return record
    return {}


def judge_hung(case: Case) -> Finding | None:
    """It was ended because it hung, and its status says so."""
    hang = open_hang(case.evidence)
    led = words.record(case.evidence.led)
    statuses = (
        words.whole(case.evidence.exit.get("status")),
        words.whole(led.get("status")),
        case.end.status,
    )
    if not hang or (cases.HUNG not in statuses and hang.get("by") != "leader"):
        return None
    how = "it was then ended for that (--hang-timeout)"
    return _of_hang(case, hang, Sure.CERTAIN, how)


def judge_hung_and_killed(case: Case) -> Finding | None:
    """It hung, and somebody or a timeout of its own ended it."""
    hang, end = open_hang(case.evidence), case.end
    if not hang or moved(end.counters).kills:
        return None
    if end.status in _ENDED_BY_OTHERS and end.fault is None:
        return _of_hang(case, hang, Sure.LIKELY, f"it then ended by {end.signal}")
    if kind_of(end) in ("timeout", "peer_lost") and end.fault is not None:
        return _of_hang(case, hang, Sure.LIKELY, f"it then raised {end.fault.sentence(160)}")
    return None


def _of_hang(case: Case, hang: Record, sure: Sure, how: str) -> HangFinding:
    found = explain(hang)
    told = _as_told(hang)
    if not words.records(hang.get("looks")):
        found = told
    elif hang.get("by") != "leader" and told.cause is not Cause.UNKNOWN:
        # What its line said then may not be there to be read any more, or say something else.
        found.cause, found.sentence = told.cause, told.sentence
    found.sure = found.sure if found.sure is not Sure.CERTAIN else sure
    found.evidence.append(how)
    found.advice += [
        f"Every thread of every process at that time: {_text_file(case)}",
        *advice.go_on(case),
    ]
    return found


def _as_told(hang: Record) -> HangFinding:
    """Where only the words are left of it."""
    try:
        cause = Cause(hang.get("cause"))
    except ValueError:
        cause = Cause.UNKNOWN
    sentence = words.one_line(words.text(hang.get("sentence")), 600) or "It made no step any more."
    return HangFinding(
        cause, sentence, Sure.LIKELY, _lines(hang, "evidence"), _lines(hang, "advice")
    )


def _lines(record: Record, name: str) -> list[str]:
    told = record.get(name)
    texts = [each for each in told if isinstance(each, str)] if isinstance(told, list) else []
    return [words.one_line(each, 400) for each in texts]


def _text_file(case: Case) -> str:
    found = (path for path in case.evidence.files if path.name.startswith("hang"))
    return str(next((p for p in sorted(found, reverse=True)), "hang.txt in the run folder"))


def tell_hang(evidence: Evidence) -> list[str]:
    """That it hung when something else ended it."""
    hang = open_hang(evidence)
    if not hang:
        return []
    sentence = words.one_line(words.text(hang.get("sentence")), 300)
    return [f"it hung then: {sentence}" if sentence else "it made no step any more then"]
