"""Ends that somebody wanted: finished, asked to stop, ended by the scheduler.

And those that only say so: status 0 is no proof of success.
"""

from __future__ import annotations

import re

from holdfast import _errors, _text
from holdfast._diagnose import advice
from holdfast._diagnose.evidence.case import Case, Finding
from holdfast._diagnose.evidence.evidence import Record
from holdfast._diagnose.evidence.memory import moved, tell_memory
from holdfast._diagnose.texts.exceptions import fault_of_how
from holdfast._diagnose.verdict import Cause, Sure

_BY_REASON = (
    (re.compile("time limit", re.IGNORECASE), Cause.TIME_LIMIT),
    (re.compile("preempted|requeued by slurm", re.IGNORECASE), Cause.PREEMPTED),
    (re.compile("scancel|holdfast|SIG|Ctrl-C|interrupt|run\\.stop", re.IGNORECASE), Cause.ASKED),
)
_STOPS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP")
_ANSWER_SECONDS = 120.0
_OUTER = ("<module>", "")  # the outermost frame of what nobody caught
_FEW_LINES = 10  # that a shell script prints after what it started has failed
_OF_A_RANK = re.compile(r"rank \d+ ")
_LAUNCHER_GONE = re.compile(r"\(pid \d+\) is gone")
_DECIDED = {
    _errors.BAD: (Cause.BAD_TRAINING, "It stopped because a rule called the training bad"),
    _errors.NOT_DURABLE: (
        Cause.NOT_DURABLE,
        "It was asked to stop, and the disk did not take its state",
    ),
    _errors.IDLE: (Cause.NO_PROGRESS, "It came back again and again without making a step"),
}
_ADVICE = {
    Cause.BAD_TRAINING: [
        "Started again it would do the same: look at the metrics, the learning rate, the data of "
        "the last steps, and go back to an earlier checkpoint (holdfast ls RUN)."
    ],
    Cause.NOT_DURABLE: [
        "Make room on the disk of the run folder (df -h), then start it again: the state may "
        "still be in memory, and holdfast status RUN says so."
    ],
    Cause.NO_PROGRESS: [
        "See why no step is made in its time: loading and compiling may take longer than the "
        "job's limit. Ask for more time, then submit it again."
    ],
}


def judge_decided(found: Case) -> Finding | None:
    """It left with a status of holdfast that says why."""
    status = _exit_status(found)
    if status not in _DECIDED:
        return None
    cause, sentence = _DECIDED[status]
    how = _text.text(found.evidence.exit.get("how"))
    evidence = [f"it left with status {status}" + (f": {_text.one_line(how)}" if how else "")]
    for event in found.evidence.journal:
        if event.get("event") == "save-failed":
            evidence.append(f"a save failed: {_text.one_line(str(event.get('error')))}")
    sure = Sure.CERTAIN if how else Sure.LIKELY
    return Finding(cause, f"{sentence}.", sure, evidence, _ADVICE[cause])


def judge_asked(found: Case) -> Finding | None:
    """Somebody, or the scheduler, wanted it to end."""
    reason, status = _asked(found)
    if not reason:
        return _fenced_off(found)
    if _LAUNCHER_GONE.search(reason):
        return Finding(
            Cause.KILLED,
            f"The launcher died, and the ranks saved and left: {reason}.",
            Sure.LIKELY,
            [f"reason of the stop: {reason}", *_senders(found)],
            [
                "See how the launcher ended; holdfast run -- torchrun … records it.",
                *advice.go_on(found),
            ],
        )
    cause = next((c for shape, c in _BY_REASON if shape.search(reason)), Cause.ASKED)
    if status == _errors.REQUEUE and reason in ("SIGUSR1", "SIGUSR2"):
        cause = Cause.TIME_LIMIT if found.is_in_slurm else Cause.PREEMPTED
    evidence = [f"it was asked to stop: {_text.one_line(reason)}"]
    if status is not None:
        evidence.append(f"it left with status {status}")
    evidence += _senders(found) + _requests(found)
    said = _text.text(found.evidence.requeue.get("said"))
    if said:
        evidence.append(f"SLURM: {_text.one_line(said)}")
    sentence = _sentence(found, cause, reason)
    killed = found.end.status == -9 and bool(found.end.asked)
    if killed and moved(found.end.counters).kills:
        killed = False  # more time would not have helped it
        sentence = f"{sentence[:-1]}; while it left, the kernel's OOM killer ended it."
        evidence += ["its cgroup counted an OOM kill then", *tell_memory(found.end.memory, None)]
    elif killed:
        sentence = f"{sentence[:-1]}; it was killed before it had left by itself."
        evidence.append("its last signal was SIGKILL: the time that it was given was too short")
    elif found.end.asked and found.end.signal in CRASHES:
        sentence = f"{sentence[:-1]}; while it left, it died of {found.end.signal}."
    advised = [] if cause is Cause.ASKED and not killed else _more_time(found, cause, killed=killed)
    if cause is not Cause.ASKED and "by itself" in said:
        return Finding(cause, sentence, Sure.CERTAIN, evidence, [*advised, said])
    sure = Sure.CERTAIN if found.evidence.exit or found.end.asked else Sure.LIKELY
    return Finding(cause, sentence, sure, evidence, [*advised, *advice.go_on(found)])


def _fenced_off(found: Case) -> Finding | None:
    """Another process has the run now: this one wrote nothing any more, and left."""
    fault = found.end.fault
    if fault is None or fault.type != "RunIsLive" or "took over" not in fault.message:
        return None
    return Finding(
        Cause.ASKED,
        f"Another process took the run over ({_text.one_line(fault.message).rstrip('.')}).",
        Sure.CERTAIN,
        ["a newer attempt has the folder, and this one wrote nothing any more"],
        ["The run goes on there: holdfast why RUN"],
    )


def _sentence(found: Case, cause: Cause, reason: str) -> str:
    if cause is Cause.TIME_LIMIT:
        return f"The job's time was over ({_text.one_line(reason)})."
    if cause is Cause.PREEMPTED:
        return f"It was interrupted to go on later ({_text.one_line(reason)})."
    by = _senders(found)
    sender = f"; {by[-1]}" if by else ""
    return f"It was asked to stop ({_text.one_line(reason)}){sender}."


def _more_time(found: Case, cause: Cause, *, killed: bool) -> list[str]:
    if killed:
        return [
            "Give it more time between the warning and the kill: docker stop --time=60, in "
            "Kubernetes terminationGracePeriodSeconds, sbatch --signal=USR1@120"
        ]
    if cause is Cause.TIME_LIMIT and not found.evidence.requeue:
        return ["To have such a job go on by itself: sbatch --requeue, see holdfast lint"]
    return []


def _asked(found: Case) -> tuple[str, int | None]:
    """Why it was to stop, as it noted it; empty if nobody had asked."""
    record = found.evidence.exit
    how, status = _text.text(record.get("how")), _text.whole(record.get("status"))
    if found.end.asked and not _OF_A_RANK.match(found.end.asked):
        return found.end.asked, status if status is not None else found.end.status
    asked = _errors.ASKED
    if how and status in asked and not _OF_A_RANK.match(how) and not _is_error(record):
        return how, status
    if record.get("asked") is True and how and not _OF_A_RANK.match(how):
        return how, status
    fault = found.end.fault
    if record and fault is not None and fault.kind == "interrupt":
        return "Ctrl-C, KeyboardInterrupt", status
    if not record and _left_after_signal(found):
        return _text.text(led_signals(found.evidence.led)[-1].get("name")), found.end.status
    sign = found.end.has("holdfast_stop", "holdfast_finished")
    if sign is not None and sign.kind == "holdfast_stop" and not record and found.end.fault is None:
        stopped = _text.whole(sign.details.get("status"))
        reason = _text.text(sign.details.get("reason"))
        if stopped in asked and reason and not _OF_A_RANK.match(reason):
            return reason, stopped
    return "", None


def _left_after_signal(found: Case) -> bool:
    """Whether a script of its own kind answered a signal, and left by itself with a status."""
    end, sent = found.end, led_signals(found.evidence.led)
    if not sent or end.status is None or not 0 < end.status < 128:
        return False
    if _text.text(sent[-1].get("name")) not in _STOPS:
        return False
    # Workers die of a signal to the whole group, and the script of that.
    if end.fault is not None and end.fault.kind not in ("worker", "exit"):
        return False
    moment = _text.real(sent[-1].get("time"))
    return moment is not None and end.time is not None and 0 <= end.time - moment < _ANSWER_SECONDS


def _is_error(record: Record) -> bool:
    fault = fault_of_how(record)
    return fault is not None and fault.type != "KeyboardInterrupt"


def _senders(found: Case) -> list[str]:
    """Who sent the signals that `holdfast run` has seen."""
    return [tell_sender(each) for each in led_signals(found.evidence.led)][-3:]


def led_signals(led: Record | None) -> list[Record]:
    """The signals that the leader got, oldest first."""
    return [s for s in _text.records(_text.record(led).get("signals")) if s.get("name")]


def tell_sender(signal: Record) -> str:
    """Who sent a signal, in words."""
    name, pid = _text.text(signal.get("name")), _text.whole(signal.get("pid"))
    uid, by = _text.whole(signal.get("uid")), _text.text(signal.get("by"))
    if not pid:
        return f"{name} came from the terminal or the kernel"
    whose = "" if uid is None else " of root" if uid == 0 else f" of uid {uid}"
    return f"{name} came from {f'`{by}` ' if by else ''}(pid {pid}{whose})"


def _requests(found: Case) -> list[str]:
    told = []
    for event in found.evidence.journal:
        if event.get("event") == "request" and event.get("kind") == "stop" and event.get("by"):
            told.append(f"the stop was asked for by {_text.one_line(str(event['by']))}")
    return told[-1:]


def judge_finished(found: Case) -> Finding | None:
    """Status 0: finished, or only said to be."""
    record, end = found.evidence.exit, found.end
    lying = _lying(found)
    if lying is not None:
        return lying
    if (said := _said_finished(found)) is not None:
        return said
    if _exit_status(found) != 0:
        return None
    others = [each for each in found.ends if each is not end]
    if not record and any(each.fault is not None or each.status for each in others):
        return None  # another rank has not
    if not record and end.has("nan_loss") is not None:
        return None  # it ended, and was of no use
    if record and end.status not in (None, 0):
        return None  # something came after the run was left
    step, total = found.finished_step, _total(found)
    if step is not None:
        evidence = [f"the journal has its end, at step {step}", "it left with status 0"]
        return Finding(Cause.FINISHED, f"It finished, at step {step}.", Sure.CERTAIN, evidence)
    left = _text.whole(record.get("step"))
    if left is not None and total is not None and left < total:
        sentence = f"It left its loop by itself at step {left} of {total}, with status 0."
        return Finding(
            Cause.FINISHED,
            sentence,
            Sure.LIKELY,
            ["it left with status 0", f"the loop was to make {total} steps"],
            advice.go_on(found),
        )
    if record:
        at = f" at step {left}" if left is not None else ""
        sentence = f"It ended by itself{at}, with status 0."
        return Finding(Cause.FINISHED, sentence, Sure.CERTAIN, ["it left with status 0"])
    evidence = ["it left with status 0", "status 0 is no proof: sys.exit(256) looks the same"]
    if end.fault is not None and not end.fault.is_exit:
        evidence.append(f"it had printed an error, and went on: {end.fault.sentence()}")
    return Finding(Cause.FINISHED, "It ended by itself, with status 0.", Sure.LIKELY, evidence)


def _said_finished(found: Case) -> Finding | None:
    """By its own last words, where there is nothing but a log."""
    end = found.end
    sign = end.has("holdfast_finished")
    if sign is None or sign is not end.signs[-1] or found.evidence.exit or end.status is not None:
        return None
    step = _text.whole(sign.details.get("step"))
    at = f", at step {step}" if step is not None else ""
    evidence = [f"it printed: {_text.one_line(sign.text)}", "nothing that it printed then is bad"]
    return Finding(Cause.FINISHED, f"It finished{at}.", Sure.LIKELY, evidence)


def _lying(found: Case) -> Finding | None:
    """A status of 0 that was none."""
    end, record = found.end, found.evidence.exit
    code = _number(end.fault.exit_code) if end.fault is not None and end.fault.is_exit else None
    if code is None:
        code = _text.whole(record.get("status"))
    if code is not None and code != 0 and code % 256 == 0:
        return Finding(
            Cause.LYING_STATUS,
            f"It left with sys.exit({code}), which the system cuts to 0: that looks like success, "
            "and was none.",
            Sure.CERTAIN,
            [f"the script's own status was {code}; of a status only 8 bits are kept"],
            ["Leave with a status from 1 to 255 where something failed."],
        )
    if end.status == 0 and end.fault is not None and not record and not end.fault.is_exit:
        last = _text.one_line("\n".join(reversed(found.evidence.output.strip().splitlines()[-1:])))
        if end.fault.type in last or _was_hidden(found):
            return Finding(
                Cause.LYING_STATUS,
                f"It left with status 0, and yet its last words are an error: "
                f"{end.fault.sentence(120)}.",
                Sure.LIKELY,
                ["the status was 0", f"the last line is: {last}"],
                [
                    "See what starts it: a shell script without `set -e`, a pipe (`… | tee log` "
                    "has the status of tee; use `set -o pipefail`), or an except that hides it."
                ],
            )
    return None


def _was_hidden(found: Case) -> bool:
    """Whether a shell script went on after what ended its command, and left with 0 itself."""
    command = _text.record(found.evidence.led).get("command")
    first = str(command[0]) if isinstance(command, list) and command else ""
    raised = found.end.has("python_exception")
    if raised is None or not re.search(r"(?:^|/)(?:ba|da|z|k)?sh$|\.sh$", first):
        return False
    is_of_main = raised.details.get("outermost") in _OUTER and not raised.details.get("thread")
    return is_of_main and raised.details["from_end"] <= _FEW_LINES


def _number(said: str | None) -> int | None:
    try:
        return None if said is None or len(said) > 18 else int(said)
    except ValueError:
        return None


def _exit_status(found: Case) -> int | None:
    record = found.evidence.exit
    if record:
        return _text.whole(record.get("status"))
    return found.end.status


def _total(found: Case) -> int | None:
    totals = [_text.whole(e.get("total")) for e in found.evidence.journal]
    return next((total for total in reversed(totals) if total is not None), None)
