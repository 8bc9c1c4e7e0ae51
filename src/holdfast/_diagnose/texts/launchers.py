"""What launchers of ranks print at the end: who failed, and how.

torchrun's own "root cause" is the failure that it saw first. With a rank that was killed,
that is often another one, which had lost its connection; so who failed of itself is worked
out from all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from holdfast._diagnose.texts.lines import Line, Text
from holdfast._diagnose.texts.sign import Sign, make_sign

_FIELD = re.compile(r"\s*(time|host|rank|exitcode|error_file|traceback)\s*: ?(.*)")
_SPAWN = re.compile(
    r"ProcessExitedException: process (\d+) terminated with (?:signal (\w+)|exit code (-?\d+))"
)
_AGENT = re.compile(
    r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\) of binary: (\S+)"
)
_SIGNALS = {
    "SIGHUP": 1, "SIGINT": 2, "SIGQUIT": 3, "SIGILL": 4, "SIGTRAP": 5, "SIGABRT": 6, "SIGBUS": 7,
    "SIGFPE": 8, "SIGKILL": 9, "SIGUSR1": 10, "SIGSEGV": 11, "SIGUSR2": 12, "SIGPIPE": 13,
    "SIGALRM": 14, "SIGTERM": 15, "SIGXCPU": 24, "SIGXFSZ": 25, "SIGSYS": 31,
}  # fmt: skip
_CLOSING = re.compile(r"Sending process (\d{1,9}) closing signal (?:Signals\.)?(\w+)")
_FORCED = re.compile(r"Unable to shutdown process (\d{1,9}) via .*forcefully exiting via")
# What a rank says that has only lost another.
_OF_A_VICTIM = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|Broken pipe|ncclRemoteError"
    r"|remote process exited|unhandled system error|Timed out waiting \d+ ?ms"
    r"|collective operation timeout|failed to pass monitoredBarrier"
    r"|successfully reached monitoredBarrier|Connection refused"
)
# Other launchers, and Python's own subprocess, with the status of what they had started.
_EXITS = (
    (
        "exits with return code = ",
        re.compile(
            r"(?:--local_rank[= ](?P<rank>\d{1,6})\b.*)?"
            r"exits with return code = (?P<code>-?\d{1,3})\b"
        ),
    ),
    (
        " exited with code ",
        re.compile(
            r"(?:lobal rank (?P<rank>\d{1,6}) \(PID \d+\)|^[\w.-]+)"
            r" exited with code (?P<code>-?\d{1,3})"
        ),
    ),
    (
        "Child process with PID ",
        re.compile(
            r"\[rank: (?P<rank>\d{1,6})\] Child process with PID \d+ terminated with code "
            r"(?P<code>-?\d{1,3})"
        ),
    ),
    ("Exit Code:", re.compile(r"^\s*Exit Code: +(?P<code>[1-9]\d{0,2})$")),
    (
        "Main process exited, ",
        re.compile(
            r"Main process exited, code=(?:exited, status=(?P<code>\d{1,3})"
            r"|(?:killed|dumped), status=(?P<signal>\d{1,2}))/"
        ),
    ),
    (
        "MPI_ABORT was invoked on rank ",
        re.compile(r"MPI_ABORT was invoked on rank (?P<rank>\d{1,6})"),
    ),
    ("Process name: [[", re.compile(r"Process name: \[\[\d+,\d+\],(?P<rank>\d{1,6})\]")),
    ("died with <Signals.", re.compile(r"died with <Signals\.\w+: (?P<signal>\d{1,2})>")),
    (
        " exited on signal ",
        re.compile(r"process rank (?P<rank>\d{1,6}) .*exited on signal (?P<signal>\d{1,2})\b"),
    ),
    (
        "command terminated with exit code ",
        re.compile(r"command terminated with exit code (?P<code>\d{1,3})\b"),
    ),
)
_MOST_SUMMARIES = 4  # one of each life, in a log that several have written to
_TIMED_OUT = re.compile(r"Timed out waiting|operation timeout|monitoredBarrier|wait timeout after")


def read_launchers(text: Text, exceptions: list[Sign]) -> Iterator[Sign]:
    """The summaries of torchrun and of torch.multiprocessing.spawn, and the statuses of others."""
    summaries = [line for line in text.hits("(first observed failure):") if "Root" in line.text]
    for line in summaries[-_MOST_SUMMARIES:]:
        sign = _summary(text, line, exceptions)
        if sign is not None:
            yield sign
    for line in text.hits("failed (exitcode: "):
        match = _AGENT.search(line.text)
        if match is not None and not summaries:
            # Without the summary, as when the agent was killed while it wrote.
            rank, code = int(match[2]), int(match[1])
            details = {
                "exitcodes": {rank: code},
                "root": rank,
                "culprit": rank,
                "pid": int(match[3]),
            }
            yield make_sign("torchrun_summary", line, {**details, "launcher": "torchrun"}, rank)
    for line in text.hits("ProcessExitedException: process "):
        match = _SPAWN.search(line.text)
        if match is not None:
            rank = int(match[1])
            code = -_SIGNALS.get(match[2], 0) if match[2] else int(match[3])
            details = {"exitcodes": {rank: code}, "root": rank, "culprit": rank}
            yield make_sign("torchrun_summary", line, {**details, "launcher": "spawn"}, rank)

    for needle, shape in _EXITS:
        for line in text.hits(needle):
            match = shape.search(line.text)
            if match is not None:
                found = match.groupdict()
                of = int(found["rank"]) if found.get("rank") else None
                code = -int(found["signal"]) if found.get("signal") else int(found.get("code", 1))
                yield make_sign("launcher_exit", line, {"exitcode": code}, of)


def _summary(text: Text, root: Line, exceptions: list[Sign]) -> Sign | None:
    before = [root]
    for line in text.before(root, 4000):
        if line.rank == root.rank:
            before.append(line)
        if line.text.startswith("Failures:"):
            break
    failures = _failures(reversed(before))
    ending = list(_until_rule(text, root))
    said_root = _failures(iter(ending))
    known = {each["rank"] for each in said_root}
    failures = said_root + [each for each in failures if each["rank"] not in known]
    if not failures:
        return None
    for each in failures:
        if not each["error"]:
            own = [s for s in exceptions if s.rank == each["rank"]]
            each["error"] = own[-1].text if own else ""
    ended = _ended_by_agent(text)
    for each in failures:
        each["ended_by_torchrun"] = ended.get(each.get("pid")) == each["exitcode"]
    culprit = _culprit(failures)
    by_itself = [each for each in failures if not each["ended_by_torchrun"]]
    for each in failures:
        if each["ended_by_torchrun"]:
            # It says what torchrun did, and nothing of the rank.
            each["signal"], each["exitcode"] = -each["exitcode"], None
    details: dict[str, Any] = {
        "exitcodes": {each["rank"]: each["exitcode"] for each in by_itself},
        "root": failures[0]["rank"] if said_root else None,
        "culprit": culprit["rank"],
        "failures": failures[:64],
        "launcher": "torchrun",
        "lines": [before[-1].number, ending[-1].number],
    }
    return make_sign("torchrun_summary", root, details, culprit["rank"])


def _ended_by_agent(text: Text) -> dict[int | None, int]:
    """The processes that torchrun ended because another had failed, with what that leaves."""
    found: dict[int | None, int] = {}
    for line in text.hits(" closing signal "):
        if match := _CLOSING.search(line.text):
            found[int(match[1])] = -_SIGNALS.get(match[2], 15)
    for line in text.hits("forcefully exiting via"):
        if match := _FORCED.search(line.text):
            found[int(match[1])] = -9
    return found


def _until_rule(text: Text, root: Line) -> Iterator[Line]:
    yield root
    for line in text.from_same(root, 400):
        if line.text.startswith("====="):
            return
        yield line


def _failures(lines: Iterator[Line]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    last = ""
    for line in lines:
        match = _FIELD.match(line.text)
        if match is None:
            if line.text.strip() and not line.text.startswith(("-----", "[", "Root", "=====")):
                last = line.text.strip()
            continue
        name, value = match[1], match[2].strip()
        if name == "time":
            _close(found, last)
            found.append({"rank": -1, "exitcode": 0, "error": "", "time": value})
            last = ""
        elif not found:
            continue
        elif name == "host":
            found[-1]["host"] = value
        elif name == "rank" and (numbers := re.match(r"(\d+)(?: \(local_rank: (\d+)\))?", value)):
            found[-1]["rank"] = int(numbers[1])
            found[-1]["local_rank"] = int(numbers[2]) if numbers[2] else None
        elif name == "exitcode" and (numbers := re.match(r"(-?\d+)(?:\s+\(pid: (\d+)\))?", value)):
            found[-1]["exitcode"] = int(numbers[1])
            found[-1]["pid"] = int(numbers[2]) if numbers[2] else None
        elif name == "traceback":
            found[-1]["traceback"] = value[:200]
            last = ""
    _close(found, last)
    return [each for each in found if each["rank"] >= 0]


def _close(found: list[dict[str, Any]], last: str) -> None:
    """The last line of a traceback is its exception."""
    if found and not found[-1]["error"] and found[-1].get("traceback", "").startswith("Traceback"):
        found[-1]["error"] = last[:600]


def _culprit(failures: list[dict[str, Any]]) -> dict[str, Any]:
    """Who failed of itself. A rank that lost another, or that torchrun then ended, did not."""
    own = [each for each in failures if not _is_victim(each)]
    if own:
        # A signal is nobody's answer to a lost connection; an exit can be.
        return next((each for each in own if each["exitcode"] < 0), own[0])
    if any(_TIMED_OUT.search(each["error"]) for each in failures):
        silent = [each for each in failures if not each["error"]]
        if silent:
            return silent[0]  # the others had waited for it
    return failures[0]


def _is_victim(failure: dict[str, Any]) -> bool:
    was_ended = failure["ended_by_torchrun"] or failure["exitcode"] == -15
    return was_ended or bool(_OF_A_VICTIM.search(failure["error"]))
