"""What the system around a training prints: shells, SLURM, the C++ runtime, the kernel, disks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from holdfast._diagnose.texts.lines import Line, Text
from holdfast._diagnose.texts.sign import Pattern, Sign, is_source_code, make_sign, pattern

_SIGNAL_WORDS = {
    "killed": ("killed_line", 9),
    "segmentation fault": ("segfault_line", 11),
    "bus error": ("bus_error", 7),
    "aborted": ("abort_line", 6),
    "illegal instruction": ("illegal_instruction_line", 4),
    "floating point exception": ("floating_point_line", 8),
    "terminated": ("terminated_line", 15),
    "hangup": ("terminated_line", 1),
    "quit": ("terminated_line", 3),
    "trace/breakpoint trap": ("trap_line", 5),
    "out of memory": ("slurm_oom", 9),
}
_WORDS = "|".join(word.capitalize() for word in _SIGNAL_WORDS if word != "out of memory")
# "train.sh: line 3:  4711 Killed      python train.py", "[1]+  Killed  python …", "Killed"
_SHELL = re.compile(
    rf"(?:\^[A-Z\\])*(?:(?P<script>[^:]{{1,200}}): line \d+: +|\[\d+\][+-]? +)?(?:(?P<pid>\d+) +)?"
    rf"(?P<what>{_WORDS})(?P<core>\s+\(core dumped\))?(?P<command>\s{{2,}}.*|)\s*"
)
_GLUED = re.compile(rf"[^:]{{1,200}}: line \d+: +(?P<pid>\d+) (?P<what>{_WORDS})(?P<command>.*)")
_ZSH = re.compile(
    r"(?:zsh: |\[\d+\] +[+-]? *(?P<pid>\d+) +)"
    r"(?P<what>killed|segmentation fault|abort|bus error|illegal hardware instruction|terminated)"
    r"(?P<core> +\(core dumped\))?(?P<command>\s{2,}.*|)\s*"
)
_SRUN = re.compile(
    r"srun: error: (?P<node>[^:\s]+): tasks? (?P<tasks>[\d,\-]+): (?P<what>.+?)"
    r"(?P<core> \(core dumped\))?\s*$"
)
_CANCELLED = re.compile(
    r"\*\*\* (?P<what>JOB|STEP) (?P<id>[\w.+\[\]-]+) ON (?P<node>\S+) CANCELLED AT (?P<at>\S+)"
    r"(?P<why> DUE (?:TO|to) .*?)?(?:, SEE [^*]*)? \*\*\*"
)
_TERMINATE = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']*)'")
_KERNEL_KILL = re.compile(
    r"Killed process (?P<pid>\d+) \((?P<comm>[^)]*)\)(?:.*?anon-rss:(?P<rss>\d+)kB)?"
    r"(?:.*?shmem-rss:(?P<shmem>\d+)kB)?"
)


def _kernel(match: re.Match[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key in (("rss", "rss_bytes"), ("shmem", "shmem_bytes")):
        if match[name] is not None:
            found[key] = int(match[name][:15]) * 1024
    found["of_cgroup"] = "Memory cgroup out of memory" in match.string
    return found


def _number_of(match: re.Match[str]) -> dict[str, Any] | None:
    number = {"SIGABRT": 6, "SIGSEGV": 11, "SIGBUS": 7, "SIGILL": 4, "SIGFPE": 8, "SIGTERM": 15}
    found = number.get(match["_name"])
    return {"signal": found} if found is not None else None


SYSTEM: tuple[Pattern, ...] = (
    # SLURM
    pattern("slurm_oom", "oom_kill event",
            r"Detected (?P<count>\d+) oom_kill events? in (?:StepId=|step )?(?P<step>[\w.+]*)"),
    pattern("slurm_oom", "oom-kill event",
            r"Detected (?P<count>\d+) oom-kill event\(s\) in (?:StepId=|step )?(?P<step>[\w.+]*)"),
    pattern("slurm_oom", "xceeded job memory limit",
            r"(?:slurm|srun|step|Job)\S*.*xceeded job memory"),
    pattern("slurm_oom", "exceeded memory limit",
            r"(?:JobId|StepId|Job|Step)\S* ?\S* exceeded memory limit"
            r" \((?P<used>\d+) > (?P<limit>\d+)\)"),
    pattern("slurm_node_fail", "Node failure on ", r"srun: error: Node failure on (?P<node>\S+)"),
    pattern("slurm_node_fail", "error: Aborting, io error and missing step on node"),
    pattern("slurm_refused", "error: ",
            r"(?:sbatch|srun|salloc): error: (?:Batch job submission failed"
            r"|Unable to allocate resources|Unable to create step for job|Invalid generic resource)"
            r"[^\n]*"),
    pattern("slurm_refused", "execve(): ", r"slurmstepd: error: execve\(\): [^\n]*"),
    # PBS and LSF
    pattern("slurm_time_limit", "PBS: job killed: walltime"),
    pattern("slurm_oom", "PBS: job killed: ", r"PBS: job killed: (?:v?mem|pmem|pvmem)\b.*exceeded"),
    pattern("slurm_time_limit", "TERM_RUNLIMIT"),
    pattern("slurm_oom", "TERM_MEMLIMIT"),
    pattern("slurm_cancelled", "TERM_OWNER"),
    # Grid Engine and YARN
    pattern("slurm_oom", "exceeds job hard limit",
            r'exceeds job \w+ limit "[hs]_(?:vmem|rss|data)"'),
    pattern("slurm_time_limit", "exceeds job hard limit",
            r'exceeds job \w+ limit "[hs]_(?:rt|cpu)"'),
    pattern("slurm_oom", "physical memory limit", r"killed by YARN for exceeding physical memory"),
    pattern("slurm_oom", "'PHYSICAL' memory limit"),
    # Kubernetes
    pattern("slurm_oom", "OOMKilled", r"(?:[Rr]eason\W+|STATUS.*|^|\d/\d +)OOMKilled"),
    pattern("slurm_oom", "killed by the OOM killer", r"systemd.*killed by the OOM killer"
            r"|A process of this unit has been killed by the OOM killer"),
    pattern("slurm_oom", "with result 'oom-kill'"),
    pattern("disk_full", "low on resource: ephemeral-storage"),
    pattern("disk_full", "ephemeral local storage usage exceeds"),
    pattern("disk_full", "exceeds the limit", r"Usage of EmptyDir volume .* exceeds the limit"),
    pattern("disk_full", "DiskPressure", r"The node had condition: \[DiskPressure\]"),
    pattern("host_oom", "low on resource: memory"),
    pattern("host_oom", "MemoryPressure", r"The node had condition: \[MemoryPressure\]"),
    pattern("slurm_preempted", "TaintManagerEviction"),
    pattern("slurm_preempted", "Preempted by ", r"Preempted\s.*Preempted by "),
    # coreutils' timeout -v
    pattern("timed_out_line", "timeout: sending signal ",
            r"timeout: sending signal (?P<signal_name>\w+) to command"),
    pattern("slurm_preempted", "compute.instances.preempted"),
    pattern("slurm_preempted", "instance preempted"),
    pattern("slurm_preempted", "pot interruption ",
            r"[Ss]pot (?:instance )?interruption (?:notice|warn)"),
    # torchrun's agent, Lightning, and absl's handler of signals
    pattern("terminated_line", "got signal: ",
            r"SignalException: Process \d+ got signal: (?P<signal>\d+)"),
    pattern("terminated_line", "SIGTERMException", r"^(?:[\w.]+\.)?SIGTERMException$", signal=15),
    pattern("abort_line", "*** SIG", r"\*\*\* (?P<_name>SIG[A-Z]+) received (?:by PID|at time)",
            more=_number_of),
    # C++ and libc
    pattern("cxx_exception", "terminating due to uncaught exception of type ",
            r"terminating due to uncaught exception of type (?P<type>.+?)(?:: (?P<what>.*))?$"),
    pattern("cxx_exception", "terminating with uncaught exception of type ",
            r"terminating with uncaught exception of type (?P<type>.+?)(?:: (?P<what>.*))?$"),
    pattern("heap_damage", "double free or corruption"),
    pattern("heap_damage", "corrupted size vs. prev_size"),
    pattern("heap_damage", "free(): invalid", r"free\(\): invalid (?:pointer|size|next size)"),
    pattern("heap_damage", "malloc(): ",
            r"malloc\(\): (?:corrupted|invalid|memory corruption)[^\n]*"),
    pattern("heap_damage", "*** stack smashing detected ***"),
    # The kernel's log, where it is part of the text
    pattern("kernel_oom", "Killed process ", _KERNEL_KILL.pattern, more=_kernel),
    pattern("kernel_segfault", "segfault at ",
            r"(?P<comm>[^\[\s]+)\[(?P<pid>\d+)\]: segfault at (?P<address>\w+)"
            r".*?(?: in (?P<library>[^\s\[]+))?(?:\[|$)"),
    # The same on ARM.
    pattern("kernel_segfault", "unhandled exception: ",
            r"(?P<comm>[^\[\s]+)\[(?P<pid>\d+)\]: unhandled exception: [DI]ABT"
            r".*(?:translation|permission) fault(?: in (?P<library>[^\s\[]+))?"),
    pattern("kernel_trap", "traps: ",
            r"traps: (?P<comm>[^\[\s]+)\[(?P<pid>\d+)\] (?:trap )?(?P<what>[a-z][a-z ]+?)"
            r"(?= ip:| rip:|$)"),
    # Disks
    pattern("quota", "Disk quota exceeded"),
    pattern("disk_full", "No space left on device",
            r"^(?!.*(?:/dev/shm|</torch_\d+|shared memory)).*No space left on device"),
    pattern("read_only", "Read-only file system",
            r"(?:Errno 30\]|error|cannot).*Read-only file system"),
    pattern("io_error", "[Errno 5] Input/output error"),
    pattern("stale_handle", "Stale file handle",
            r"(?:Errno 116\]|error|cannot).*Stale file handle"),
    # What a machine lacks
    pattern("environment", "No module named ",
            r"(?:ModuleNotFoundError: |: )No module named '?(?P<name>[\w.]+)", what="no_module"),
    pattern("environment", "cannot open shared object file",
            r"(?P<name>[\w.+-]+\.so[\w.]*): cannot open shared object file", what="no_library"),
    pattern("environment", "' not found (required by ",
            r"version `(?P<name>[\w.]+)' not found \(required by", what="old_libc"),
    pattern("environment", "undefined symbol: ",
            r"\.so[\w.]*: undefined symbol: (?P<name>\w+)", what="wrong_library"),
    pattern("environment", ": can't open file '",
            r"python[\w.]*: can't open file '(?P<name>[^']*)'", what="no_script"),
    pattern("environment", "Exec format error", r"cannot execute[^\n]*: Exec format error",
            what="wrong_processor"),
    pattern("environment", "OCI runtime create failed", what="container"),
    pattern("environment", "couldn't start container", what="container"),
    pattern("environment", "module(s) are unknown", what="module"),
    pattern("environment", "Unable to locate a modulefile for", what="module"),
    pattern("environment", "container creation failed", r"FATAL: .*container creation failed.*",
            what="container"),
    pattern("environment", "ImagePull", r"\b(?:ImagePullBackOff|ErrImagePull)\b", what="container"),
    pattern("environment", "CreateContainerConfigError", what="container"),
    pattern("environment", "Insufficient nvidia.com/gpu", what="no_gpu"),
    pattern("environment", "not enough slots available in the system", what="slots"),
    pattern("environment", "pthread_create failed", what="threads"),
    pattern("environment", ": command not found",
            r"(?:line \d+|bash|zsh|sh): (?P<name>[^:]+): command not found", what="no_command"),
    # holdfast's own words
    pattern("holdfast_stop", "; leaving with status ",
            r"holdfast: .*; leaving with status (?P<status>\d+) \((?P<reason>.*?)\)"),
    pattern("holdfast_stop", "holdfast: leaving at once (",
            r"holdfast: leaving at once \((?P<reason>.*?)\): .*Status (?P<status>\d+)"),
    pattern("holdfast_start", " (attempt ", r"holdfast: .* \(attempt (?P<attempt>\d+)[^)]*\)\.$"),
    pattern("holdfast_start", "holdfast: starting it again"),
    pattern("holdfast_finished", "; the last checkpoint is durable.",
            r"holdfast: .*trained to step (?P<step>\d+)"),
    # The last words of other trainers
    pattern("holdfast_finished", "`Trainer.fit` stopped: `max_",
            r"`Trainer.fit` stopped: `max_(?:epochs|steps)=(?P<step>\d+)` reached"),
    pattern("holdfast_finished", "'train_runtime': ", r"\{'train_runtime': [\d.']+"),
)  # fmt: skip


def read_system(text: Text) -> Iterator[Sign]:
    """What takes more than one line, or stands on one alone."""
    for word in (*_SIGNAL_WORDS, "abort"):
        for spelled in {word, word.capitalize()} - {"out of memory", "Out of memory"}:
            for line in text.hits(spelled):
                sign = _shell(line)
                if sign is not None:
                    yield sign
    for line in text.hits("srun: error: "):
        yield from _srun(line)
    for line in text.hits(" CANCELLED AT "):
        sign = _cancelled(line)
        if sign is not None:
            yield sign
    for line in text.hits("terminate called after throwing"):
        yield _terminate(text, line)


def _shell(line: Line) -> Sign | None:
    """A shell that tells of what a command died; prose with the same words has more words."""
    if is_source_code(line.text, 0) or len(line.text) > 2000:
        return None
    said = line.text.strip()
    match = _SHELL.fullmatch(said) or _ZSH.fullmatch(said) or _GLUED.fullmatch(said)
    if match is None:
        return None
    word = match["what"].lower().replace(" hardware", "")
    kind, number = _SIGNAL_WORDS.get(word, _SIGNAL_WORDS["aborted"])
    named = match.groupdict()
    details: dict[str, Any] = {"signal": number}
    if named.get("pid"):
        details["pid"] = int(named["pid"][:9])
    command = (named.get("command") or "").replace("(core dumped)", "").strip()
    if command:
        details["command"] = command[:300]
    return make_sign(kind, line, details)


def _srun(line: Line) -> Iterator[Sign]:
    match = _SRUN.search(line.text)
    if match is None:
        return
    first = re.match(r"\d+", match["tasks"])
    rank = int(first[0][:9]) if first else None
    details: dict[str, Any] = {"node": match["node"], "tasks": match["tasks"]}
    what = match["what"].lower()
    if exited := re.fullmatch(r"exited with exit code (\d+)", what):
        yield make_sign("srun_exit", line, {**details, "exitcode": int(exited[1][:9])}, rank)
    elif what in _SIGNAL_WORDS:
        kind, number = _SIGNAL_WORDS[what]
        yield make_sign(kind, line, {**details, "signal": number}, rank)


def _cancelled(line: Line) -> Sign | None:
    match = _CANCELLED.search(line.text)
    if match is None:
        return None
    why = (match["why"] or "").upper()
    details: dict[str, Any] = {
        "what": match["what"].lower(),
        "id": match["id"],
        "node": match["node"],
        "at": match["at"],
    }
    if "TIME LIMIT" in why:
        kind = "slurm_time_limit"
    elif "PREEMPT" in why:
        kind = "slurm_preempted"
    elif "NODE FAIL" in why:
        kind = "slurm_node_fail"
    elif "REQUEUE" in why:
        kind = "slurm_requeued"
    elif match["what"] == "STEP" and not why:
        # So ends every step of which a task failed; of a job that somebody cancelled, the job does.
        kind = "slurm_step_cancelled"
    else:
        kind = "slurm_cancelled"
        if signal := re.search(r"SIGNAL (\w+)", why):
            details["signal_name"] = signal[1].capitalize()
    return make_sign(kind, line, details, None)


def _terminate(text: Text, line: Line) -> Sign:
    match = _TERMINATE.search(line.text)
    what = ""
    for other in text.from_same(line, 3):
        if other.text.strip().startswith("what():"):
            what = other.text.strip().removeprefix("what():").strip()
            break
    # NCCL's watchdog names its rank in there.
    named = re.search(r"\[(?:PG [^\]]{0,80})?Rank (\d{1,6})\]", what)
    details = {"type": match["type"] if match else "", "what": what}
    return make_sign("cxx_exception", line, details, int(named[1]) if named else None)
