"""What the processes of a record do: a person holds them, they work, or nothing happens.

Pure functions on the records of `inspect.py`. A missing key means: not known.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from holdfast._environment.processes.cgroup import find_folder
from holdfast._environment.processes.proc import field, read_bytes
from holdfast._environment.processes.threads import ThreadSample, is_terminal
from holdfast._text import real, records, text

_COMPUTES_CORES = 0.2
_WORKS_CORES = 0.02  # of a thread, other than the main one, whose stack moves
_POLLS_PER_SECOND = 3.0  # a thread that waits forever does not wake up at all
_ASKING_SECONDS = 0.001
_WAKES_PER_SECOND = 50.0  # of the main thread: it receives data, or it polls
_BYTES_PER_SECOND = 256 * 1024
_FAULTS_PER_SECOND = 20.0  # pages that are read from a disk
_WAITS_SHARE = 0.5  # of a window, ready to run; timers of libraries wait for less
_OUR_THREADS = "holdfast-"
_TRANSFERS = ("read", "readv", "recvfrom", "recvmsg", "write", "writev", "sendto", "sendmsg")


class Activity(enum.Enum):
    """First what no time limit may judge, then work, then what a time limit judges."""

    PAUSED = "paused"  # in a debugger or at a prompt
    TRACED = "traced"  # by gdb, strace and the like
    STOPPED = "stopped"  # by SIGSTOP or Ctrl-Z
    FROZEN = "frozen"  # with its cgroup
    UNREAD = "unread"  # its output has no reader: a pager, Ctrl-S, a full pipe
    MOVING = "moving"  # works
    BUSY = "busy"  # computes or waits for a processor, but stands at one line
    POLLS = "polls"  # hardly computes, and wakes up often
    DISK = "disk"  # waits in the kernel for a file system
    IDLE = "idle"  # nothing happens


def activity_of(look: Mapping[str, Any]) -> Activity:
    """The most telling activity of the whole tree."""
    processes = records(look.get("processes"))
    if debugger_of(look) is not None:
        return Activity.PAUSED
    if tracer_of(look) is not None:
        return Activity.TRACED
    if (held := _held(processes[:1])) is not None:
        return held
    working = _working(look, processes)
    if working is not Activity.MOVING and unread_of(look):
        return Activity.UNREAD
    if working in (Activity.MOVING, Activity.BUSY):
        return working
    # A held child makes the trainer wait only if nothing else works.
    if (held := _held(processes[1:])) is not None:
        return held
    if any(text(each.get("state")) == "D" for each in processes):
        return Activity.DISK
    return working or Activity.IDLE


def debugger_of(look: Mapping[str, Any]) -> str | None:
    """The tool with which a person holds a thread: "pdb", "debugpy", "a prompt"."""
    if look.get("paused"):
        return str(look["paused"])
    found = held_thread(look)
    return None if found is None else found[0]


def held_thread(look: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], Mapping[str, Any]] | None:
    """The tool by the stacks alone, with the process and its thread."""
    for process in records(look.get("processes")):
        for thread in records(process.get("threads")):
            found = _debugger_in(records(thread.get("frames")))
            if found is not None:
                return found, process, thread
            is_reading = thread.get("call") in ("read", "select", "pselect6")
            from_person = is_reading and is_terminal(thread.get("call_path"))
            # A shell at its prompt stops no training.
            if thread.get("is_main") and from_person and not _is_shell(process):
                return "a prompt", process, thread
    return None


def unread_of(look: Mapping[str, Any]) -> list[int]:
    """The descriptors (1 or 2 or both) whose output waits for a reader."""
    for process in records(look.get("processes")):
        for thread in records(process.get("threads")):
            if thread.get("unread"):
                return list(thread["unread"])
    return []


def tracer_of(look: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The process that is traced from outside: {"pid", "tracer", "tracer_name"}."""
    processes = records(look.get("processes"))
    ours = [each.get("pid") for each in processes]
    for each in processes:
        # A program may trace its own child as part of its work. A child that traces the first
        # process is a debugger.
        if each.get("tracer") and (each["tracer"] not in ours or each is processes[0]):
            return each
    return None


def is_users(file: str) -> bool:
    """True unless a file belongs to Python, an installed package or holdfast."""
    path = file.replace("\\", "/")
    if path.startswith("<") and not path.startswith(("<stdin", "<string", "<console", "<ipython")):
        return False
    return _NOT_USERS.search(path) is None


# The place of the trainer's Python is not known here, so its usual names are compared.
_NOT_USERS = re.compile(
    r"/(?:site-packages|dist-packages|holdfast/torch|debugpy)/|/holdfast/_"
    r"|(?:^|/)lib(?:64)?/(?:python3|pypy3)[^/]*/"
)


CLIENT = "debugpy, which waits for a client"  # as in `_store/memory/control.py`
# What waits for a person: by function, parts of its file's path and the tool's name in
# `_store/memory/control.py`.
_WAITS = {
    "do_wait_suspend": (("pydevd", "debugpy"),),
    "_do_wait_suspend": (("pydevd", "debugpy"),),
    "_wait_for_attach": (("pydevd", CLIENT),),
    "wait_for_client": (("debugpy/", CLIENT),),
    "interaction": (("/pdb.py", "pdb"), ("IPython/", "pdb"), ("pudb/", "a debugger")),
    "breakpoint": (("torch/distributed/", "pdb"),),  # the other ranks wait here
    "__init__": (("remote_pdb", "a debugger"), ("rpdb/", "a debugger")),  # waits for a connection
    "cmdloop": (("/cmd.py", "a prompt"),),
    "interact": (("/code.py", "a prompt"), ("_pyrepl/", "a prompt")),
    "multiline_input": (("_pyrepl/", "a prompt"),),
    "mainloop": (("IPython/terminal/", "a prompt"),),
    "prompt_for_code": (("IPython/", "a prompt"),),
    "prompt": (("prompt_toolkit/", "a prompt"),),
    "_input_request": (("ipykernel/", "a prompt"),),
    "unix_getpass": (("/getpass.py", "a prompt"),),
}
_PYDEVD = "pydevd"  # where PyCharm has it, it looks like the user's own code
_STRONGEST_FIRST = (CLIENT, "debugpy", "pdb", "a debugger", "a prompt")


def tool_that_waits(file: str, function: str) -> str | None:
    """The tool that waits for a person in this function."""
    for part, word in _WAITS.get(function, ()):
        if part in file.replace("\\", "/") and not _is_of_script(file):
            # PyCharm and others have pydevd without debugpy.
            is_other = word in (CLIENT, "debugpy") and "debugpy" not in file
            return "a debugger" if is_other else word
    return None


def _is_of_script(file: str) -> bool:
    return is_users(file) and _PYDEVD not in file


def strongest_tool(found: Collection[str]) -> str | None:
    return next((word for word in _STRONGEST_FIRST if word in found), None)


def _debugger_in(frames: Sequence[Mapping[str, Any]]) -> str | None:
    """Only frames above the user's code count: what lies below has started that code."""
    found = set()
    for frame in frames:
        file = text(frame.get("file"))
        if _is_of_script(file):
            break
        tool = tool_that_waits(file, text(frame.get("name")).rpartition(".")[2])
        if tool is not None:
            found.add(tool)
    return strongest_tool(found)


_SHELLS = ("bash", "sh", "zsh", "dash", "fish", "ksh", "tcsh", "csh")


def _is_shell(process: Mapping[str, Any]) -> bool:
    program = next(iter(text(process.get("command")).split()), "").rpartition("/")[2]
    return text(process.get("name")) in _SHELLS or program.lstrip("-") in _SHELLS


def _held(processes: Sequence[Mapping[str, Any]]) -> Activity | None:
    if any(each.get("frozen") for each in processes):
        return Activity.FROZEN
    if any(text(each.get("state")) == "T" for each in processes):
        return Activity.STOPPED
    return None


def _working(look: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]) -> Activity | None:
    seconds = _number(look, "seconds") or 1.0
    if any(_moves(each, seconds) for each in processes):
        return Activity.MOVING
    if any(map(computes, processes)):
        return Activity.BUSY
    awake = [thread for each in processes for thread in _awake(each)]
    # A thread that computes more between two waits than a poll needs works.
    if any(
        _transfers(each) or _number(each, "cpu") > _ASKING_SECONDS * _number(each, "wakes")
        for each in awake
    ):
        return Activity.MOVING
    main = [each for process in processes[:1] for each in _awake(process) if each.get("is_main")]
    if any(_number(each, "wakes") > _WAKES_PER_SECOND for each in main):
        return Activity.BUSY
    return Activity.POLLS if awake else None


def _moves(process: Mapping[str, Any], seconds: float) -> bool:
    if _number(process, "io") > _BYTES_PER_SECOND * seconds:
        return True
    if _number(process, "major_faults") > _FAULTS_PER_SECOND * seconds:
        return True
    for thread in records(process.get("threads")):
        if not thread.get("moved") or text(thread.get("name")).startswith(_OUR_THREADS):
            continue
        if thread.get("is_main") or _number(thread, "cpu") > _WORKS_CORES:
            return True
    return False


def computes(process: Mapping[str, Any]) -> bool:
    """True if it uses a processor, or is ready to."""
    cores = _number(process, "cpu")
    if cores > _COMPUTES_CORES or waiting_share(process) > _WAITS_SHARE:
        return True
    threads = records(process.get("threads"))
    return cores > _WORKS_CORES and any(text(each.get("state")) == "R" for each in threads)


def waiting_share(process: Mapping[str, Any]) -> float:
    """The share of the window in which a thread was ready to run and had no processor."""
    threads = records(process.get("threads"))
    own = [each for each in threads if not text(each.get("name")).startswith(_OUR_THREADS)]
    return max((_number(each, "waits") for each in own), default=0.0)


def _awake(process: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The threads that receive data or poll."""
    threads = records(process.get("threads"))
    owners = [each for each in threads if each.get("owns_gil")]
    return [
        each
        for each in owners or threads  # the others only wait for the interpreter
        if _number(each, "wakes") > _POLLS_PER_SECOND
        # Threads of libraries wake up by their own timers.
        and (each.get("is_main") or records(each.get("frames")))
        and not text(each.get("name")).startswith(_OUR_THREADS)
    ]


def _transfers(thread: Mapping[str, Any]) -> bool:
    """True if a thread that wakes up often transfers bytes, however slowly."""
    frames = records(thread.get("frames"))
    in_socket = bool(frames) and text(frames[0].get("file")).endswith(("/socket.py", "/ssl.py"))
    return in_socket or thread.get("call") in _TRANSFERS


def _number(record: Mapping[str, Any], name: str) -> float:
    return real(record.get(name)) or 0.0


def loop_of(look: Mapping[str, Any]) -> list[int]:
    """The lines of one function between which the main thread of the trainer moves.

    Empty if it leaves that function, hardly computes, or anything else moves: that is progress.
    """
    processes = records(look.get("processes"))
    threads = records(processes[0].get("threads")) if processes else []
    main = next((each for each in threads if each.get("is_main")), {})
    lines = main.get("lines")
    if not main.get("moved") or not isinstance(lines, list) or not computes(processes[0]):
        return []
    still = [{**each, "moved": False} if each is main else each for each in threads]
    rest = {**look, "processes": [{**processes[0], "threads": still}, *processes[1:]]}
    return lines if activity_of(rest) is Activity.BUSY else []


# -- What a process or a thread did between two samples of it --------------------------------------


def state_between(before: str, after: str) -> str:
    """Over the window: a process that waits for the disk only sometimes works."""
    if before == after or after in "TtZX":
        return after
    if "R" in (before, after):
        return "R"
    return before if after == "D" else after


def waits_between(before: ThreadSample, after: ThreadSample, window: float) -> float:
    """The share of the window in which it was ready to run and had no processor."""
    counted = (after.waited_seconds or 0.0) - (before.waited_seconds or 0.0)
    if before is not after and before.state == after.state == "R" and before.wakes == after.wakes:
        # The kernel counts a wait at its end, and it may have lasted for the whole window.
        counted = max(counted, window - (after.cpu_seconds - before.cpu_seconds))
    return min(1.0, rate(counted, window))


def rate(count: float, window: float) -> float:
    return round(max(0.0, count) / window, 3) if window > 0 else 0.0


def is_same_function(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> bool:
    """True if two stacks differ at most in the line of the innermost function."""
    if not one or len(one) != len(other) or list(one[1:]) != list(other[1:]):
        return False
    return all(one[0].get(name) == other[0].get(name) for name in ("file", "name"))


# -- Whether the cgroup of a process is frozen ----------------------------------------------------


def is_frozen(pid: int, root: str = "/") -> bool:
    """By version 1 or version 2, its own cgroup or one above."""
    root = root.rstrip("/")
    for version, controller in ((1, "freezer"), (2, "")):
        folder = find_folder(pid, version, controller, root)
        if folder is None:
            continue
        # Both files also show that a cgroup above is frozen.
        if version == 1 and (read_bytes(f"{folder}/freezer.state") or b"THAWED")[:6] != b"THAWED":
            return True
        if version == 2 and field(read_bytes(f"{folder}/cgroup.events") or b"", b"frozen ") == 1:
            return True
    return False
