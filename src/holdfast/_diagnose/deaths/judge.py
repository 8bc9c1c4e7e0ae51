"""From evidence to one verdict: rules in order; the first that has an answer gives it.

First what a person or the scheduler wanted, then how the process died, then what it printed. No
rule guesses: without a record the cause stays unknown, and the verdict says so.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast import _errors, _text
from holdfast._diagnose import advice
from holdfast._diagnose.deaths.asked import judge_asked, judge_decided, judge_finished, judge_slurm
from holdfast._diagnose.deaths.python import judge_python
from holdfast._diagnose.deaths.ranks import (
    judge_collective,
    judge_mismatch,
    kind_of,
    open_case,
)
from holdfast._diagnose.deaths.signals import (
    judge_crash,
    judge_kill,
    judge_lost_child,
    judge_terminated,
    judge_timed_out,
)
from holdfast._diagnose.evidence.case import Case, Finding
from holdfast._diagnose.evidence.evidence import Evidence, Record
from holdfast._diagnose.evidence.memory import moved, read_use, tell_memory
from holdfast._diagnose.hangs.explain import HangFinding, as_told, explain, name_dead_thread
from holdfast._diagnose.hangs.live import judge_live
from holdfast._diagnose.hangs.stacks import WAITS_FOR_RANKS, read_thread
from holdfast._diagnose.texts.exceptions import KINDS
from holdfast._diagnose.texts.sign import last_progress
from holdfast._diagnose.texts.signs import was_caught
from holdfast._diagnose.verdict import Cause, Restart, Sure, Verdict, restart_after

if TYPE_CHECKING:
    from holdfast._diagnose.texts.sign import Sign

_RUN = re.compile(r"(\bholdfast \w+) RUN\b")
_FROM_OUTSIDE = (Cause.COLLECTIVE_TIMEOUT, Cause.PREEMPTED, Cause.TIME_LIMIT)
_FEW_LINES = 3  # that a shell or an exit handler prints after an exception
# Shown where no rule knows the end of a log.
_SUSPECT = re.compile(
    r"(?i)errors?\b|exception\b|fail|killed|\bdied|abort|no space|denied|cannot|exceed|fatal|timed"
    r"|panicked|crash|\bnot (?:exist|found)|no such|missing|invalid|unable|must be|required"
)
_SUSPECT_LINES = 60
# What wrappers and libraries print after a script has failed: no sign that it lives on.
_EXIT_NOISE = re.compile(
    r"\s*$|wandb: |swanlab: |[ \d%|#.:█-▏]*\|[^|]*\| *\d+/\d+ \[|.*\bHint: |Function call stack:"
    r"|\w+(?: -> \w+)+$|== Status ==|Memory usage on this node|Using FIFO|Resources requested"
    r"|\+-{5,}|Result logdir|Number of \w+: |Exception ignored|\d root error|.*\bresource_tracker\b"
    r"|.*\bwarnings?\.warn\(|.*destroy_process_group|Set the environment variable HYDRA"
    r"|Please check |\d\. If (?:yes|no), |[ .]*\(at /\S+:\d+\)"  # the end of Paddle's messages
)
_REPORTED = re.compile(r"(?i)\bfail(?:ed|ure)\b|errored|non-zero|exit_?codes?\W+[1-9]")
_OF_LAUNCHER = re.compile(
    r"^.*(?:Sending process \d+ closing signal |failed \(exitcode: |Killing subprocess "
    r"|srun: error: \S+ tasks? [\d,-]+: Exited).*$",
    re.M,
)


def judge(evidence: Evidence) -> Verdict:
    """Why it ended, as far as it can be told. Never raises."""
    try:
        return judge_strictly(evidence)
    except Exception as error:  # noqa: BLE001  a supervisor must go on with any record
        return Verdict(
            Cause.UNKNOWN,
            "Its records cannot be understood.",
            Sure.UNKNOWN,
            (f"{type(error).__name__}: {error}",),
            restart=restart_after(Cause.UNKNOWN),
        )


def judge_strictly(evidence: Evidence) -> Verdict:
    """The same, for tests: what goes wrong here is a bug."""
    if evidence.is_live:
        return _printable(evidence, judge_live(evidence))
    # The training recovered from past signs: they only show where no rule has an answer.
    past = [sign for sign in evidence.signs if sign.details.get("is_past")]
    now = [sign for sign in evidence.signs if not sign.details.get("is_past")]
    case = open_case(replace(evidence, signs=now))
    found = next((f for rule in _RULES if (f := rule(case)) is not None), None)
    return _printable(evidence, _verdict(case, found or _unknown(case, past)))


def _unknown(case: Case, past: list[Sign]) -> Finding:
    """No rule has an answer: only the facts."""
    end, told = case.end, []
    if end.status is not None:
        told.append(f"{case.who} left with status {end.status}")
        if end.status == 1:
            told.append("1 is what Python leaves with after any exception, and torchrun always")
    elif case.evidence.exit:
        how = _text.one_line(str(case.evidence.exit.get("how")), 200)
        told.append(f"its own last note is: {how}")
    lines = _last_lines(case)
    last = next(reversed(lines), "")
    if last:
        told.append(f"the last line that it printed: {_text.one_line(last, 240)}")
        suspect = [line for line in lines if _SUSPECT.search(line)][-2:]
        told += [f"an earlier line: {_text.one_line(s, 240)}" for s in suspect if s != last]
    for sign in past[-1:]:
        after = _text.count(sign.from_end, "line")
        said = _text.one_line(sign.text, 240)
        told.append(f"line {sign.line} is: {said}; it went on for {after} after that")
    if end.status is not None:
        sentence = f"{case.opening} left with status {end.status}, and nothing says why."
        if _text.text(case.evidence.exit.get("how")) == f"ended with status {end.status}":
            how = "without an exception or sys.exit: by os._exit(), or exit() in C"
            sentence = f"{case.opening} left with status {end.status}, {how}."
        elif end.status and _SUSPECT.search(last):  # as sys.exit prints what it was given
            said = _text.one_line(last, 240)
            sentence = f"{case.opening} left with status {end.status}. Its last line is: {said}."
    else:
        said = f" Its last line is: {_text.one_line(last, 240)}." if _SUSPECT.search(last) else ""
        sentence = f"No record says why it ended.{said}"
    next_time = (
        "Next time, start it with `holdfast run -- …`: then its status, its last words, its "
        "memory and the senders of signals are recorded."
    )
    remedy = [next_time] if case.evidence.led is None else []
    return Finding(Cause.UNKNOWN, sentence, Sure.UNKNOWN, told, remedy)


def _last_lines(case: Case) -> list[str]:
    """Without those in which a launcher says that a process has failed."""
    said = _OF_LAUNCHER.split(case.evidence.output.rstrip()[-8000:], maxsplit=1)[0]
    lines = [line for line in said.strip().splitlines() if not line.startswith("holdfast: ")]
    return lines[-_SUSPECT_LINES:]


def _verdict(case: Case, found: Finding) -> Verdict:
    end, is_hang = case.end, isinstance(found, HangFinding)
    culprit = [] if is_hang or found.is_of_job else case.culprit
    told = [*found.evidence, *culprit, *case.evidence.notes]
    told += [] if is_hang else tell_hang(case.evidence)
    doubt = next(_doubts(case), None) if found.sure is Sure.CERTAIN else None
    told += [doubt] if doubt else []
    sure = found.sure if doubt is None else Sure.LIKELY
    is_of_log = end.fault is not None or case.evidence.kind == "log"
    has_finished = case.sign("holdfast_finished") if is_of_log else None
    if has_finished is not None and found.cause is not Cause.FINISHED:
        told.append(f"it had printed: {_text.one_line(has_finished.text, 160)}")
        raised = end.has("python_exception")
        if sure is Sure.CERTAIN and raised is not None and raised.line < has_finished.line:
            sure = Sure.LIKELY
    of_a_signal = end.fault is None and (end.status or 0) < 0 and case.evidence.kind == "log"
    is_from_outside = found.cause in _FROM_OUTSIDE and case.evidence.kind == "log"
    if (of_a_signal or is_from_outside) and (said := last_progress(case.evidence.output)):
        told.append(f"the last progress that it printed: {_text.one_line(said, 160)}")
    durable, is_run = case.durable_step, case.evidence.kind == "run"
    if end.step is not None and is_run and found.cause is not Cause.FINISHED:
        kept = "nothing was durable" if durable is None else f"step {durable} is durable"
        told.append(f"its last step was {end.step}; {kept}")
    rank, others = end.rank, case.others
    if isinstance(found, HangFinding):
        rank, others = found.rank, found.others
    elif found.is_of_job:
        rank = None
    host = end.host or _text.text(_text.record(case.evidence.lease.get("process")).get("host"))
    return Verdict(
        found.cause,
        found.sentence,
        sure,
        tuple(told),
        tuple(_advice(case, found)),
        rank=rank,
        host=host or None,
        time=end.time,
        step=end.step,
        durable_step=durable,
        others=tuple(others),
        # A run that was ended because it hung did not finish, whatever held it.
        restart=Restart.BACKOFF if is_hang else restart_after(found.cause),
    )


def _doubts(case: Case) -> Iterator[str]:
    """Why a cause is only likely; empty where the evidence says it already."""
    end, fault, status = case.end, case.end.fault, case.end.status or 0
    if after := _lines_after(case.evidence):
        is_failure = _REPORTED.search("\n".join(case.evidence.output.splitlines()[-after:]))
        recovered = "" if is_failure else ": it may have recovered"
        yield f"{_text.count(after, 'line')} came after that{recovered}"
    if any(sign.details.get("is_bare") for sign in end.signs):
        yield "its traceback is missing"
    if fault is not None and (fault.then or (fault.by and end.status is None)):
        yield ""  # that one exception led to the other is not told
    if case.evidence.kind == "led" and fault is not None and status > 1:
        yield f"it left with status {status}, and an exception alone gives 1"
    if not case.is_ordered:
        yield ""  # `culprit` says that the order is not known


def _advice(case: Case, found: Finding) -> list[str]:
    fault = case.end.fault
    raised = [fault.type, fault.message, *fault.chain, fault.tail] if fault is not None else []
    hints = advice.hints_for(found.cause, "\n".join([found.sentence, *found.evidence, *raised]))
    lines = [*hints, *found.advice]
    return advice.fitting(lines, case.evidence.output) if case.evidence.kind == "log" else lines


def _printable(evidence: Evidence, verdict: Verdict) -> Verdict:
    """Every text in one line that a terminal can show, and the folder in place of RUN."""
    lines = [_one_line(each) for each in verdict.advice]
    if evidence.kind == "run" and evidence.subject:
        folder = shlex.quote(evidence.subject)
        lines = [_RUN.sub(lambda found: f"{found[1]} {folder}", each) for each in lines]
    return replace(
        verdict,
        sentence=_one_line(verdict.sentence),
        evidence=tuple(dict.fromkeys(map(_one_line, verdict.evidence))),
        advice=tuple(dict.fromkeys(lines)),
        others=tuple(map(_one_line, verdict.others)),
    )


def _lines_after(evidence: Evidence) -> int:
    """How many lines a log has after its last error; 0 if they are few or it surely ended."""
    said = {sign.kind for sign in evidence.signs}
    if evidence.kind != "log" or not said <= {"python_exception", "holdfast_start", *KINDS}:
        return 0  # a launcher, a shell or SLURM reported the end
    last = min(evidence.signs, key=lambda sign: sign.from_end, default=None)
    after = last.from_end if last is not None else 0
    lines = evidence.output.splitlines()[-after:] if after else []
    after -= sum(map(bool, map(_EXIT_NOISE.match, lines)))
    few = 0 if last is not None and was_caught(last) else _FEW_LINES
    return after if after > few else 0


def _one_line(text: str) -> str:
    """In one line of characters that a terminal can show, with one full stop."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    line = re.sub(r"(?:…|,)\.$", lambda end: "…" if end[0] == "…." else ".", line)
    return line.replace("..", ".") if line.endswith("..") and not line.endswith("...") else line


# -- An end because of a hang: the verdict is that of the hang, not of the kill --------------------

_ENDED_BY_OTHERS = (-9, -15, -6)  # a kill, a cancel, NCCL's own watchdog


def open_hang(evidence: Evidence) -> Record:
    """The hang that was not over when it ended; empty if there was none."""
    records = (evidence.hang, _text.record(_text.record(evidence.led).get("hang")))
    return next((each for each in records if each and each.get("ended") is None), {})


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
    told = as_told(hang)
    found = explain(hang) if _text.records(hang.get("looks")) else told
    if hang.get("by") != "leader" and told.cause is not Cause.UNKNOWN:
        # Its source line may have changed or be gone since.
        found.cause, found.sentence = told.cause, told.sentence
    found.sure = found.sure if found.sure is not Sure.CERTAIN else sure
    name_dead_thread(found, case.evidence.signs, case.evidence.journal)
    found.evidence.append(how)
    files = sorted(path for path in case.evidence.files if path.name.startswith("hang"))
    stacks = str(files[-1]) if files else "hang.txt in the run folder"
    found.advice.append(f"Every thread of every process at that time: {stacks}")
    found.advice += advice.go_on(case)
    return found


def tell_hang(evidence: Evidence) -> list[str]:
    """That it hung when another cause ended it."""
    hang = open_hang(evidence)
    sentence = _text.one_line(_text.text(hang.get("sentence")), 300)
    told = f"it hung then: {sentence}" if sentence else "it made no more steps then"
    return [told] if hang else []


# -- Ends that no process has recorded: the records stop -------------------------------------------

_GONE = (
    "`holdfast run` and its command ended together: a power cut, a container or a job step that "
    "was ended, or a kill of both."
)
_FULL = "Its end could not be recorded: the disk of the run folder was full."
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


def _tell_full_folder(evidence: Evidence) -> list[str]:
    """That no end could be recorded in the run folder; empty if there was room."""
    saves = [e for e in evidence.journal if e.get("event") in ("checkpoint", "save-failed")]
    error = _text.one_line(_text.text(saves[-1].get("error"))) if saves else ""
    told = [f"the last save failed: {error}"] if "disk is full" in error else []
    if evidence.run.is_disk_full:
        told.append("the file system of the run folder is full now, and an end is recorded there")
    return told


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
    if full := _tell_full_folder(evidence):
        told += full
        return Finding(Cause.NOT_DURABLE, _FULL, Sure.BY_EXCLUSION, told, [advice.MAKE_ROOM])
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


# -- The rules, in order ---------------------------------------------------------------------------

_RULES: tuple[Callable[[Case], Finding | None], ...] = (
    judge_hung,
    judge_decided,
    judge_asked,
    judge_slurm,
    judge_finished,
    judge_hung_and_killed,
    judge_mismatch,
    judge_timed_out,
    judge_collective,
    judge_kill,
    judge_crash,
    judge_lost_child,
    judge_python,
    judge_terminated,
    judge_lost,
    judge_stacks,
)
