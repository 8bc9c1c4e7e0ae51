"""The case: how each process of the job ended, the one to blame, and what a rule answers.

An end is put together from all records of it: the trainer's record of an exception, its keeper's
record of a death, what `holdfast run` saw of its descendants, torchrun's summary, the printed
lines. Each of them may be missing.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast import _text
from holdfast._diagnose.evidence.evidence import Evidence, RankEvidence, Record
from holdfast._diagnose.texts.exceptions import (
    KINDS,
    Fault,
    cause_before,
    fault_of_error,
    fault_of_how,
    fault_of_line,
    fault_of_signs,
    raised_just_before,
    raises_after,
)
from holdfast._diagnose.texts.python import is_own_file
from holdfast._diagnose.texts.signs import IN_VAIN, culprits_of
from holdfast._diagnose.verdict import Cause, Sure

if TYPE_CHECKING:
    from holdfast._diagnose.texts.sign import Sign

_T = TypeVar("_T")

# The status that a shell returns for a child that died of a signal.
_SHELL_STATUSES = {128 + number: -number for number in (4, 6, 7, 8, 9, 11)}
_OF_ANOTHER = re.compile(r"rank [1-9]\d* ")  # the reason with which rank 0 was told to leave
_WENT_FIRST = re.compile(r"rank (\d{1,6})(?: on \S+)? failed: (.*)", re.DOTALL)
_LINES = {  # of a shell or of srun
    **{"killed_line": -9, "segfault_line": -11, "abort_line": -6, "bus_error": -7},
    **{"illegal_instruction_line": -4, "floating_point_line": -8, "terminated_line": -15},
    **{"kernel_oom": -9, "slurm_oom": -9, "kernel_segfault": -11, "sent_line": None},
}
_TIMEOUTS = ("nccl_timeout", "gloo_timeout")
_OF_OTHERS = ("timeout", "peer_lost", "rendezvous")  # what an exception says of other ranks
# Where Python waits for a thread or a child.
_WAITS = ("/queue.py", "/threading.py", "/multiprocessing/", "/concurrent/futures/", "/asyncio/")
_OF_SOCKETS = ("timed out", "The read operation timed out", "The write operation timed out")
_LAUNCHER_ENDS = (-15, -9, -2, -1)  # what torchrun and srun send to those that are left


@dataclass
class End:
    """How one process ended, as far as is known."""

    rank: int | None = None  # None: there is only one
    host: str | None = None
    pid: int | None = None
    time: float | None = None
    step: int | None = None
    status: int | None = None  # as subprocess gives it
    fault: Fault | None = None
    how: str = ""  # in the journal's words
    asked: str = ""  # why it was to stop, if it was
    was_sent_away: bool = False  # by its keeper, because another rank had ended
    is_unreachable: bool = False  # with its whole machine
    counters: Record = field(default_factory=dict)
    memory: list[Record] = field(default_factory=list)
    children: list[Record] = field(default_factory=list)
    graphs: list[Record] = field(default_factory=list)  # of autograd, that are kept
    stacks: str = ""
    signs: list[Sign] = field(default_factory=list)
    is_child: bool = False  # of the process that reported its end
    one_of: tuple[int, ...] = ()  # the ranks of which it is one, if its lines do not name it
    seen_at: float | None = None  # when a leader saw it end: these times are in the right order

    def fill(self, **known: Any) -> None:
        """Set what is not known yet."""
        for name, value in known.items():
            if getattr(self, name) in (None, "", [], {}):
                setattr(self, name, value)

    @property
    def signal(self) -> str | None:
        return _text.signal_name(self.status)

    def has(self, *kinds: str) -> Sign | None:
        """The last line of one of these kinds that it printed."""
        return _last(self.signs, kinds)

    @property
    def is_recorded(self) -> bool:
        """Whether anything is known of its end."""
        return self.status is not None or self.fault is not None or bool(self.how)

    @property
    def had_failed(self) -> bool:
        """Whether it had noted an exception itself, and was leaving because of that."""
        return self.fault is not None and _text.whole(self.fault.record.get("pid")) is not None

    def name(self) -> str:
        """Who it was, to begin a sentence with."""
        where = f" on {self.host}" if self.host else ""
        if self.rank is not None:
            return f"rank {self.rank}{where}"
        if self.one_of:
            return f"a rank{where}"
        who = "the child process" if self.is_child else "the training process"
        return f"{who}{f' (pid {self.pid}{where})' if self.pid else where}"


@dataclass
class Finding:
    """What a rule answers: the verdict, without the parts that are the same for all rules."""

    cause: Cause
    sentence: str
    sure: Sure
    evidence: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    # The scheduler ended all of it: no rank is to blame.
    is_of_job: bool = field(default=False, kw_only=True)


@dataclass
class Case:
    """All the evidence, and the end that is to be explained."""

    evidence: Evidence
    ends: list[End]
    end: End  # of the rank to blame
    others: list[str] = field(default_factory=list)
    culprit: list[str] = field(default_factory=list)  # how it was found, among several
    is_ordered: bool = True  # False: another rank may have been first

    @property
    def who(self) -> str:
        return self.end.name()

    @property
    def opening(self) -> str:
        """`who`, at the beginning of a sentence."""
        return self.who[:1].upper() + self.who[1:]

    def sign(self, *kinds: str) -> Sign | None:
        """The last line of one of these kinds, of all ranks."""
        return _last(self.evidence.signs, kinds)

    @property
    def is_in_slurm(self) -> bool:
        return bool(
            self.evidence.job
            or _text.record(self.evidence.lease.get("job"))
            or _text.record(self.evidence.beat.get("slurm"))
        )

    @property
    def durable_step(self) -> int | None:
        events = self.evidence.journal
        steps = [each.get("step") for each in events if each.get("event") == "checkpoint"]
        of_ranks = [r for rank in self.evidence.ranks for r in (rank.death, rank.exit, vars(rank))]
        records = (self.evidence.exit, self.evidence.beat, *events, *of_ranks)
        told = map(_text.whole, [*steps, *(each.get("durable_step") for each in records)])
        found = (self.evidence.run.durable_step, *told)
        return max((step for step in found if step is not None), default=None)

    @property
    def finished_step(self) -> int | None:
        """The step at which the training was complete, if it was."""
        ends = [each for each in self.evidence.journal if each.get("event") == "finished"]
        return _text.whole(ends[-1].get("step")) or 0 if ends else None

    def stacks_lines(self, most: int = 8) -> list[str]:
        """The top of the stack that faulthandler wrote of the thread that failed."""
        dump = f"\n{self.end.stacks}".rpartition("\nFatal Python error")[2]
        lines = dump.partition("\nCurrent thread")[2].splitlines()[1:]
        frames = takewhile(lambda line: line.startswith("File "), map(str.strip, lines))
        return [*islice(frames, most)]


@dataclass(frozen=True)
class Trouble:
    """What went wrong: an exception, or a printed line."""

    kind: str
    said: str  # in one line
    fault: Fault | None
    sign: Sign | None

    @property
    def message(self) -> str:
        """The whole text, to find figures in."""
        fault, printed = self.fault, [self.sign.text] if self.sign is not None else []
        said = (
            [f"{fault.type}: {fault.message}", *fault.chain] if fault is not None else [self.said]
        )
        return "\n".join([*said, *printed])

    @property
    def record(self) -> dict[str, Any]:
        return self.fault.record if self.fault is not None else {}

    @property
    def details(self) -> dict[str, Any]:
        return self.sign.details if self.sign is not None else {}

    def evidence(self, case: Case) -> list[str]:
        told, fault = [], self.fault
        if fault is not None:
            who = "its main thread" if fault.by else "it"
            parts = {
                "at {}": fault.place,
                "it was raised in {}": _text.text(self.record.get("caught_in")),
                "it had printed just before: {}": _text.text(self.record.get("announced"), 240),
                f"then {who} raised {{}}": _text.one_line(fault.then, 240),
            }
            told = [f"{case.who} {fault.verb} {fault.sentence(400)}"]
            told += [f"which came of {_text.one_line(each, 240)}" for each in fault.chain[:3]]
            told += [shape.format(part) for shape, part in parts.items() if part]
        asserted = case.sign("cuda_assert") if self.kind == "cuda_error" else None
        if asserted is not None and asserted is not self.sign:
            told.append(f"its kernel printed: {_text.one_line(asserted.text, 240)}")
        if self.sign is not None and (fault is None or self.sign.text not in told[0]):
            told.append(f"it printed: {_text.one_line(self.sign.text, 400)}")
        if case.end.had_failed and case.end.signal:
            told.append(f"while it left because of that, it died of {case.end.signal}")
        phase = _text.text(self.record.get("phase"))
        return [*told, f"in the phase {phase}"] if phase else told


# -- The ends of all ranks, from their records -----------------------------------------------------


def _last(signs: list[Sign], kinds: tuple[str, ...]) -> Sign | None:
    return next((each for each in reversed(signs) if each.kind in kinds), None)


def ends_of(evidence: Evidence) -> list[End]:
    """The ends of all ranks; of a job of one process, its one."""
    failures = _torchrun_failures(evidence.signs)
    processes = _text.records(_text.record(evidence.led).get("processes"))
    by_rank = {r: p for p in processes if (r := _text.whole(p.get("rank"))) is not None}
    spoken = {s.rank for s in evidence.signs if s.rank is not None}
    spoken |= set(culprits_of(evidence.signs)[:64])  # they may have printed nothing
    known = {each.rank for each in evidence.ranks}
    planned = evidence.run.ranks_planned or 0
    is_many = planned > 1 or len(known | set(by_rank) | set(failures) | spoken) > 1
    if not is_many and not evidence.ranks:
        only = _only_end(evidence, RankEvidence())
        # A log that names one rank only: the others printed nothing.
        # What no line of it tells is not its own, if it only lost another.
        lost = {s.rank for s in evidence.signs if s.kind == "peer_lost"} if only.status else set()
        # Nor is an exception without a rank, if it only waited for another.
        if only.fault is not None and only.fault.kind != "timeout":
            lost |= {s.rank for s in evidence.signs if s.kind in _TIMEOUTS}
        named = [*failures, *(spoken - lost)] if evidence.kind == "log" else []
        only.rank = named[0] if named else None
        is_own = only.fault is not None and only.fault.kind not in _OF_OTHERS
        first = _first_unlabelled(evidence.signs) if named and not is_own else None
        return [only] if first is None else [only, first]
    if not is_many:
        return [_only_end(evidence, evidence.ranks[0])]
    numbers = sorted(set(range(min(planned, 4096))) | known | set(by_rank) | set(failures) | spoken)
    records = {each.rank: each for each in evidence.ranks}
    ends = []
    for number in numbers[:4096]:
        end = _end_of(evidence, records.get(number, RankEvidence(rank=number)), number)
        _add_process(end, by_rank.get(number, {}))
        _add_failure(end, failures.get(number, {}))
        _add_exit(end)
        _add_line(end)
        ends.append(end)
    _add_parting(ends, evidence)
    _add_step_end(ends, evidence.signs)
    # If one rank failed, lines without a rank are its own. NCCL's watchdog aborts its process.
    failed = [e for e in ends if (e.status or 0) > 0 or e.status == -6 or e.fault is not None]
    by_srun = [e for e in failed if e.has("srun_exit") and e.fault is None]
    if len(by_srun) == len(failed) > 1:  # the first that srun named
        failed = [min(by_srun, key=lambda end: end.signs[0].line)]
    of_others = (end.fault.kind for end in failed if end.fault is not None)
    # A rank that timed out had waited for the one that raised.
    waited = [end for end in ends if end.has(*_TIMEOUTS)]
    failed = [end for end in failed if end.fault is None and end not in waited]
    is_of_others = evidence.kind == "log" and all(kind in _OF_OTHERS for kind in of_others)
    if not failed and is_of_others and (first := _first_unlabelled(evidence.signs)) is not None:
        missing = culprits_of(evidence.signs) if waited else []
        failed = [end for end in ends if end.rank in missing and end.fault is None]
        ends += [] if failed else [first]
    if failed and is_of_others:
        unlabelled = [sign for sign in evidence.signs if sign.rank is None]
        fault = fault_of_signs(unlabelled)
        is_told = fault is not None or any(sign.kind in KINDS for sign in unlabelled)
        if len(failed) > 1 and is_told and {end.status for end in failed} in ({1}, {2}, {None}):
            return [_one_of(failed, fault, unlabelled), *(e for e in ends if e not in failed)]
        if len(failed) == 1:
            failed[0].fault = fault
            failed[0].signs += [] if fault is not None else unlabelled
            if failed[0].status is None:
                failed[0].one_of = (failed[0].rank or 0,)
    return ends


def _first_unlabelled(signs: list[Sign]) -> End | None:
    """The end that lines without a rank tell, if others waited for that process or lost it below.

    It raised, or its launcher was told to leave.
    """
    told = [sign for sign in signs if sign.kind in (*_TIMEOUTS, "peer_lost")]
    first = min((sign.line for sign in told if sign.rank is not None), default=0)
    above = [sign for sign in signs if sign.rank is None and sign.line < first]
    fault = fault_of_signs(above)
    if fault is not None and fault.kind in (*_OF_OTHERS, "interrupt"):
        return None
    end = End(fault=fault, signs=above)
    if fault is None and end.has("terminated_line") is not None:
        _add_line(end)
    return end if end.is_recorded else None


def _one_of(failed: list[End], fault: Fault | None, signs: list[Sign]) -> End:
    """The rank that raised, among those that left with one status: its lines do not name it."""
    hosts = {end.host for end in failed}
    numbers = tuple(end.rank for end in failed if end.rank is not None)
    host, status = hosts.pop() if len(hosts) == 1 else None, failed[0].status
    return End(host=host, status=status, fault=fault, signs=signs, one_of=numbers)


def _add_step_end(ends: list[End], signs: Iterable[Sign]) -> None:
    """srun ends the other tasks of a step after one of them has failed."""
    cancelled = next((s.line for s in signs if s.kind == "slurm_step_cancelled"), None)
    has_exited = any(end.has("srun_exit") for end in ends)
    for end in ends if cancelled is not None and has_exited else []:
        told = end.has("killed_line", "terminated_line")
        is_later = told is not None and told.line > (cancelled or 0)
        end.was_sent_away |= is_later and is_ended_by_launcher(end)


def _add_parting(ends: list[End], evidence: Evidence) -> None:
    """The reason with which the run ended the other ranks names the rank that failed first."""
    how, status = evidence.exit.get("how"), _text.whole(evidence.exit.get("status"))
    sign = _last(evidence.signs, ("holdfast_stop",))
    if not how and sign is not None:
        how, status = sign.details.get("reason"), _text.whole(sign.details.get("status"))
    match = _WENT_FIRST.match(_text.text(how))
    if match is None:
        return
    for end in ends:
        if end.rank == int(match[1]):
            # Its status tells nothing more then, unless it is a signal.
            if end.fault is None and (end.status is None or end.status >= 0):
                end.fault = fault_of_line(match[2])
                if end.fault is not None and end.fault.is_exit:
                    end.fault.exit_code = end.fault.message or None
        elif end.fault is None and end.status is not None and end.status == status:
            end.was_sent_away = True


def _only_end(evidence: Evidence, found: RankEvidence) -> End:
    end = _end_of(evidence, found, None)
    led = _text.record(evidence.led)
    processes = _text.records(led.get("processes"))
    mine = next((p for p in processes if end.pid and p.get("pid") == end.pid), {})
    _add_process(end, mine)
    end.fill(status=_shell_status(_text.whole(led.get("status"))))
    if end.status is None and not evidence.exit:
        end.status = _job_status(evidence.job)
        # The status of the batch script may hide that of the training; a cancelled job has 0, too.
        is_over = "COMPLETED" in _text.text(_text.record(evidence.job).get("state"))
        if end.status == 0 and (not is_over or fault_of_signs(evidence.signs) is not None):
            end.status = None
    ranked = [p for p in processes if _text.whole(p.get("rank")) is not None]
    if len({p["rank"] for p in ranked}) == 1 and end.status == 1:
        # torchrun with one rank: its own status 1 tells nothing.
        _add_process(end, ranked[-1], over=True)
    failures = _torchrun_failures(evidence.signs)
    _add_failure(end, next(iter(failures.values()), {}))
    _add_exit(end)
    _add_line(end)
    end.fill(
        pid=_text.whole(led.get("child_pid")),
        host=_text.text(led.get("host")) or None,
        time=_text.real(led.get("ended")),
        memory=_text.records(led.get("memory")),
        counters=_text.record(led.get("counters")),
        children=processes,
    )
    told = fault_of_signs(evidence.signs)
    # A launcher's summary has one line of an exception, and its traceback has the rest.
    is_same = told is not None and end.fault is not None and told.type == end.fault.type
    if end.fault is None or (is_same and not end.fault.record):
        end.fault = told
    return end


def _end_of(evidence: Evidence, found: RankEvidence, rank: int | None) -> End:
    death = found.death
    # Without a type the record is a suspicion, not an exception: it tells neither end nor step.
    error = found.error if _text.text(found.error.get("type")) else {}
    exit_record = found.exit or (evidence.exit if not found.rank else {})
    led = found.led or (_text.record(evidence.led) if rank is None else {})
    signs = [s for s in evidence.signs if rank is None or s.rank == rank]
    left = exit_record if exit_record.get("status") is not None else {}
    end = End(
        rank=rank,
        host=_first(_text.text, "host", death, error, found.process) or found.host,
        pid=_first(_text.whole, "pid", death, error, found.process) or found.pid,
        time=_first(_text.real, "time", error, death, exit_record),
        step=_first(_text.whole, "step", error, death, left, vars(found), exit_record),
        status=_text.whole(death.get("status")),
        asked=_text.text(death.get("asked")),
        was_sent_away=death.get("left_status") is not None,
        counters=_text.record(death.get("counters"))
        or _text.record(error.get("counters"))
        or _text.record(led.get("counters")),
        memory=_text.records(death.get("memory")) or _text.records(led.get("memory")),
        children=_text.records(death.get("children")) or _text.records(error.get("workers")),
        graphs=_text.records(found.error.get("graphs")),
        stacks=found.stacks,
        signs=signs,
    )
    if error.get("where") == "opening":
        end.step = None  # it had not found its step yet
    end.fault = fault_of_error(error)
    if end.fault is not None:
        end.fault = _cause_in_thread(end.fault)
    if end.fault is not None and not end.fault.by:
        end.fault = cause_before(end.fault, signs)
    samples = (error.get("memory"), evidence.beat.get("memory") if rank is None else None)
    end.fill(memory=[sample for each in samples if (sample := _text.record(each))][:1])
    if rank is not None:
        end.fill(status=_shell_status(_text.whole(led.get("status"))))
        if end.fault is None:
            end.fault = fault_of_signs(signs)
    if end.fault is None and not found.rank:
        end.fault = fault_of_how(exit_record)
    if rank == 0 and end.fault is None and _OF_ANOTHER.match(_text.text(exit_record.get("how"))):
        end.was_sent_away = end.was_sent_away or end.status in (None, *_LAUNCHER_ENDS)
    _add_journal(end, evidence.journal, found.rank)
    return end


def _cause_in_thread(fault: Fault) -> Fault:
    """The recorded exception that had ended a thread, if the main thread then waited in vain."""
    ended = _text.records(fault.record.get("threads"))
    first = fault_of_error(ended[-1]) if ended and waited_in_vain(fault) else None
    if any(status < 0 for _, status in lost_children(fault)):
        return fault  # that child is to blame
    if first is None or first.kind in _OF_OTHERS or first.type in IN_VAIN:
        return fault
    by = f"thread {_text.text(ended[-1].get('thread'))}".strip()
    return fault.came_of(first, by=by, record={"traceback": ""})


def waited_in_vain(fault: Fault) -> bool:
    """Whether an exception says that something did not come from a thread or a child process."""
    if fault.type not in IN_VAIN or fault.kind not in ("plain", "worker"):
        return False
    frames = fault.record.get("frames")
    inner = frames[-1] if isinstance(frames, list) and frames else [""]
    file = str(inner[0]) if isinstance(inner, list | tuple) and inner else ""
    if any(part in file for part in _WAITS) or fault.type in ("Empty", "Full"):
        return True
    # Of the network or of a device otherwise; a script may raise it itself after a wait.
    is_of_script = fault.type == "TimeoutError" and is_own_file(file)
    return is_of_script and fault.message not in _OF_SOCKETS and "[Errno" not in fault.message


def lost_children(fault: Fault) -> list[tuple[int | None, int]]:
    """The pid and the status of the worker processes that had failed, by the trainer's record."""
    found = _text.records(fault.record.get("workers"))
    codes = ((_text.whole(p.get("pid")), _text.whole(p.get("exitcode"))) for p in found)
    return [(pid, code) for pid, code in codes if code]


def _add_journal(end: End, journal: Iterable[Record], rank: int) -> None:
    for event in journal:
        if event.get("event") != "rank-died" or _text.whole(event.get("rank")) != rank:
            continue
        how = _text.text(event.get("how"))
        end.is_unreachable = end.is_unreachable or "cannot be reached" in how
        end.fill(
            how=how,
            time=_text.real(event.get("time")),
            host=_text.text(event.get("host")) or None,
            step=_text.whole(event.get("step")),
        )
        if end.status is None and end.fault is None:
            end.status = _status_of_words(how)


def _add_process(end: End, process: Record, *, over: bool = False) -> None:
    """What the leader saw of it; its status is the kernel's."""
    if not process:
        return
    status = _text.whole(process.get("status"))
    if status is not None and over:
        end.status = status
    end.seen_at = _text.real(process.get("ended"))
    end.fill(status=status, pid=_text.whole(process.get("pid")), time=end.seen_at)
    # The counters at its own death: others may have died until the end of the whole command.
    end.counters = _text.record(process.get("counters")) or end.counters


def _add_exit(end: End) -> None:
    """The status, and the node, that a launcher has told."""
    if end.status is None and (exited := end.has("launcher_exit", "srun_exit")) is not None:
        end.status = _shell_status(_text.whole(exited.details.get("exitcode")))
        nodes = [_text.text(s.details.get("node")) for s in end.signs if s.kind == exited.kind]
        end.host = end.host or next(filter(None, reversed(nodes)), None)


def _add_line(end: End) -> None:
    """The signal that a shell or srun has named."""
    told = next((s for kind in _LINES if (s := end.has(kind)) is not None), None)
    if end.status is None and end.fault is None and told is not None:
        pid = str(told.details.get("pid"))  # of a worker, if the exception names it, too
        workers = (str(s.details.get("pid")) for s in end.signs if s.kind.startswith("worker_"))
        if raised_just_before(told, end.signs):
            return
        if raises_after(told, end.signs) or any(pid in each.split(", ") for each in workers):
            return
        number = _text.whole(told.details.get("signal"))
        # A shell prints the same for several signals: its number decides.
        end.status = -number if number else _LINES[told.kind]
        end.host = end.host or _text.text(told.details.get("node")) or None


def is_ended_by_launcher(end: End) -> bool:
    """Whether torchrun or srun may have ended it because another rank had failed."""
    return end.fault is None and end.status in _LAUNCHER_ENDS


def _torchrun_failures(signs: Iterable[Sign]) -> dict[int, Record]:
    found: dict[int, Record] = {}
    for sign in signs:
        if sign.kind != "torchrun_summary":
            continue
        for rank, code in _text.record(sign.details.get("exitcodes")).items():
            if (number := _number(rank)) is not None:
                found[number] = {"status": _text.whole(code)}
        for each in _text.records(sign.details.get("failures")):
            if (number := _number(each.get("rank"))) is not None:
                known = {"status": each.get("exitcode"), "pid": each.get("pid")}
                found[number] = {**known, "host": each.get("host"), "error": each.get("error")}
    return found


def _add_failure(end: End, failure: Record) -> None:
    status = _text.whole(failure.get("status"))
    if end.status is None or (end.status == 1 and status is not None):
        end.status = status
    end.fill(
        fault=fault_of_line(_text.text(failure.get("error"))),
        host=_text.text(failure.get("host")) or None,
        pid=_text.whole(failure.get("pid")),
    )


def _number(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return _text.whole(value)


def _job_status(job: Record | None) -> int | None:
    said = _text.record(job).get("exit_code")
    code, _, number = _text.text(said).partition(":")
    try:
        status = -int(number) if number and int(number) else int(code)
    except ValueError:
        return _text.whole(said)
    return _shell_status(status)


def _shell_status(status: int | None) -> int | None:
    return status if status is None else _SHELL_STATUSES.get(status, status)


def _status_of_words(how: str) -> int | None:
    """Back from the words of a keeper: "was killed by SIGKILL", "ended with status 3"."""
    word = how.split()[-1] if how.split() else ""
    if how.startswith("was killed by"):
        number = getattr(signal, word, None) if word.startswith("SIG") else _number(word)
        return -int(number) if number is not None and 0 < int(number) <= 64 else None
    return _number(word) if how.startswith("ended with status") else None


def _first(read: Callable[[object], _T | None], key: str, *records: Record) -> _T | None:
    """The first of these records that has the key, with a value of that kind."""
    found = (read(each.get(key)) for each in records)
    return next((each for each in found if each not in (None, "")), None)
