"""Ends that a person or a scheduler wanted: finished, asked to stop, ended by SLURM.

And ends that only look like it: status 0 is no proof of success.
"""

from __future__ import annotations

import re

from holdfast import _errors, _text
from holdfast._diagnose import advice
from holdfast._diagnose.deaths.signals import (
    CRASHES,
    led_signals,
    of_kernel,
    oom_of_worker,
    tell_sender,
)
from holdfast._diagnose.evidence.case import Case, Finding
from holdfast._diagnose.evidence.evidence import LIVE_STATES
from holdfast._diagnose.evidence.memory import last_use, moved, tell_memory
from holdfast._diagnose.texts.exceptions import fault_of_error, fault_of_how
from holdfast._diagnose.texts.sign import tells_progress
from holdfast._diagnose.texts.signs import Sign, is_of_another, was_caught
from holdfast._diagnose.verdict import Cause, Sure

_BY_REASON = (("time limit", Cause.TIME_LIMIT), ("preempted|requeued by slurm", Cause.PREEMPTED))
_STOPS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_ANSWER_SECONDS = 120.0
_AT_EXIT = ("peer_lost",)  # a printed line without an exception, of ranks that leave one by one
_FEW_LINES = 10  # that a shell script prints after its command has failed
_ENDS = (
    *("killed_line", "segfault_line", "abort_line", "bus_error", "illegal_instruction_line"),
    *("floating_point_line", "torchrun_summary", "launcher_exit", "srun_exit", "slurm_oom"),
)
_OF_A_RANK = re.compile(r"rank \d+ ")
_LAUNCHER_GONE = re.compile(r"\(pid \d+\) is gone")
# By a status of holdfast: (cause, sentence, advice).
_DECIDED = {
    _errors.BAD: (
        Cause.BAD_TRAINING,
        "It stopped because a rule called the training bad.",
        "Started again it would do the same: look at the metrics, the learning rate, the data of "
        "the last steps, and go back to an earlier checkpoint (holdfast ls RUN).",
    ),
    _errors.NOT_DURABLE: (
        Cause.NOT_DURABLE,
        "It ended, and the disk did not take its last state.",
        advice.MAKE_ROOM,
    ),
    _errors.IDLE: (
        Cause.NO_PROGRESS,
        "It came back again and again without making a step.",
        "See why no step is made in its time: loading and compiling may take longer than the "
        "job's limit. Ask for more time, then submit it again.",
    ),
}


def judge_decided(case: Case) -> Finding | None:
    """It left with a status of holdfast that says why."""
    status = _exit_status(case)
    if status not in _DECIDED:
        return None
    cause, sentence, remedy = _DECIDED[status]
    how = _text.text(case.evidence.exit.get("how"))
    evidence = [f"it left with status {status}" + (f": {_text.one_line(how)}" if how else "")]
    failed = [each for each in case.evidence.journal if each.get("event") == "save-failed"]
    evidence += [f"a save failed: {_text.one_line(str(each.get('error')))}" for each in failed]
    return Finding(cause, sentence, Sure.CERTAIN if how else Sure.LIKELY, evidence, [remedy])


def judge_asked(case: Case) -> Finding | None:
    """A person or the scheduler asked it to end."""
    reason, status = _asked(case)
    if not reason:
        return _fenced_off(case)
    senders = [tell_sender(each) for each in led_signals(case)][-3:]
    if _LAUNCHER_GONE.search(reason):
        sentence = f"The launcher died, and the ranks saved and left: {reason}."
        lines = ["See how the launcher ended; holdfast run -- torchrun … records it."]
        evidence = [f"reason of the stop: {reason}", *senders]
        return Finding(Cause.KILLED, sentence, Sure.LIKELY, evidence, [*lines, *advice.go_on(case)])
    found = (cause for shape, cause in _BY_REASON if re.search(shape, reason, re.IGNORECASE))
    cause = next(found, Cause.ASKED)
    if status == _errors.REQUEUE and reason in ("SIGUSR1", "SIGUSR2"):
        cause = Cause.TIME_LIMIT if case.is_in_slurm else Cause.PREEMPTED
    left = [] if status is None else [f"it left with status {status}"]
    evidence = [f"it was asked to stop: {_text.one_line(reason)}", *left, *senders]
    stops = [each for each in case.evidence.journal if each.get("event") == "request"]
    by = [each["by"] for each in stops if each.get("kind") == "stop" and each.get("by")]
    evidence += [f"the stop was asked for by {_text.one_line(str(each))}" for each in by[-1:]]
    said = _text.text(case.evidence.run.requeue.get("said"))
    evidence += [f"SLURM: {_text.one_line(said)}"] if said else []
    sender = f"; {senders[-1]}" if senders else ""
    sentence = {
        Cause.TIME_LIMIT: f"The job's time was over ({_text.one_line(reason)})",
        Cause.PREEMPTED: f"It was interrupted to go on later ({_text.one_line(reason)})",
    }.get(cause, f"It was asked to stop ({_text.one_line(reason)}){sender}")
    lines, then = [], ""
    if case.end.asked and case.end.status == -9:
        then = "; it was killed before it had left by itself"
        if moved(case.end.counters).kills:  # more time would not have helped it
            then = "; while it left, the kernel's OOM killer ended it"
            evidence += ["its cgroup counted an OOM kill then", *tell_memory(case.end.memory, None)]
        else:
            evidence.append("its last signal was SIGKILL: the time that it was given was too short")
            lines.append(
                "Give it more time between the warning and the kill: docker stop --time=60, in "
                "Kubernetes terminationGracePeriodSeconds, sbatch --signal=USR1@120"
            )
    elif case.end.asked and case.end.signal in CRASHES:
        then = f"; while it left, it died of {case.end.signal}"
    sentence = f"{sentence}{then}."
    if not lines and cause is Cause.TIME_LIMIT and not case.evidence.run.requeue:
        lines.append("To have such a job go on by itself: sbatch --requeue, see holdfast lint")
    if cause is not Cause.ASKED and "by itself" in said:
        return Finding(cause, sentence, Sure.CERTAIN, evidence, [*lines, said])
    sure = Sure.CERTAIN if case.evidence.exit or case.end.asked else Sure.LIKELY
    return Finding(cause, sentence, sure, evidence, [*lines, *advice.go_on(case)])


def _fenced_off(case: Case) -> Finding | None:
    """Another process took the run over: this one wrote nothing more, and left."""
    fault = case.end.fault
    if fault is None or fault.type != "RunIsLive" or "took over" not in fault.message:
        return None
    sentence = f"Another process took the run over ({_text.one_line(fault.message).rstrip('.')})."
    evidence = ["a newer attempt has the folder, and this one wrote nothing after that"]
    lines = ["The run goes on there: holdfast why RUN"]
    return Finding(Cause.ASKED, sentence, Sure.CERTAIN, evidence, lines)


def _asked(case: Case) -> tuple[str, int | None]:
    """The recorded reason of the stop; empty if there was no request."""
    record = case.evidence.exit
    how, status = _text.text(record.get("how")), _text.whole(record.get("status"))
    if case.end.asked and not _OF_A_RANK.match(case.end.asked):
        return case.end.asked, status if status is not None else case.end.status
    if how and not _OF_A_RANK.match(how):
        raised = fault_of_how(record)
        is_error = raised is not None and raised.type != "KeyboardInterrupt"
        if (status in _errors.ASKED and not is_error) or record.get("asked") is True:
            return how, status
    fault = case.end.fault
    if record and fault is not None and fault.kind == "interrupt":
        return "Ctrl-C, KeyboardInterrupt", status
    if not record and _left_after_signal(case):
        return _text.text(led_signals(case)[-1].get("name")), case.end.status
    sign = case.end.has("holdfast_stop", "holdfast_finished")
    if sign is not None and sign.kind == "holdfast_stop" and not record and fault is None:
        stopped = _text.whole(sign.details.get("status"))
        reason = _text.text(sign.details.get("reason"))
        if stopped in _errors.ASKED and reason and not _OF_A_RANK.match(reason):
            return reason, stopped
    return "", None


def _left_after_signal(case: Case) -> bool:
    """Whether a script with a handler of its own answered a signal, and left with a status."""
    end, sent = case.end, led_signals(case)
    if not sent or end.status is None or not 0 < end.status < 128:
        return False
    if _text.text(sent[-1].get("name")) not in _STOPS:
        return False
    # A signal to the whole group kills the workers, and the script fails because of that.
    if end.fault is not None and end.fault.kind not in ("worker", "exit"):
        return False
    moment = _text.real(sent[-1].get("time"))
    return moment is not None and end.time is not None and 0 <= end.time - moment < _ANSWER_SECONDS


# -- Status 0: finished, or only reported as finished ----------------------------------------------


def judge_finished(case: Case) -> Finding | None:
    record, end = case.evidence.exit, case.end
    if (found := _lying(case) or _said_finished(case)) is not None:
        return found
    if _exit_status(case) != 0:
        return None
    others = [each for each in case.ends if each is not end]
    has_failed = any(each.fault is not None or each.status for each in others)
    if not record and (has_failed or end.has("nan_loss") is not None):
        return None  # another rank failed, or what it has trained is of no use
    if record and end.status not in (None, 0):
        return None  # it failed after the run was left
    # A thread of the script may go on after its run was closed.
    evidence = ["the run was closed with status 0" if record else "it left with status 0"]
    if (step := case.finished_step) is not None:
        evidence.insert(0, f"the journal has its end, at step {step}")
        return Finding(Cause.FINISHED, f"It finished, at step {step}.", Sure.CERTAIN, evidence)
    left = _text.whole(record.get("step"))
    totals = (_text.whole(event.get("total")) for event in reversed(case.evidence.journal))
    total = next((each for each in totals if each is not None), None)
    if (found := _left_by_exit(case, left, total)) is not None:
        return found
    if left is not None and total is not None and left < total:
        sentence = f"It left its loop by itself at step {left} of {total}, with status 0."
        evidence.append(f"the loop was to make {total} steps")
        return Finding(Cause.FINISHED, sentence, Sure.LIKELY, evidence, advice.go_on(case))
    at = f" at step {left}" if left is not None and record else ""
    sentence = f"It ended by itself{at}, with status 0."
    if record:
        return Finding(Cause.FINISHED, sentence, Sure.CERTAIN, evidence)
    evidence.append("status 0 is no proof: sys.exit(256) looks the same")
    if end.fault is not None and not end.fault.is_exit:
        evidence.append(f"it had printed an error, and went on: {end.fault.sentence()}")
    return Finding(Cause.FINISHED, sentence, Sure.LIKELY, evidence)


def _left_by_exit(case: Case, left: int | None, total: int | None) -> Finding | None:
    """`sys.exit()` in the loop, before its last step: status 0 then looks like success."""
    record = case.evidence.exit
    if not re.match(r"SystemExit\b", _text.text(record.get("how"))) or left is None:
        return None
    if left >= total if total is not None else "left_at" not in record:
        return None
    fault = fault_of_error({"type": "SystemExit", "frames": record.get("left_at")})
    at = f" at {fault.place}" if fault is not None and fault.place else ""
    of = "" if total is None else f" of {total}"
    sentence = f"It left its loop at step {left}{of} by sys.exit(){at}, with status 0."
    evidence = ["it left with status 0, which looks like success"]
    evidence += [] if total is None else [f"the loop was to make {total} steps"]
    remedy = (
        "If the training was complete there, call run.finish() before sys.exit(); else leave with "
        "a status that is not 0."
    )
    lines = [remedy, *advice.go_on(case)]
    return Finding(Cause.LYING_STATUS, sentence, Sure.LIKELY, evidence, lines)


def _said_finished(case: Case) -> Finding | None:
    """By its own last words, where there is only a log."""
    end, signs = case.end, case.end.signs
    sign = end.has("holdfast_finished")
    if sign is None and all(each.kind in _AT_EXIT for each in signs):
        # Which rank finished is not told. The others then miss its store, and that is no failure.
        sign, signs = case.sign("holdfast_finished"), case.evidence.signs
    if sign is None or case.evidence.exit or end.status is not None or end.has("nan_loss"):
        return None
    if any(0 < sign.line - each.line <= _FEW_LINES and _failed(each) for each in signs):
        return None  # a shell script goes on after its command has failed, and prints what it likes
    if "reported" in sign.details and end.fault is not None:
        return None  # the status of a shell script, which went on
    after = [each for each in signs if each.line > sign.line and each.kind != "ranks"]
    if not all(each.kind in _AT_EXIT or _went_on_after(each) for each in after):
        return None
    step = _text.whole(sign.details.get("step"))
    said = f"It finished, at step {step}." if step is not None else "It finished."
    if planned := _text.text(sign.details.get("planned")):
        said = f"It left by itself, as it was set to: {_text.one_line(planned, 160)}."
    evidence = [f"it printed: {_text.one_line(sign.text)}"]
    if before := _text.text(sign.details.get("before")):
        evidence.insert(0, f"it printed: {_text.one_line(before)}")
    evidence += [
        f"it then printed an error, which did not end it: {_text.one_line(each.text)}"
        for each in after[-1:]
    ] or ["no error was printed after that"]
    return Finding(Cause.FINISHED, said, Sure.LIKELY, evidence)


def _failed(sign: Sign) -> bool:
    """Whether it tells of the end of the training itself: an exception, a signal, a status."""
    if sign.kind == "python_exception":
        return not is_of_another(sign)
    return sign.kind in _ENDS and sign.details.get("exitcode") != 0


def _went_on_after(sign: Sign) -> bool:
    """Whether the script printed an exception itself, and more after it.

    A thread or a child that is still there while the script leaves has lost what it works with.
    """
    if is_of_another(sign):
        return True
    is_last = not _text.whole(sign.details.get("from_end"))
    return sign.kind == "python_exception" and was_caught(sign) and not is_last


def _lying(case: Case) -> Finding | None:
    """Status 0 of a training that failed."""
    end, record, fault = case.end, case.evidence.exit, case.end.fault
    code = _number(fault.exit_code) if fault is not None and fault.is_exit else None
    if code is None:
        code = _text.whole(record.get("status"))
    if code is not None and code != 0 and code % 256 == 0:
        cut = "which the system cuts to 0: that looks like success, and was none"
        told = [f"the script's own status was {code}; of a status only 8 bits are kept"]
        lines, sure = ["Leave with a status from 1 to 255 where something failed."], Sure.CERTAIN
        said = f"It left with sys.exit({code}), {cut}."
        return Finding(Cause.LYING_STATUS, said, sure, told, lines)
    if end.status != 0 or fault is None or record or fault.is_exit:
        return None
    last = _text.one_line("\n".join(reversed(case.evidence.output.strip().splitlines()[-1:])))
    if fault.type not in last and not _was_hidden(case):
        return None
    said = fault.sentence(120)
    sentence = f"It left with status 0, although its last words are an error: {said}."
    remedy = (
        "See what starts it: a shell script without `set -e`, a pipe (`… | tee log` "
        "has the status of tee; use `set -o pipefail`), or an except that hides it."
    )
    told = ["the status was 0", f"the last line is: {last}"]
    return Finding(Cause.LYING_STATUS, sentence, Sure.LIKELY, told, [remedy])


def _was_hidden(case: Case) -> bool:
    """Whether a shell script went on after its command had failed, and left with 0 itself."""
    command = _text.record(case.evidence.led).get("command")
    first = str(command[0]) if isinstance(command, list) and command else ""
    raised = case.end.has("python_exception")
    if raised is None or not re.search(r"(?:^|/)(?:ba|da|z|k)?sh$|\.sh$", first):
        return False
    is_of_main = not was_caught(raised) and not raised.details.get("thread")
    return is_of_main and raised.details["from_end"] <= _FEW_LINES


def _number(code: str | None) -> int | None:
    try:
        return None if code is None or len(code) > 18 else int(code)
    except ValueError:
        return None


def _exit_status(case: Case) -> int | None:
    record = case.evidence.exit
    return _text.whole(record.get("status")) if record else case.end.status


# -- SLURM: the state of the job, and the lines that it wrote into the log -------------------------

_STATES = (
    ("TIMEOUT", Cause.TIME_LIMIT, "SLURM ended the job at its time limit"),
    ("DEADLINE", Cause.TIME_LIMIT, "SLURM ended the job at its deadline"),
    ("PREEMPTED", Cause.PREEMPTED, "SLURM preempted the job"),
    ("OUT_OF_MEMORY", Cause.OOM_CGROUP, "The job used more memory than SLURM gave it"),
    ("NODE_FAIL", Cause.MACHINE_LOST, "SLURM lost a node of the job"),
    ("BOOT_FAIL", Cause.MACHINE_LOST, "A node of the job could not be started"),
    ("LAUNCH_FAILED", Cause.ENVIRONMENT, "SLURM could not start the job"),
    ("CANCELLED", Cause.ASKED, "The job was cancelled"),
    ("COMPLETED", Cause.FINISHED, "The job ended by itself, with status 0"),
)
_SIGNS = (
    ("slurm_time_limit", Cause.TIME_LIMIT, "SLURM ended the job at its time limit"),
    ("slurm_node_fail", Cause.MACHINE_LOST, "SLURM lost a node of the job"),
    ("slurm_preempted", Cause.PREEMPTED, "SLURM preempted the job"),
    ("slurm_requeued", Cause.PREEMPTED, "SLURM put the job back into its queue"),
    ("slurm_oom", Cause.OOM_CGROUP, "A process of the job was killed by SLURM's memory limit"),
    ("slurm_cancelled", Cause.ASKED, "The job was cancelled"),
    ("slurm_refused", Cause.ENVIRONMENT, "SLURM could not start it"),
    ("slurm_step_cancelled", Cause.ASKED, "The step of the job was cancelled"),
    ("node_event", Cause.MACHINE_LOST, "SLURM lost a node of the job"),  # the pod's own tells more
)
_ADVICE = {
    Cause.TIME_LIMIT: "time_limit",
    Cause.PREEMPTED: "preempted",
    Cause.ENVIRONMENT: "refused",
    Cause.CONFIGURATION: "request",
}
# What is asked for, and not a controller or a node that does not answer.
_REQUEST = re.compile(
    r"(?i)^(?!.*(?:launch|credential|job id)).*(?:requ|invalid|specif|permit|limit|fatal: |unrecog"
    r"|batch script)"
)
_STALLED = re.compile(  # Horovod's
    r"stall_inspector.*\n(?:.*\n)?.*Missing ranks:.*\n.*?(?P<rank>\d+): \[(?P<tensor>[^\s,\]]+)"
)
_FACTS = {
    **{"state": "state", "exit_code": "exit code", "derived": "derived exit code"},
    **{"reason": "reason", "node": "on", "end": "end"},
}


def judge_slurm(case: Case) -> Finding | None:
    return _by_state(case) or _by_signs(case)


def _by_state(case: Case) -> Finding | None:
    job = _text.record(case.evidence.job)
    state = _text.text(job.get("state")).upper()
    evidence = [
        f"SLURM says: {name} {_text.one_line(str(job[key]), 120)}"
        for key, name in _FACTS.items()
        if job.get(key) not in (None, "", "None")
    ]
    if any(word in state for word in LIVE_STATES) and "CANCELLED" not in state:
        sentence = f"The job is not over: SLURM calls it {state}."
        return Finding(Cause.RUNNING, sentence, Sure.CERTAIN, evidence)
    ends = case.sign("slurm_time_limit", "slurm_preempted")
    for word, cause, sentence in _STATES:
        if word not in state or (cause is Cause.FINISHED and case.end.status not in (None, 0)):
            continue
        if cause in (Cause.FINISHED, Cause.ASKED) and (ends or case.end.fault is not None):
            continue  # the script hid its status, or scancel came after the failure
        sure = Sure.LIKELY if cause is Cause.FINISHED else Sure.CERTAIN
        return _of_slurm(case, cause, sentence, sure, evidence)
    return None


def _by_signs(case: Case) -> Finding | None:
    if case.end.status == 0 or case.evidence.exit.get("status") == 0:
        return None  # it was over before that
    for kind, cause, sentence in _SIGNS:
        sign = case.sign(kind)
        if sign is None or (kind == "slurm_step_cancelled" and not _is_first(sign, case)):
            continue  # a step is cancelled after any failure of a task, too
        own = [s for s in case.evidence.signs if s.kind == kind and "Taint" not in s.text]
        if kind == "slurm_preempted" and not own and case.sign("node_event") is not None:
            continue  # the pod was taken from a node that does not answer
        sign = max(own, key=lambda each: (len(each.details), each.line)) if own else sign
        if kind == "node_event" and case.sign("disk_full", "host_oom") is not None:
            continue  # for which it was evicted
        said = _text.one_line(sign.text)
        lost = next((s for s in case.evidence.signs if "Node failure on " in s.text), None)
        if cause is Cause.MACHINE_LOST and lost is not None:
            said, sentence = _text.one_line(lost.text), f"SLURM lost {lost.details['node']}"
        where = _text.text(sign.details.get("node"))
        if cause is Cause.MACHINE_LOST and where and lost is None:
            sentence = f"SLURM lost {where}"
        sentence = "The machine was started again" if said.startswith("-- ") else sentence
        if cause is Cause.OOM_CGROUP and case.end.fault is not None:
            return oom_of_worker(case, [said, f"it raised {case.end.fault.sentence(160)}"])
        fault = case.end.fault
        if cause is Cause.ASKED and fault is not None and fault.kind != "interrupt":
            continue  # it had failed, and scancel came after that
        if not re.search("(?i)slurm|srun|sbatch|salloc", said):
            sentence = re.sub("SLURM(?='|\\b)", "the scheduler", sentence)
            sentence = f"{sentence[:1].upper()}{sentence[1:]}"
        if kind == "slurm_refused" and _REQUEST.search(said):
            cause = Cause.CONFIGURATION
            who = "SLURM" if re.search("(?i)slurm|srun|sbatch|salloc", said) else "The scheduler"
            sentence = f"{who} refused the request: {said.rpartition(': ')[2].rstrip('.')}"
        is_of_slurm = re.search("(?i)slurm|srun|sbatch|PBS|TERM_", said) is not None
        told = list(dict.fromkeys([said, *(_text.one_line(each.text) for each in own[-2:])]))
        if said.startswith("-- "):
            told += of_kernel(case.evidence.output.rpartition(sign.text.strip())[0])
        if by := _text.text(sign.details.get("by")):
            sentence = f"{sentence} by {by}"
        if kind == "slurm_refused" and where:
            sentence = f"SLURM could not start it on {where}: {sign.details.get('why')}"
        tasks = {(s.rank, s.details.get("node")) for s in own if s.rank is not None}
        if "OOMKilled" in said:
            at = sign.details.get("limit", "")
            names = [(what, sign.details.get(what)) for what in ("container", "pod")]
            which = " of ".join(f"the {what} {name}" for what, name in names if name)
            which = which or "a container"
            by = "Docker" if '"OOMKilled":' in said and which == "a container" else "Kubernetes"
            sentence = f"{by} ended {which} at its memory limit{at and f' ({at})'}"
            is_of_slurm |= sign.details.get("exitcode") == 137
        elif kind == "slurm_oom" and len(tasks) == 1:
            ((rank, node),) = tasks
            sentence = sentence.replace("A process of the job", f"Rank {rank} on {node}")
        elif kind == "slurm_oom" and (killed := case.sign("killed_line")) is not None:
            told.append(f"it printed: {_text.one_line(killed.text, 240)}")
            if pid := _text.whole(killed.details.get("pid")):
                command = _text.one_line(_text.text(killed.details.get("command")), 80)
                of = f" ({command})" if command else ""
                sentence = sentence.replace("A process of the job", f"The process {pid}{of}")
        elif cause is Cause.PREEMPTED and re.search(r"(?i)node (?:is |was )?shut", said):
            spot = re.search(r"(?im)^.*\b(?:spot|preemptible)\b.*$", case.evidence.output)
            node = "The node (a spot node)" if spot else "The node"
            sentence = f"{node} was shut down, and its pods with it"
        elif cause is Cause.PREEMPTED and re.search("(?i)instance|metadata|eventtype|spot", said):
            sentence = "The cloud took the machine back"
        if cause is Cause.TIME_LIMIT and (stalled := _stalled_rank(case.evidence.output)):
            sentence = f"{sentence}. Before that it had stalled: {stalled}"
        is_certain = is_of_slurm and kind not in ("slurm_step_cancelled", "slurm_cancelled")
        sure = Sure.CERTAIN if is_certain else Sure.LIKELY
        return _of_slurm(case, cause, sentence, sure, told)
    return None


def _stalled_rank(output: str) -> str:
    """The rank for which Horovod waited to the end, if it did; empty if not."""
    match = next(iter([*_STALLED.finditer(output)][-1:]), None)
    if match is None or any(tells_progress(line) for line in output[match.end() :].splitlines()):
        return ""
    return f"rank {match['rank']} did not come to {match['tensor']}, and the others waited for it"


def _is_first(sign: Sign, case: Case) -> bool:
    """Whether slurmstepd tells that a step is cancelled, and no task had failed before."""
    others = [each for each in case.evidence.signs if each.kind != sign.kind]
    first = min(each.line for each in case.evidence.signs if each.kind == sign.kind)
    is_of_slurmstepd = "CANCELLED AT" in sign.text
    by_it = [each for each in others if each.line > first and _is_told_to_leave(each)]
    return case.end.fault is None and len(by_it) == len(others) * is_of_slurmstepd


def _is_told_to_leave(sign: Sign) -> bool:
    """Whether a process or its launcher prints it of a SIGTERM, or of the SIGKILL after it."""
    status = sign.details.get("exitcode")
    return sign.kind in ("terminated_line", "killed_line") or status in (143, 137, -15, -9)


def _of_slurm(case: Case, cause: Cause, sentence: str, sure: Sure, evidence: list[str]) -> Finding:
    lines = advice.advise(case, _ADVICE[cause]) if cause in _ADVICE else []
    if cause is Cause.OOM_CGROUP:
        is_of_slurm = case.is_in_slurm or re.search("(?i)slurm|srun|sbatch", "".join(evidence))
        evidence += tell_memory(case.end.memory, case.end.time)
        less = advice.less_memory(case, last_use(case.end.memory))
        more = "more_of_slurm" if is_of_slurm else "more_of_others"
        lines = [*advice.lines_of(case, more), *less, *advice.go_on(case)]
    elif cause is Cause.MACHINE_LOST:
        lines = advice.lost(case)
    is_of_job = cause is not Cause.OOM_CGROUP
    return Finding(cause, f"{sentence}.", sure, evidence, lines, is_of_job=is_of_job)
