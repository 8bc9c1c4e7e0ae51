"""The batch script that `holdfast submit` writes; it works with plain sbatch too.

The warning goes to the first process of each task. So srun starts the tasks, and that process is
`holdfast run`, which passes the warning on and survives a killed trainer. The shell gets SIGTERM as
well and must not die of it, or its last lines never run.

With `apptainer exec …` in the command, `holdfast run` stays outside of the container. Where srun
itself starts the container (`--container-image`), this interpreter's path does not exist in it, and
the image's own `holdfast` is used.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from holdfast._environment.slurm.job import says_where_to_meet, starts_torchrun
from holdfast._environment.slurm.options import batch_options, parse_signal, parse_time_limit
from holdfast._errors import TERMINATED, SettingsError
from holdfast._tools.lint.finding import SLACK_SECONDS

MARK = "# Written by holdfast submit"
LEAD_SECONDS = 120
_EXAMPLE = "holdfast submit --time=8:00:00 -- python train.py"
_HEEDED = ("USR1", "USR2", "TERM", "INT")
_APART = ("docker", "podman")  # their containers are no children of the command
_PLAIN = re.compile(r"[\w@%+=:,./^~\[\]-]+")


@dataclass(frozen=True)
class Script:
    text: str
    options: Mapping[str, str]  # by their long names, with all defaults
    notes: tuple[str, ...]


def write_script(
    words: Sequence[str], command: Sequence[str], *, python: str, lead_seconds: int | None = None
) -> Script:
    """The script for a command; `words` are options for sbatch as the user writes them.

    `python` is the interpreter whose `holdfast run` starts in each task.
    """
    lines = _option_lines(words)
    if not command:
        raise SettingsError(
            f"There is no command to submit.\nWrite it after --, for example: {_EXAMPLE}"
        )
    given = batch_options("\n".join(lines))
    if "wrap" in given:
        raise SettingsError(
            f"--wrap: holdfast writes the script itself.\nPut the command after --: {_EXAMPLE}"
        )
    if lead_seconds is not None and "signal" in given:
        raise SettingsError(
            "--lead and --signal both say how long before its end the job is warned.\n"
            "Give one of them; --lead 300 is --signal=USR2@300."
        )
    notes: list[str] = []
    for name, value in _defaults(given, command, lead_seconds, notes).items():
        lines.append(f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}")
    options = batch_options("\n".join(lines))
    notes += _options_that_hurt(options)
    notes += _commands_that_hurt(options, command)
    parts = [
        "#!/bin/bash\n" + "\n".join(lines),
        f"{MARK}. To submit it again: sbatch THIS-FILE",
        _SHELL,
        *_environment(options, command),
        _MARKER,
        _start(options, command, python),
        _REQUEUE.replace("TERMINATED", str(TERMINATED)),
        'exit "$status"\n',
    ]
    return Script("\n\n".join(parts), options, tuple(notes))


def call_sbatch(
    command: Sequence[str], script: str | None, remedy: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """sbatch gets the script by its standard input, and no file is left."""
    options |= {"encoding": "utf-8", "errors": "surrogateescape"}
    try:
        return subprocess.run(command, input=script, stdout=subprocess.PIPE, text=True, **options)
    except FileNotFoundError:
        what = "sbatch: there is no such program here."
        raise SettingsError(f"{what}\n{remedy}") from None


_SHELL = """\
# SLURM ends the job with SIGTERM to this shell, too. With a trap it lives until srun returns.
trap : TERM INT HUP USR1 USR2"""

_MARKER = """\
# Where a container has no scontrol, the run asks by this file to be started again: see the end.
export HOLDFAST_MARKER="$PWD/.holdfast-requeue-$SLURM_JOB_ID"
rm -f -- "$HOLDFAST_MARKER\""""

# The same decision as a run makes itself, for two cases in which it cannot: a run without
# scontrol, and a Python that SIGTERM has ended before there was a run.
_REQUEUE = """\
# The job is started again if it was interrupted, and never if it was cancelled.
wish=none
if [ -s "$HOLDFAST_MARKER" ]; then
    read -r wish < "$HOLDFAST_MARKER" # requeue or ask
    rm -f -- "$HOLDFAST_MARKER"
elif [ "$status" -eq TERMINATED ]; then
    wish=look # SIGTERM came before there was a run: preempted?
fi

may_come_back() {
    local facts=" ${1#* UserId=} " # without its name, which can be anything
    [[ $1 == "JobId=$SLURM_JOB_ID "* ]] || return 1
    # Else it is requeued already.
    [[ $facts == *" Restarts=${SLURM_RESTART_COUNT:-0} "* ]] || return 1
    case "$wish $facts" in
        *" JobState=CANCELLED "* | *" Requeue=0 "*) return 1 ;;
        "look "*" JobState=RUNNING "*" PreemptTime="[0-9]*) return 0 ;;
        "look "*) return 1 ;;
        *" Reason=TimeLimit "* | *" PreemptTime="[0-9]*) return 0 ;;
        *" JobState=COMPLETING "*) return 1 ;; # all that is to be seen of scancel
        "requeue "*) return 0 ;;
        *) return 1 ;;
    esac
}

start_again() {
    # By the number of its last task, a whole array would be requeued.
    local job=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} facts tries
    job=${job:-$SLURM_JOB_ID}
    # A controller can be away for a moment, and the job has nothing else to do: about a minute.
    for tries in {1..12}; do
        [ "$tries" -eq 1 ] || sleep 5
        facts=$(ask show job -o "$job") || continue
        may_come_back "$facts" || return
        ask requeue "$job" && return
    done
}

ask() {
    if command -v timeout > /dev/null; then timeout 10 scontrol "$@"; else scontrol "$@"; fi
}

[ "$wish" = none ] || start_again"""


def _option_lines(words: Sequence[str]) -> list[str]:
    lines: list[str] = []
    takes_value = False
    for word in words:
        if "\n" in word or "\0" in word:
            raise SettingsError(f"{word!r}: a line cannot hold this.\nLeave the line break out.")
        if word == ":":
            raise SettingsError(
                "A job of several different parts (with :) is not supported.\n"
                "Submit one kind of node: give the options of one part."
            )
        is_option = word.startswith("-") and not re.fullmatch(r"-\d+", word)
        if is_option:
            name, equals, value = word.partition("=")
            lines.append(f"#SBATCH {_quote(name)}{equals}{_quote(value)}")
            takes_value = not equals
        elif takes_value:
            lines[-1] += f" {_quote(word)}"
            takes_value = False
        else:
            raise SettingsError(
                f"{word!r} is not an option of sbatch.\nPut -- before the command: {_EXAMPLE}"
            )
    return lines


def _quote(text: str) -> str:
    """As sbatch reads it: a backslash and a quote are escaped by a backslash."""
    if not text or _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _defaults(
    given: Mapping[str, str], command: Sequence[str], lead_seconds: int | None, notes: list[str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    if "job-name" not in given:
        found["job-name"] = job_name(command)
    if "output" not in given:
        found["output"] = "logs/%x-%A_%a.out" if "array" in given else "logs/%x-%j.out"
    if "open-mode" not in given:
        found["open-mode"] = "append"  # else each attempt overwrites the log of the previous one
    if "requeue" not in given and "no-requeue" not in given:
        found["requeue"] = ""
    if "signal" not in given:
        limit, lead = parse_time_limit(given.get("time", "")), lead_seconds or LEAD_SECONDS
        if not lead_seconds and limit is not None and limit < 2 * LEAD_SECONDS + SLACK_SECONDS:
            lead = max(1, int(limit - SLACK_SECONDS) // 2)
            notes.append(
                f"--signal=USR2@{lead}: the limit of {limit:.0f} s is short, so the warning comes "
                f"later than the usual {LEAD_SECONDS} s before the end."
            )
        found["signal"] = f"USR2@{lead}"
    tasks = ("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core")
    if starts_torchrun(command) and not any(name in given for name in tasks):
        found["ntasks-per-node"] = "1"  # torchrun starts the ranks of a node
    return found


def job_name(command: Sequence[str]) -> str:
    """The name of the program, without its folder.

    >>> job_name(["torchrun", "--nproc-per-node=4", "src/train.py", "--data=x.py"])
    'train'
    >>> job_name(["python", "-m", "my.training", "--lr", "1"])
    'training'
    """
    for index, word in enumerate(command):
        if word == "-m" and index + 1 < len(command) and not starts_torchrun(command[index:][:2]):
            return _clean(command[index + 1].rpartition(".")[2])
        if word.endswith((".py", ".sh")) and not word.startswith("-"):
            return _clean(PurePath(word).stem)
    return _clean(PurePath(command[0]).name)


def _clean(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "job"


def _options_that_hurt(options: Mapping[str, str]) -> Iterator[str]:
    text = options["signal"]
    warning = parse_signal(text)
    if warning is not None and warning.to_batch:
        yield (
            f"--signal={text}: B: warns the script's shell alone, and the training never hears of "
            "it. Leave B: out."
        )
    elif warning is not None and warning.name not in _HEEDED:
        heeded = f"{', '.join(_HEEDED[:-1])} or {_HEEDED[-1]}"
        yield f"--signal={text}: holdfast stops at {heeded}. Leave it out, for USR2."
    limit = parse_time_limit(options.get("time", ""))
    if warning is not None and limit is not None and warning.seconds >= limit - SLACK_SECONDS:
        yield (
            f"--signal={text}: with a limit of {limit:.0f} s the warning can come before the "
            "training begins, and is lost then. "
            f"Choose less than {max(1, limit - SLACK_SECONDS):.0f} s."
        )
    if "no-requeue" in options:
        yield "--no-requeue: interrupted, the job ends and does not come back by itself."
    if (mode := options["open-mode"]).startswith("t"):
        yield f"--open-mode={mode}: each attempt erases the log of the previous one."
    if "no-kill" in options:
        yield (
            "--no-kill: when a node fails, the job keeps the others, and they wait for the lost "
            "ranks a minute before they leave."
        )


def _commands_that_hurt(options: Mapping[str, str], command: Sequence[str]) -> Iterator[str]:
    program = PurePath(command[0]).name
    if program in _APART:
        yield (
            f"{program}: what it starts is no part of the job, and neither signals nor limits "
            f"reach it. Use apptainer, or put the leader inside: {program} run … holdfast run -- …"
        )
    if program in ("srun", "sbatch", "mpirun", "mpiexec"):
        yield f"{program}: the script starts the tasks with srun already. Leave it out."
    if not starts_torchrun(command):
        return
    per_node, tasks = options.get("ntasks-per-node", "1"), options.get("ntasks", "1")
    if per_node != "1" or (tasks != options.get("nodes", "1") and "ntasks" in options):
        yield (
            "torchrun starts the ranks of a node itself, and each task starts a torchrun. "
            "Use --ntasks-per-node=1, and torchrun's --nproc-per-node."
        )
    if "cpus-per-task" not in options and "exclusive" not in options:
        yield (
            "torchrun's ranks share the processors of one task, which by default are few. "
            "Give --cpus-per-task=N, enough for all of them."
        )


def _environment(options: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """Variables that the tasks need and SLURM does not set."""
    found = [
        "# Of a job from which this one was submitted: these would make every rank a wrong one.\n"
        "unset HOLDFAST_LEADER HOLDFAST_LED HOLDFAST_RESTART HOLDFAST_HANG_TIMEOUT\n"
        "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    ]
    if "cpus-per-task" in options:
        found.append(
            "# Since SLURM 22.05, srun does not take this over from sbatch.\n"
            'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
        )
    if options.get("export", "ALL").partition(",")[0] != "ALL":
        found.append(
            "# --export was for this script; the tasks get what the script has.\n"
            "unset SLURM_EXPORT_ENV"
        )
    if starts_torchrun(command) and not says_where_to_meet(command):
        found.append(
            "# torchrun takes these for its flags: where its launchers meet, by a port of this "
            "job's own.\n"
            'if [ "${SLURM_JOB_NUM_NODES:-1}" -eq 1 ]; then\n'
            "    export PET_STANDALONE=1\n"
            "else\n"
            '    export PET_NNODES="$SLURM_JOB_NUM_NODES"\n'
            '    PET_MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            "    export PET_MASTER_ADDR PET_MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))\n"
            "fi"
        )
    return found


def _start(options: Mapping[str, str], command: Sequence[str], python: str) -> str:
    guard = 'trap "" USR1 USR2; '
    if starts_torchrun(command) and not says_where_to_meet(command):
        guard += 'export PET_NODE_RANK="$SLURM_NODEID"; '
    guard += 'exec "$@"'
    leader = [python, "-P", "-m", "holdfast"]
    if any(name.startswith("container") and name != "container" for name in options):
        leader = ["holdfast"]  # that of the image
    return (
        "# Each task is led by `holdfast run`, which outlives a trainer that is killed. A warning\n"
        "# that comes while Python starts is ignored, instead of killing it. One rank's end must\n"
        "# not have srun end the others: they save first.\n"
        "srun --kill-on-bad-exit=0 --wait=0 \\\n"
        f"    bash -c {shlex.quote(guard)} _ \\\n"
        f"    {shlex.join(leader)} run -- \\\n"
        f"    {shlex.join(command)}\n"
        "status=$?"
    )
