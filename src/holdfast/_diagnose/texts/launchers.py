"""What launchers, shells and SLURM print at the end: which process failed, and how.

torchrun's own "root cause" is the failure that it saw first. After the kill of a rank, that is
often another rank, which had lost its connection. So all failures are kept, and judged together.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any

from holdfast._diagnose.texts.lines import Line, Text
from holdfast._diagnose.texts.sign import (
    PROGRESS_BAR,
    RESTARTS,
    TEXT_MOST,
    Sign,
    is_source_code,
    make_sign,
)

_FIELD = re.compile(r"\s*(time|host|rank|exitcode|error_file|traceback)\s*: ?(.*)")
_SPAWN = re.compile(
    r"(?:ProcessExited)?Exception: [Pp]rocess (\d+) terminated with "
    r"(?:signal (\w+)|exit code (-?\d+))"
)
_AGENT = re.compile(
    r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\) of binary: (\S+)"
)
_CLOSING = re.compile(r"Sending process (\d{1,9}) closing signal (?:Signals\.)?(\w+)")
_FORCED = re.compile(r"Unable to shutdown process (\d{1,9}) via .*forcefully exiting via")
# Other launchers, and Python's own subprocess, with the status of their child.
_SIGNAL_STATUS = (
    r"[:= ]{1,3}(?P<code>-[1-9]\d?|1(?:24|29|3\d|4[0-3])|2(?:5[7-9]|6\d|7[01]))"  # PBS: from 256
    r"(?:\W*$| \((?:SIG|Linux Signal)|(?<=: \d{3})\b)"
)
_EXITS = {
    # The `--local_rank` in DeepSpeed's line is that of the process that it started last.
    "exits with return code = ": r"exits with return code = (?P<code>-?\d{1,3})\b",
    " exited with ": r"(?:lobal rank (?P<rank>\d{1,6}) \(PID \d+\)|[ '][Rr]ank (?P<of>\d{1,6})'"
    r"|^[\w.-]+) exited with (?:status )?code (?P<code>-?\d{1,3})",
    "Child process with PID ": r"\[rank: (?P<rank>\d{1,6})\] Child process with PID \d+ "
    r"terminated with code (?P<code>-?\d{1,3})",
    "Exit Code:": r"^\s*Exit Code: +(?P<code>[1-9]\d{0,2})$",
    "Main process exited, ": r"Main process exited, code=(?:exited, status=(?P<code>\d{1,3})"
    r"|(?:killed|dumped), status=(?P<signal>\d{1,2}))/",
    "MPI_ABORT was invoked on rank ": r"MPI_ABORT was invoked on rank (?P<rank>\d{1,6})",
    "Container rank ": r"Container rank (?P<rank>\d{1,6}) status failed .*"
    r"\bcode (?P<code>-?\d{1,3})\b",
    # The status of any other launcher: that of a signal, at the end of a line. Prose has others.
    **{
        f"xit{w}": f"xit{w}{_SIGNAL_STATUS}"
        for w in (" code", " Code", " status", "code", "Code", "_code", "_status")
    },
    "return code Negsignal.": r"return code Negsignal\.(?P<name>SIG\w+)",  # Airflow's
    "ormal termination (": r"termination \((?:signal (?P<signal>\d{1,2})|return value "
    r"(?P<code>[1-9]\d*))\)$",  # HTCondor's
    "Exited by signal ": r"^Exited by signal (?P<signal>\d{1,2})\.",  # LSF's
    "xit Status": f"xit Status{_SIGNAL_STATUS}".replace("{1,3}", "{1,12}"),  # in columns
    "Process name: ": r"Process name: (?:\[\[\d+,\d+\],(?P<rank>\d{1,6})\]|(?P<node>\S+?)\[\d+\])",
    "exited: ": r"\bexited: \S+ \((?:exit status (?P<code>\d{1,3})|terminated by (?P<name>SIG\w+))"
    r"(?: \(core dumped\))?; not expected\)",  # supervisord's
    "32212": r"(?i:exit ?(?:status|code))\W{1,3}(?P<code>32212\d{5})\b",  # of Windows
    "make: *** [": r"make: \*\*\* \[.*\] Error (?P<code>\d{1,3})$",
    "died with <Signals.": r"died with <Signals\.\w+: (?P<signal>\d{1,2})>",
    " exited on signal ": r"process rank (?P<rank>\d{1,6}) (?:.* on node (?P<node>\S{1,200}) )?.*"
    r"exited on signal (?P<signal>\d{1,2})\b",
    "] Signal: ": r"\] Signal: .*\((?P<signal>\d{1,2})\)$",
    "signal (": r"(?:^|\] )signal \((?P<signal>\d{1,2})(?:\.\d)?\): [A-Z]",  # Julia's
    "died through signal ": r"died through signal \w+ \((?P<signal>\d{1,2})\)",  # Grid Engine's
    "Command execution on worker ": r"on worker (?P<rank>\d{1,6}) failed with exit status "
    r"(?P<code>\d{1,3})",  # gcloud's, of a TPU
    "(first noticed rank ": r"noticed rank (?P<rank>\d{1,6})\) terminated with signal "
    r"(?P<signal>\d{1,2})",  # jsrun's
    "KILLED BY SIGNAL: ": r"KILLED BY SIGNAL: (?P<signal>\d{1,2})\b",  # Intel MPI's
    "EXIT STRING: ": r"EXIT STRING: .*\(signal (?P<signal>\d{1,2})\)",
    "Command terminated by signal ": r"^Command terminated by signal (?P<signal>\d{1,2})$",
    "Process finished with exit code ": r"^Process finished with exit code "
    r"(?P<code>1(?:29|3\d|4[0-3])|-107374\d{4})\b",
    "command terminated with exit code ": r"command terminated with exit code (?P<code>\d{1,3})\b",
}
# "Worker IP address: 10.0.0.1 … Worker PID: 12 Worker exit type: SYSTEM_ERROR"; and above it
# the fields of the actor, each in a line of its own.
_OF_RAY = re.compile(r"Worker (IP address|PID|exit type): (\S+)")
_FIELD_OF_RAY = re.compile(r"\s+(class_name|pid|name|ip): (\S+)\s*$")
# kubectl's tables, and `describe`, where a container is less indented than its state.
_ROW_OF_PODS = re.compile(r"(\S+) +\d+/\d+ +OOMKilled\b")
_OF_POD = re.compile(r"(?i)reason\W+OOMKilled|OOMKilled\W{1,3}true")
_CONTAINER = re.compile(r"  ([\w-]+):\s*$")
_POD = re.compile(r"Name: +(\S+)\s*$")
_LIMIT = re.compile(r" +memory: +(\S+)\s*$")
_STATUS = re.compile(r" *\W?[Ee]xit ?Code\W+(\d{1,3})\b")
_OF_A_STOP = re.compile(r"Exit Code: +(?:0|137|143)$")
_RUNNING_AT = re.compile(r"RANK (?P<rank>\d{1,6}) PID \d+ RUNNING AT (?P<node>\S+)")
_CODE_BELOW = re.compile(r"\bExit code: +(?P<code>\d{1,3})$")  # of Open MPI
# Statuses of Windows: access violation, illegal instruction, integer division, stack overrun.
_OF_WINDOWS = {-1073741819: -11, -1073741795: -4, -1073741676: -8, -1073740791: -6}
_MOST_SUMMARIES = 4  # one of each attempt, in a log that several have written to
# What LSF, kubectl, sacct or seff tell of the end: it may stand above the output. Of LSF's report
# only these lines tell.
_REPORT = re.compile(
    r"(?m)^Sender: LSF System .*\n(?:.*\n){1,200}?\n?-{20,}\n+(?P<told>(?:.+\n)+)\n*"
    r"Resource usage summary:.*\n(?:.*\n){1,40}?The output \(if any\) (?P<where>.*)\n"
    r"|^Name: +\S+\n(?=(?:.*\n){0,9}(?:Namespace|Status|Node|Containers): )"
    r"(?:(?:[A-Z][\w ./-]*:.*|[ \t].*|)(?:\n|\Z))+"
    r"|^NAME +READY +STATUS.*\n(?:\S+ +\d+/\d+ .*(?:\n|\Z))+"
    r"|^JobID(?:Raw)? .*\n[- ]+\n(?:\d\S* .*(?:\n|\Z))+"
    r"|^Job ID: \d.*\n(?:[A-Z][\w /-]+: .*(?:\n|\Z))+"
)
_REPORT_WORDS = ("Sender: LSF", "Name: ", "NAME ", "JobID", "Job ID: ")


# The end of a container before it was started again.
_LAST_STATE = re.compile(
    r"(?m)(^ +State: +Terminated\n +Reason: +Completed\n(?:(?! +Last State:) .*\n){0,6})"
    r" +Last State:.*\n(?: {6,}.*\n)*"
)


def split_reports(text: str) -> tuple[str, str]:
    """The text with empty lines in place of reports of its end, and their lines that tell.

    LSF adds to its file for each job: what stands above the report of the last is past.
    """
    told = ""
    if not any(text.startswith(word) or f"\n{word}" in text for word in _REPORT_WORDS):
        return text, told  # most texts: a search for words is quicker
    for found in reversed(list(_REPORT.finditer(text))):
        is_last = "follow" in (found["where"] or "")
        said = found["told"] or _LAST_STATE.sub(r"\1", found[0])
        start, told = 0 if is_last else found.start(), said + told
        text = text[:start] + "\n" * text.count("\n", start, found.end()) + text[found.end() :]
        if is_last:
            break
    return text, told


# Open MPI wraps what it says, between two lines of dashes, and tags each line alike.
_DASHES = re.compile(r"(?m)^(?P<tag>(?:\[[\d,]+\]<std\w+>: ?)?)-{50,}$")
_OF_MPI = re.compile(r"\b(?:[OP]RTE|mpirun|mpiexec|MPI_\w+|Open MPI|MPI (?:process|job))")
_MOST_BOXED = 25  # lines


def join_boxes(text: str) -> str:
    """With each message of Open MPI in one line, and empty ones in place of its others."""
    if "-" * 50 not in text or not _OF_MPI.search(text):
        return text
    marks, parts, done, i = [*_DASHES.finditer(text)], list[str](), 0, 0
    while i < len(marks):
        is_closed = i + 1 < len(marks)
        start, end = marks[i].end() + 1, marks[i + 1].start() if is_closed else len(text)
        said = text[start:end]
        told = said if is_closed else said.partition("\n")[0]
        is_one = said.count("\n") <= _MOST_BOXED and "Traceback" not in said
        if not is_one or not _OF_MPI.search(told):
            i += 1
            continue
        tag = marks[i]["tag"]
        words = " ".join(line.removeprefix(tag).strip() for line in said.splitlines())
        parts += [text[done : marks[i].start()], tag, words, "\n" * (said.count("\n") + 1)]
        done, i = end, i + 2
    return "".join(parts) + text[done:]


def read_launchers(text: Text, exceptions: list[Sign]) -> Iterator[Sign]:
    """The summaries of torchrun and of torch.multiprocessing.spawn, and the statuses of others."""
    summaries = [line for line in text.hits("(first observed failure):") if "Root" in line.text]
    # Or the end of a summary, as of `tail`.
    roots = summaries[-_MOST_SUMMARIES:] or [*text.hits("exitcode  : ")][-1:]
    for line in roots:
        yield from _summary(text, line, exceptions)
    for line in text.hits("failed (exitcode: "):
        match = _AGENT.search(line.text)
        if match is not None and not summaries:
            # Without the summary, as when the agent was killed while it wrote.
            rank = int(match[2])
            details = {"exitcodes": {rank: int(match[1])}, "pid": int(match[3])}
            yield make_sign("torchrun_summary", line, details, rank)
    for line in chain(text.hits("Exception: process "), text.hits("Exception: Process ")):
        match = _SPAWN.search(line.text)
        if match is not None:
            rank = int(match[1])
            code = -_number(match[2]) if match[2] else int(match[3])
            yield make_sign("torchrun_summary", line, {"exitcodes": {rank: code}}, rank)
    yield from _read_ray(text)
    yield from _read_pods(text)
    for line in text.hits("Job was held."):  # of HTCondor, with the reason below it
        yield make_sign("environment", next(text.after(line, 1), line))
    for needle, shape in _EXITS.items():
        lines = list(text.hits(needle))
        if needle == "Exit Code:" and (own := [s for s in lines if not _OF_A_STOP.search(s.text)]):
            lines = own  # of other containers of the pod, which were ended with it
        for line in lines:
            match = re.search(shape, line.text)
            if match is not None:
                place = _RUNNING_AT.search(next(text.before(line, 1), line).text)
                below = _CODE_BELOW.search(line.text) if needle == "Process name: " else None
                below = below or _CODE_BELOW.search(next(text.after(line, 1), line).text)
                found = match.groupdict() | (place.groupdict() if place else {})
                found |= below.groupdict() if below else {}
                number = found.get("rank") or found.get("of")
                of = int(number) if number else None
                code = -int(found["signal"]) if found.get("signal") else int(found.get("code") or 1)
                code = -_number(found["name"]) if found.get("name") else code
                code = _OF_WINDOWS.get(code - (1 << 32 if code > 1 << 31 else 0), code)
                code = 256 - code if 256 < code < 320 else code  # of PBS
                node = {"node": found["node"]} if found.get("node") else {}
                yield make_sign("launcher_exit", line, {"exitcode": code, **node}, of)


def _read_pods(text: Text) -> Iterator[Sign]:
    """A container that was killed for memory, as `kubectl describe` tells it, or docker."""
    for line in text.hits("OOMKilled"):
        above, below = list(text.before(line, 60)), list(text.after(line, 30))
        if row := _ROW_OF_PODS.match(line.text):
            yield make_sign("slurm_oom", line, {"pod": row[1]})
        if not _OF_POD.search(line.text):
            continue
        end = next((i for i, each in enumerate(below) if _CONTAINER.match(each.text)), len(below))
        found = {
            "container": next(_matches(_CONTAINER, above), None),
            "pod": next(_matches(_POD, above), None),
            "limit": next(_matches(_LIMIT, below[:end]), None),
            "exitcode": next(map(int, _matches(_STATUS, [*below[:3], *above[:3]])), None),
        }
        yield make_sign("slurm_oom", line, {key: known for key, known in found.items() if known})


def _matches(shape: re.Pattern[str], lines: list[Line]) -> Iterator[str]:
    return (found[1] for line in lines if (found := shape.match(line.text)))


def _read_ray(text: Text) -> Iterator[Sign]:
    """A worker of Ray that died: its line has pages of advice, and the lines above name it."""
    found: list[tuple[Line, str, dict[str, Any]]] = []
    for line in text.hits("Worker exit type: "):
        fields = [(f[1].lower(), f[2]) for f in _OF_RAY.finditer(line.text)]
        above = (_FIELD_OF_RAY.match(each.text) for each in text.before(line, 10))
        fields += [(each[1], each[2]) for each in above if each]
        details: dict[str, Any] = {}
        for name, value in fields:
            details.setdefault({"ip address": "ip", "class_name": "actor"}.get(name, name), value)
        details["pid"] = int(details.get("pid", "0")[:9]) or None
        start = next(_OF_RAY.finditer(line.text)).start()
        found.append((line, line.text[start:], details))
    for line, said, details in found:
        same = [other for _, _, other in found if other["pid"] == details["pid"]]
        merged = {key: value for other in [*same, details] for key, value in other.items()}
        yield replace(make_sign("worker_exited", line, merged), text=said[:TEXT_MOST])


def _number(name: str) -> int:
    return int(getattr(signal, name, 0)) if name.startswith("SIG") else 0


def _summary(text: Text, root: Line, exceptions: list[Sign]) -> Iterator[Sign]:
    before = [root]
    for line in text.before(root, 4000):
        if line.rank == root.rank:
            before.append(line)
        if line.text.startswith(("Failures:", "=====")):
            break
    below = text.from_same(root, 400)
    ending = [root, *takewhile(lambda line: not line.text.startswith("====="), below)]
    failures = _failures(ending)
    known = {each["rank"] for each in failures}
    failures += [each for each in _failures(reversed(before)) if each["rank"] not in known]
    if not failures:
        return
    starts = [line.number for line in text.hits(RESTARTS) if line.number < root.number]
    attempt = [sign for sign in exceptions if sign.line > max(starts, default=0)]
    for each in failures:
        if not each["error"]:
            own = [s for s in attempt if s.rank == each["rank"]]
            each["error"] = own[-1].text if own else ""
    ended = _ended_by_agent(text)
    for each in failures:
        if ended.get(each.get("pid")) == each["exitcode"]:
            each["exitcode"] = None  # it tells what torchrun did, and nothing of the rank
    codes = {each["rank"]: each["exitcode"] for each in failures}
    details: dict[str, Any] = {
        "exitcodes": {rank: code for rank, code in codes.items() if code is not None},
        "failures": failures[:64],
        "lines": [before[-1].number, ending[-1].number],
    }
    yield make_sign("torchrun_summary", root, details, failures[0]["rank"])


def _ended_by_agent(text: Text) -> dict[int | None, int]:
    """The processes that torchrun ended because another had failed, with their status."""
    found: dict[int | None, int] = {}
    for line in text.hits(" closing signal "):
        if match := _CLOSING.search(line.text):
            found[int(match[1])] = -(_number(match[2]) or 15)
    for line in text.hits("forcefully exiting via"):
        if match := _FORCED.search(line.text):
            found[int(match[1])] = -9
    return found


def _failures(lines: Iterable[Line]) -> list[dict[str, Any]]:
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
            found.append({"rank": -1, "exitcode": 0, "error": ""})
            last = ""
        elif not found:
            continue
        elif name == "host":
            found[-1]["host"] = value
        elif name == "traceback":
            found[-1]["traceback"], last = value[:200], ""
        elif numbers := re.match(r"(-?\d+)(?:\s+\(pid: (\d+)\))?", value):
            found[-1][name] = int(numbers[1])
            if numbers[2]:
                found[-1]["pid"] = int(numbers[2])
    _close(found, last)
    return [each for each in found if each["rank"] >= 0]


def _close(found: list[dict[str, Any]], last: str) -> None:
    if found and not found[-1]["error"] and found[-1].get("traceback", "").startswith("Traceback"):
        found[-1]["error"] = last[:600]


# -- Shells, SLURM and the C++ runtime

SIGNAL_WORDS = {
    "killed": ("killed_line", 9),
    "segmentation fault": ("segfault_line", 11),
    "bus error": ("bus_error", 7),
    "aborted": ("abort_line", 6),
    "illegal instruction": ("illegal_instruction_line", 4),
    "floating point exception": ("floating_point_line", 8),
    **{"terminated": ("terminated_line", 15), "hangup": ("terminated_line", 1)},
    **{"quit": ("terminated_line", 3), "trace/breakpoint trap": ("trap_line", 5)},
    **{f"user defined signal {n}": ("terminated_line", 8 + 2 * n) for n in (1, 2)},
    "CPU time limit exceeded": ("terminated_line", 24),
    "file size limit exceeded": ("terminated_line", 25),
    "out of memory": ("slurm_oom", 9),
    # As bash says it in Chinese, Japanese, German and French.
    **dict.fromkeys(("已杀死", "强制终止", "強制終了", "getötet", "tué"), ("killed_line", 9)),
    **dict.fromkeys(("段错误", "speicherzugriffsfehler"), ("segfault_line", 11)),
    **dict.fromkeys(("已终止", "beendet"), ("terminated_line", 15)),
}
_WORDS = "|".join(w[:1].upper() + w[1:] for w in SIGNAL_WORDS if w != "out of memory")
# A script starts them beside the training, and ends them after it.
_HELPERS = re.compile(
    r"(?:\S*/)?(?:nvidia-smi|nvtop|gpustat|dcgmi|tensorboard|mlflow|tail|tee|sleep|watch|top|vmstat"
    r"|iostat|dstat|sar|Xvfb|ssh|rsync)\b"
)
# "train.sh: line 3:  4711 Killed      python train.py", "[1]+  Killed  python …", "Killed"
_SHELLS = (
    re.compile(
        r"(?:\^[A-Z\\])*(?:[^:]{1,200}: line \d+: +|\[\d+\][+-]? +)?(?:(?P<pid>\d+) +)?"
        rf"(?:signal: )?(?P<what>{_WORDS})(?:: (?:4|6|9|10|11|15))?"  # a number on macOS
        r"(?:\s*\(core dumped\))?(?P<command>\s{2,}.*|)\s*"
    ),
    re.compile(  # zsh
        r"(?:zsh: |\[\d+\] +[+-]? *(?P<pid>\d+) +)"
        r"(?P<what>killed|segmentation fault|abort|bus error|illegal hardware instruction"
        r"|terminated)(?: +\(core dumped\))?(?P<command>\s{2,}.*|)\s*"
    ),
    re.compile(rf"[^:]{{1,200}}: line \d+: +(?P<pid>\d+) (?P<what>{_WORDS})(?P<command>.*)"),
    re.compile(
        r"(?:signal: )?(?P<what>segmentation fault|aborted|bus error|illegal instruction|floating"
        r" point exception) \(core dumped\)"
    ),
)
_SRUN = re.compile(
    r"srun: error: (?P<node>[^:\s]+): tasks? (?P<task>\d+)[\d,\-]*: (?P<what>.+?)"
    r"(?: \(core dumped\))?\s*$"
)
_CANCELLED = re.compile(
    r"\*\*\* (?P<what>JOB|STEP) [\w.+\[\]-]+ ON (?P<node>\S+) CANCELLED AT \S+"
    r"(?P<why> DUE (?:TO|to) .*?)?(?:, SEE [^*]*)? \*\*\*"
)
_REASONS = {
    "TIME LIMIT": "slurm_time_limit",
    "PREEMPT": "slurm_preempted",
    r"NODE (?:\S+ )?FAIL": "slurm_node_fail",
    "REQUEUE": "slurm_requeued",
}
_TERMINATE = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']*)'")


def read_system(text: Text) -> Iterator[Sign]:
    """Lines of shells, srun and slurmstepd, and of the C++ runtime."""
    for word in (*SIGNAL_WORDS, "abort", "illegal hardware instruction"):
        for spelled in {word, word[:1].upper() + word[1:]} - {"out of memory", "Out of memory"}:
            for line in text.hits(spelled):
                yield from _shell(line)
    for line in text.hits("srun: error: "):
        yield from _srun(line)
    for line in text.hits(" CANCELLED AT "):
        yield from _cancelled(line)
    for line in text.hits("terminate called after throwing"):
        yield _terminate(text, line)


def _shell(line: Line) -> Iterator[Sign]:
    """A shell reports the signal of its command; prose with the same words has more words."""
    if is_source_code(line.text, 0) or len(line.text) > 2000:
        return
    said = PROGRESS_BAR.sub("", line.text.strip())
    match = next((m for each in _SHELLS if (m := each.fullmatch(said))), None)
    if match is None:
        return
    word = match["what"].lower().replace(" hardware", "").replace("cpu", "CPU")
    kind, number = SIGNAL_WORDS.get(word, SIGNAL_WORDS["aborted"])
    named = match.groupdict()
    details: dict[str, Any] = {"signal": number}
    if named.get("pid"):
        details["pid"] = int(named["pid"][:9])
    if command := (named.get("command") or "").replace("(core dumped)", "").strip():
        details["command"] = command[:300]
    if not _HELPERS.match(command):
        yield make_sign(kind, line, details)


def _srun(line: Line) -> Iterator[Sign]:
    match = _SRUN.search(line.text)
    if match is None:
        return
    details: dict[str, Any] = {"node": match["node"]}
    rank, what = int(match["task"][:9]), match["what"].lower()
    if exited := re.fullmatch(r"exited with exit code (\d+)", what):
        yield make_sign("srun_exit", line, {**details, "exitcode": int(exited[1][:9])}, rank)
    elif what in SIGNAL_WORDS:
        kind, number = SIGNAL_WORDS[what]
        yield make_sign(kind, line, {**details, "signal": number}, rank)


def _cancelled(line: Line) -> Iterator[Sign]:
    match = _CANCELLED.search(line.text)
    if match is None:
        return
    why = (match["why"] or "").upper()
    # Every step with a failed task ends so; of a cancelled job, the job does.
    other = "slurm_step_cancelled" if match["what"] == "STEP" and not why else "slurm_cancelled"
    kind = next((kind for word, kind in _REASONS.items() if re.search(word, why)), other)
    yield make_sign(kind, line, {"node": match["node"]})


def _terminate(text: Text, line: Line) -> Sign:
    match = _TERMINATE.search(line.text)
    below = (each.text.strip() for each in text.from_same(line, 3))
    said = next((each for each in below if each.startswith("what():")), "")
    what = said.removeprefix("what():").strip()
    # NCCL's watchdog names its rank in there.
    named = re.search(r"\[(?:PG [^\]]{0,80})?Rank (\d{1,6})\]", what)
    details = {"type": match["type"] if match else "", "what": what}
    return make_sign("cxx_exception", line, details, int(named[1]) if named else None)
