"""Deaths by a signal other than SIGKILL: crashes outside Python, and signals of other processes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast import _text
from holdfast._diagnose import advice
from holdfast._diagnose.deaths.asked import led_signals, tell_sender
from holdfast._diagnose.evidence.case import Case, Finding
from holdfast._diagnose.evidence.memory import last_use, moved
from holdfast._diagnose.texts.python import is_own_file
from holdfast._diagnose.verdict import Cause, Sure

if TYPE_CHECKING:
    from holdfast._diagnose.texts.sign import Sign

_CRASHES = {
    "SIGSEGV": (Cause.SEGFAULT, "crashed with a segmentation fault (SIGSEGV)"),
    "SIGABRT": (Cause.ABORT, "aborted itself (SIGABRT)"),
    "SIGBUS": (Cause.BUS_ERROR, "crashed with a bus error (SIGBUS)"),
    "SIGILL": (Cause.ILLEGAL_INSTRUCTION, "crashed on an illegal instruction (SIGILL)"),
    "SIGFPE": (Cause.ABORT, "crashed in integer arithmetic (SIGFPE)"),
    "SIGSYS": (Cause.ABORT, "made a system call that is not allowed (SIGSYS)"),
    "SIGTRAP": (Cause.ABORT, "stopped at a trap (SIGTRAP)"),
}
_OF_CRASHES = {
    Cause.BUS_ERROR: "A bus error is mostly memory behind a file that is gone: a full /dev/shm or "
    "disk, a mapped file that was cut short. See df -h /dev/shm, and docker run --shm-size=8g",
    Cause.ILLEGAL_INSTRUCTION: "The program was built for another processor: compare lscpu with "
    "where it runs.",
}
_MEANINGS = {
    "SIGHUP": "the terminal or the connection was closed; tmux outlives that",
    "SIGINT": "that is Ctrl-C, or what a launcher passes on of it",
    "SIGQUIT": "that is Ctrl-\\",
    "SIGTERM": "that is what kill, docker stop, a scheduler or a shutdown send",
    "SIGPIPE": "it wrote into a pipe whose reader is gone",
    "SIGXCPU": "it used more processor time than it may: ulimit -t",
    "SIGXFSZ": "it wrote a larger file than it may: ulimit -f",
    "SIGUSR1": "a scheduler's warning, and nothing in the script answered it",
    "SIGUSR2": "a scheduler's warning, and nothing in the script answered it",
    "SIGALRM": "a timer of its own ran out",
}
_SHELL_STATUSES = {129: "SIGHUP", 130: "SIGINT", 131: "SIGQUIT", 143: "SIGTERM"}
_TERMINATE = "terminate called"
# What a library says before it aborts its process.
_FATAL = re.compile(
    r"(?m)^.*(?:\bF\d{4} |(?:: |^)F \S+\] |^Status: |Check failed: |FATAL|\[Fatal|[Aa]ssert).*$"
)
_DEEP = 8  # frames of one line: the function calls itself
# What libraries abort for.
_OF_THE_DEVICE = ("cuda_error", "cuda_assert", "cuda_oom", "memory_refused", "environment")
_FULL_BYTES = 16 << 20  # a /dev/shm with less free room is full


def judge_crash(case: Case) -> Finding | None:
    """A crash outside Python: segfault, abort, bus error, illegal instruction, C++."""
    end = case.end
    told = end.has("faulthandler")
    is_of_a_worker = end.status == 1 and end.has("worker_conn_reset") is not None
    name = end.signal or ""
    if not name and told is not None and end.fault is None and not is_of_a_worker:
        name = _text.signal_name(-(_text.whole(told.details.get("signal")) or 0)) or ""
    if not name and _ends_with_abort(case):
        name = "SIGABRT"
    if name not in _CRASHES or end.had_failed:
        return None  # many libraries crash while they unload: the exception before is the cause
    cause, how = _CRASHES[name]
    if cause is Cause.ABORT and end.has(*_OF_THE_DEVICE) is not None:
        return None
    if (lacks := end.has("environment")) and "threads" in lacks.details:  # OpenBLAS and others
        return None
    stack = case.stacks_lines() or _stack(told)
    damage = _printed(case, "heap_damage")
    evidence = [f"{case.who} died of {name}"] if end.signal else []
    if cause is Cause.BUS_ERROR and (full := _full_shm(case)):
        sentence = f"{case.opening} died of a bus error because /dev/shm was full."
        lines = advice.advise(case, "shm_full")
        return Finding(Cause.SHM_FULL, sentence, Sure.LIKELY, [*evidence, full], lines)
    if cause is Cause.ABORT and (what := _printed(case, "cxx_exception")):
        cause = Cause.CXX_EXCEPTION
        said = _text.text(what.details.get("what")) or what.text
        how = f"was ended by an uncaught C++ exception: {_text.one_line(said, 160)}"
        evidence.append(f"it printed: {_text.one_line(what.text)}")
    elif cause is Cause.ABORT and _TERMINATE in case.evidence.output:
        cause = Cause.CXX_EXCEPTION
        how = "was ended by the C++ runtime (terminate called), mostly by an exception"
        lines = [line for line in case.evidence.output.splitlines() if _TERMINATE in line]
        evidence.append(f"it printed: {_text.one_line(lines[-1])}")
    elif cause is Cause.ABORT and damage is not None:
        how += f": its memory was damaged ({_text.one_line(damage.text, 120)})"
    elif cause is Cause.ABORT and (last := _FATAL.findall(case.evidence.output[-4000:])):
        how += f", and said: {_text.one_line(last[-1], 160)}"
    if stack:
        evidence.append("the stack of its thread, the innermost first: " + "; ".join(stack))
        if len(stack) >= _DEEP and len(set(stack)) <= 2 and cause is Cause.SEGFAULT:
            how += ", in a function that calls itself without end"
            evidence.append("the same line is on the stack again and again: endless recursion")
        if cause is not Cause.CXX_EXCEPTION:
            how += f", in {next(filter(is_own_file, stack), stack[0]).removeprefix('File ')}"
    else:
        evidence.append("there is no stack of it")
    if sender := _sender(case, name):
        sentence = f"Another process ended {case.who} with {name}: {sender}."
        evidence.append(sender)
        sure = Sure.LIKELY if case.evidence.kind == "log" else Sure.CERTAIN
        return Finding(Cause.TERMINATED, sentence, sure, evidence, advice.go_on(case))
    if not stack and cause is not Cause.CXX_EXCEPTION and damage is None:
        evidence.append(f"a {name} sent by another process (kill -{name[3:]}) looks the same")
    lines = [_OF_CRASHES[cause]] if cause in _OF_CRASHES else []
    if not stack:
        lines.append("For the Python stack of the next one: PYTHONFAULTHANDLER=1")
    lines += advice.advise(case, "crashed")
    who = case.opening
    if end.signal is None and end.status:  # its status is that of a process that lived on
        who = f"A process that {case.who} had started"
        evidence.append(f"{case.who} then left with status {end.status}")
    return Finding(cause, f"{who} {how}.", Sure.LIKELY, evidence, lines)


def _printed(case: Case, kind: str) -> Sign | None:
    """What a process prints when it crashes; one of several ranks prints it without its number."""
    unlabelled = [sign for sign in case.evidence.signs if sign.rank is None and sign.kind == kind]
    return case.end.has(kind) or next(iter(unlabelled[-1:]), None)


def _ends_with_abort(case: Case) -> bool:
    """Whether a log without a status ends with what a program prints before it aborts itself."""
    end = case.end
    if case.evidence.kind != "log" or end.status is not None or end.fault is not None:
        return False
    return bool(end.signs) and end.signs[-1].kind in ("cxx_exception", "heap_damage")


def _sender(case: Case, name: str) -> str:
    sent = [each for each in led_signals(case) if each.get("name") == name]
    said = [sign for sign in case.end.signs if sign.kind == "sent_line"]  # of systemd
    if any(_text.signal_name(-sign.details.get("signal", 0)) == name for sign in said):
        return "; ".join(_text.one_line(sign.text, 120) for sign in said[-2:])
    return tell_sender(sent[-1]) if sent else ""


def _stack(told: Sign | None) -> list[str]:
    found = told.details.get("stack") if told is not None else None
    return [
        f"{frame[0]}:{frame[1]} in {frame[2]}"
        for frame in (found if isinstance(found, list) else [])
        if isinstance(frame, list | tuple) and len(frame) > 2
    ][:8]


def _full_shm(case: Case) -> str:
    """The evidence that /dev/shm had no room; empty if there is none."""
    use, sign = last_use(case.end.memory), case.end.has("shm_full")
    if sign is not None:
        return f"it printed: {_text.one_line(sign.text)}"
    if use.shm_free is not None and use.shm_free < _FULL_BYTES:
        used = "" if use.shm is None else f", {_text.size(use.shm)} were used"
        return f"/dev/shm had {_text.size(use.shm_free)} free in the last sample{used}"
    return ""


def judge_timed_out(case: Case) -> Finding | None:
    """`timeout`, which leaves with 124, or with 137 if it had to kill."""
    command = _text.record(case.evidence.led).get("command")
    words = list(map(str, command)) if isinstance(command, list) else []
    is_named = bool(words) and words[0].rpartition("/")[2] in ("timeout", "gtimeout")
    told = case.end.has("timed_out_line")
    is_so = case.end.status == 124 or (is_named and case.end.status == -9) or told is not None
    if not is_so or case.end.fault is not None or moved(case.end.counters).kills:
        return None
    evidence = [f"{case.who} left with status 124, as `timeout` does when the time is over"]
    if told is not None:
        evidence = [f"it printed: {_text.one_line(told.text)}"]
    elif case.end.status == -9:
        evidence = [f"{case.who} died of SIGKILL, as `timeout -k` ends what does not leave"]
    if is_named:
        evidence.append(f"the command is: {_text.one_line(' '.join(words), 160)}")
    sure = Sure.CERTAIN if is_named and case.end.status == 124 else Sure.LIKELY
    lines = ["Give it more time there, or leave `timeout` out.", *advice.go_on(case)]
    return Finding(
        Cause.TIME_LIMIT, "Its time was over: `timeout` ended it.", sure, evidence, lines
    )


def judge_terminated(case: Case) -> Finding | None:
    """A signal that no handler answered, or one whose status a shell has passed on."""
    name, sure, fault = case.end.signal, Sure.CERTAIN, case.end.fault
    evidence = [f"{case.who} died of {name}, which nothing in it answered"]
    if case.evidence.kind == "log":
        sure = Sure.LIKELY  # a line of a log may be about anything
    if name is None and fault is None and case.end.status in _SHELL_STATUSES:
        name, sure = _SHELL_STATUSES[case.end.status], Sure.LIKELY
    if name is None and fault is not None and fault.kind == "interrupt":
        name, sure = "SIGINT", Sure.LIKELY
    if name is None or name in _CRASHES or name == "SIGKILL":
        return None
    if fault is not None:
        evidence = [f"{case.who} raised {fault.sentence()}, which is SIGINT"]
        evidence += [f"its handler then raised {fault.then}"] if fault.then else []
    elif sure is Sure.LIKELY and case.end.signal is None:
        evidence = [f"{case.who} left with status {case.end.status}, which stands for {name}"]
    elif told := case.end.has("terminated_line"):
        evidence = [f"it printed: {_text.one_line(told.text)}"]
    if sender := _sender(case, name):
        evidence.append(sender)
    else:
        hint = "; holdfast run -- … records the sender" if case.evidence.led is None else ""
        evidence.append(f"the sender is not recorded{hint}")
    if name in _MEANINGS:
        evidence.append(_MEANINGS[name])
    lines = advice.go_on(case)
    if case.evidence.kind != "run" and name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"):
        lines.append("With holdfast.Run the script would have saved its state and left.")
    if name == "SIGXCPU":
        sentence = f"The kernel ended {case.who} at its limit of processor time (ulimit -t)."
        return Finding(Cause.TIME_LIMIT, sentence, sure, evidence, lines)
    sentence = f"A signal ended {case.who}: {sender or name}."
    if name == "SIGINT":
        by = sender or "Ctrl-C or kill -INT"
        return Finding(Cause.ASKED, f"{case.opening} was interrupted: {by}.", sure, evidence, lines)
    return Finding(Cause.TERMINATED, sentence, sure, evidence, lines)
