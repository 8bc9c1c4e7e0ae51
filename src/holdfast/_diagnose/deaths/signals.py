"""Deaths by a signal that is not SIGKILL: crashes outside Python, and somebody's signals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import _text
from holdfast._diagnose import advice
from holdfast._diagnose.deaths.asked import led_signals, tell_sender
from holdfast._diagnose.evidence.case import Case, Finding
from holdfast._diagnose.evidence.memory import last_use, moved
from holdfast._diagnose.verdict import Cause, Sure

if TYPE_CHECKING:
    from holdfast._diagnose.texts.sign import Sign

_CRASHES = {
    "SIGSEGV": (Cause.SEGFAULT, "crashed with a segmentation fault (SIGSEGV)"),
    "SIGABRT": (Cause.ABORT, "aborted itself (SIGABRT)"),
    "SIGBUS": (Cause.BUS_ERROR, "crashed with a bus error (SIGBUS)"),
    "SIGILL": (Cause.ILLEGAL_INSTRUCTION, "crashed on an illegal instruction (SIGILL)"),
    "SIGFPE": (Cause.ABORT, "crashed in integer arithmetic (SIGFPE)"),
    "SIGSYS": (Cause.ABORT, "made a system call that it may not (SIGSYS)"),
    "SIGTRAP": (Cause.ABORT, "stopped at a trap (SIGTRAP)"),
}
_MEANINGS = {
    "SIGHUP": "the terminal or the connection was closed; tmux, or nohup, outlives that",
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
_AS_SHELLS_SAY = {129: "SIGHUP", 130: "SIGINT", 131: "SIGQUIT", 143: "SIGTERM"}
_TERMINATE = "terminate called"
_DEEP = 8  # frames of one line: it calls itself
# What libraries abort for.
_OF_THE_DEVICE = ("cuda_error", "cuda_assert", "cuda_oom", "memory_refused", "environment")
_FULL_BYTES = 16 << 20  # so little is left of a full /dev/shm


def judge_crash(case: Case) -> Finding | None:
    """A crash outside Python: segfault, abort, bus error, illegal instruction, C++."""
    end = case.end
    told = end.has("faulthandler")
    is_of_a_worker = end.status == 1 and end.has("worker_conn_reset") is not None
    is_known = end.fault is not None or is_of_a_worker  # whose stack that is
    name = end.signal or ("" if is_known else _named(told))
    if name not in _CRASHES or end.had_failed:
        return None  # many a library crashes as it is unloaded: what it raised comes first
    cause, words_for_it = _CRASHES[name]
    if cause is Cause.ABORT and end.has(*_OF_THE_DEVICE) is not None:
        return None
    stack = case.stacks_lines() or _stack(told)
    evidence = [f"{case.who} died of {name}"]
    sure = Sure.LIKELY
    if cause is Cause.ABORT and (what := end.has("cxx_exception")):
        cause = Cause.CXX_EXCEPTION
        said = _text.text(what.details.get("what")) or what.text
        words_for_it = f"was ended by an uncaught C++ exception: {_text.one_line(said, 160)}"
        evidence.append(f"it printed: {_text.one_line(what.text)}")
    elif cause is Cause.ABORT and _TERMINATE in case.evidence.output:
        cause = Cause.CXX_EXCEPTION
        words_for_it = "was ended by the C++ runtime (terminate called), mostly by an exception"
        evidence.append(f"it printed: {_line_with(case.evidence.output, _TERMINATE)}")
    elif cause is Cause.ABORT and (damage := end.has("heap_damage")) is not None:
        words_for_it += f": its memory was damaged ({_text.one_line(damage.text, 120)})"
    full = _full_shm(case)
    if cause is Cause.BUS_ERROR and full:
        evidence += full
        return Finding(
            Cause.SHM_FULL,
            f"{case.opening} died of a bus error because /dev/shm was full.",
            Sure.LIKELY,
            evidence,
            advice.shm_full(case),
        )
    if stack:
        evidence.append("the stack of its thread, the innermost first: " + "; ".join(stack))
        inner = stack[0].removeprefix("File ")
        if len(stack) >= _DEEP and len(set(stack)) <= 2 and cause is Cause.SEGFAULT:
            words_for_it += ", in a function that calls itself without end"
            evidence.append("the same line is on the stack again and again: endless recursion")
        words_for_it += f", in {inner}" if cause is not Cause.CXX_EXCEPTION else ""
    else:
        evidence.append("there is no stack of it")
    sent = [s for s in led_signals(case.evidence.led) if s.get("name") == name]
    if sent:
        evidence.append(tell_sender(sent[-1]))
        sentence = f"Another process ended {case.who} with {name}: {tell_sender(sent[-1])}."
        return Finding(Cause.TERMINATED, sentence, Sure.CERTAIN, evidence, advice.go_on(case))
    if not stack and cause is not Cause.CXX_EXCEPTION:
        evidence.append(f"a {name} sent by another process (kill -{name[3:]}) looks the same")
    said_next = advice.crashed(case, has_stack=bool(stack))
    if cause is Cause.BUS_ERROR:
        said_next.insert(
            0,
            "A bus error is mostly memory behind a file that is gone: a full /dev/shm or disk, a "
            "mapped file that was cut short. See df -h /dev/shm, and docker run --shm-size=8g",
        )
    if cause is Cause.ILLEGAL_INSTRUCTION:
        said_next.insert(
            0, "The program was built for another processor: compare lscpu with where it runs."
        )
    return Finding(cause, f"{case.opening} {words_for_it}.", sure, evidence, said_next)


def _line_with(text: str, needle: str) -> str:
    return _text.one_line(next(line for line in reversed(text.splitlines()) if needle in line))


def _named(told: Sign | None) -> str:
    """The signal that faulthandler tells, where nobody has the status."""
    number = _text.whole(told.details.get("signal")) if told is not None else None
    return _text.signal_name(-number) or "" if number else ""


def _stack(told: Sign | None) -> list[str]:
    found = told.details.get("stack") if told is not None else None
    return [
        f"{frame[0]}:{frame[1]} in {frame[2]}"
        for frame in (found if isinstance(found, list) else [])
        if isinstance(frame, list | tuple) and len(frame) > 2
    ][:8]


def _full_shm(case: Case) -> list[str]:
    """What says that /dev/shm had no room."""
    use, sign = last_use(case.end.memory), case.end.has("shm_full")
    if sign is not None:
        return [f"it printed: {_text.one_line(sign.text)}"]
    if use.shm_free is not None and use.shm_free < _FULL_BYTES:
        used = "" if use.shm is None else f", {_text.size(use.shm)} were used"
        return [f"/dev/shm had {_text.size(use.shm_free)} free when it was last looked at{used}"]
    return []


def judge_timed_out(case: Case) -> Finding | None:
    """`timeout`, which leaves with 124, or with 137 if it had to kill."""
    command = _text.record(case.evidence.led).get("command")
    first = str(command[0]) if isinstance(command, list) and command else ""
    is_named = first.rpartition("/")[2] in ("timeout", "gtimeout")
    told = case.end.has("timed_out_line")
    is_so = case.end.status == 124 or (is_named and case.end.status == -9) or told is not None
    if not is_so or case.end.fault is not None or moved(case.end.counters).kills:
        return None
    evidence = [f"{case.who} left with status 124, as `timeout` does when the time is over"]
    if case.end.status == -9:
        evidence = [f"{case.who} died of SIGKILL, as `timeout -k` ends what does not leave"]
    if told is not None:
        evidence = [f"it printed: {_text.one_line(told.text)}"]
    if is_named and isinstance(command, list):
        evidence.append(f"the command is: {_text.one_line(' '.join(map(str, command)), 160)}")
    sure = Sure.CERTAIN if is_named and case.end.status == 124 else Sure.LIKELY
    return Finding(
        Cause.TIME_LIMIT,
        "Its time was over: `timeout` ended it.",
        sure,
        evidence,
        ["Give it more time there, or leave `timeout` out.", *advice.go_on(case)],
    )


def judge_terminated(case: Case) -> Finding | None:
    """A signal that no handler answered, or one whose status a shell has passed on."""
    name, sure = case.end.signal, Sure.CERTAIN
    if name is None and case.end.fault is None and case.end.status in _AS_SHELLS_SAY:
        name, sure = _AS_SHELLS_SAY[case.end.status], Sure.LIKELY
    if name is None and case.end.fault is not None and case.end.fault.kind == "interrupt":
        name, sure = "SIGINT", Sure.LIKELY
    if name is None or name in _CRASHES or name == "SIGKILL":
        return None
    if case.evidence.kind == "log":
        sure = Sure.LIKELY  # a line in a log may be about anything
    evidence = [f"{case.who} died of {name}, which nothing in it answered"]
    if case.end.fault is not None:
        evidence = [f"{case.who} raised {case.end.fault.sentence()}, which is SIGINT"]
    elif sure is Sure.LIKELY:
        evidence = [f"{case.who} left with status {case.end.status}, which stands for {name}"]
    sent = [s for s in led_signals(case.evidence.led) if s.get("name") == name]
    by = ""
    if sent:
        by = f": {tell_sender(sent[-1])}"
        evidence.append(tell_sender(sent[-1]))
    else:
        hint = "; holdfast run -- … records the sender" if case.evidence.led is None else ""
        evidence.append(f"who sent it is not recorded{hint}")
    if name in _MEANINGS:
        evidence.append(_MEANINGS[name])
    said = advice.go_on(case)
    if case.evidence.kind != "run" and name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"):
        said.append("With holdfast.Run the script would have saved its state and left.")
    sentence = f"A signal ended {case.who}: {name}{by}."
    if name == "SIGXCPU":
        sentence = f"The kernel ended {case.who} at its limit of processor time (ulimit -t)."
        return Finding(Cause.TIME_LIMIT, sentence, sure, evidence, said)
    return Finding(Cause.TERMINATED, sentence, sure, evidence, said)
