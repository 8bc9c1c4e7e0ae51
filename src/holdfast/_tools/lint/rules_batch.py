"""What the batch shell does with a signal, with its children and with their status."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest

from holdfast._tools.lint.finding import (
    ERROR,
    HINT,
    WARNING,
    Edit,
    Finding,
    guard_step,
    note,
    set_value,
    share_by_srun,
    signal_value,
    start_by_srun,
)
from holdfast._tools.lint.job import Job, Trap
from holdfast._tools.lint.launch import OTHER, Launch
from holdfast._tools.lint.rules_requeue import does_anything, submits
from holdfast._tools.lint.shell import Command

_LATE_SECONDS = 30
_TAKES_TIME = frozenset(["sleep", "tail", "fg", "wait", "inotifywait", "jobs", "read", "srun"])
_KEEPS_STATUS = re.compile(r"\$\?|PIPESTATUS|pipefail")


def check_batch(job: Job) -> Iterator[Finding]:
    """All rules about the batch shell."""
    found = job.signal
    if not job.is_understood:
        return
    yield from check_background(job)
    yield from check_status(job)
    if found is not None and found.to_batch:
        traps = [trap for trap in job.traps if found.name in trap.signals]
        yield from check_signal_to_batch(job, traps)


def check_signal_to_batch(job: Job, traps: list[Trap]) -> Iterator[Finding]:
    found = job.signal
    assert found is not None
    launches = [launch for launch in job.trainings or job.unseen if not launch.is_exec]
    if not launches:
        return
    if not traps:
        yield from _kills_shell(job, launches)
        return
    trap = traps[-1]
    if trap.ignores:
        yield note(
            job,
            "signal-ignored",
            ERROR,
            trap.command.start,
            f"B: sends SIG{found.name} to bash alone, which ignores it: nobody hears the warning.",
            edits=_send_to_steps(job, launches),
            corrected=_shared(job, launches),
        )
        return
    foreground = [launch for launch in launches if not launch.command.is_background]
    for launch in foreground:
        yield from _waits_for_foreground(job, trap, launch)
    if not foreground:
        for launch, following in zip_longest(launches, launches[1:]):
            yield from _waits_once(job, trap, launch, following)
        yield from _does_not_forward(job, trap, launches)


def _kills_shell(job: Job, launches: list[Launch]) -> Iterator[Finding]:
    found, option = job.signal, job.option("signal")
    assert found is not None
    assert option is not None
    if found.name in ("CONT", "URG") or _is_named_elsewhere(job, found.name):
        return
    yield note(
        job,
        "signal-kills-shell",
        WARNING if job.reads_other_scripts() else ERROR,
        option.start,
        f"B: sends SIG{found.name} to bash alone, which has no trap for it and dies: the job fails "
        f"{found.seconds} to {found.seconds + _LATE_SECONDS} s before its limit, and "
        f"{launches[-1].name} is killed with it.",
        edits=_send_to_steps(job, launches),
        corrected=_shared(job, launches),
    )


def _is_named_elsewhere(job: Job, name: str) -> bool:
    """Whether a command that we do not know gets the signal's name: it may set the trap."""
    return any(
        word.text.strip("'\"").removeprefix("SIG") == name
        for command in job.commands
        if command.text not in ("trap", "kill", "scancel")
        for word in command.words[1:]
    )


def _send_to_steps(job: Job, launches: list[Launch]) -> list[Edit]:
    found, option = job.signal, job.option("signal")
    assert found is not None
    assert option is not None
    edits = [set_value(option, signal_value(job, to_batch=False))]
    for launch in launches:
        if launch.is_step:
            edits += guard_step(job, launch, found.name)
            continue
        start = start_by_srun(job, launch, found.name) if launch.kind != OTHER else []
        if not start:
            return []
        edits += start
    return edits


def _shared(job: Job, launches: list[Launch]) -> list[str]:
    bare = [launch for launch in launches if not launch.is_step]
    lines = dict.fromkeys(line for launch in bare for line in share_by_srun(job, launch))
    right = f"#SBATCH --signal={signal_value(job, to_batch=False)}"
    return [right, *lines] if lines else []


def _waits_for_foreground(job: Job, trap: Trap, launch: Launch) -> Iterator[Finding]:
    found = job.signal
    assert found is not None
    command = launch.command
    written = job.text[command.start : command.end]
    line = job.text.rfind("\n", 0, command.start) + 1
    before = job.text[line : command.start]
    can_move = (
        command.after in ("\n", ";") and not command.before and not command.is_piped
        and "(" not in command.within and command.function is None and not command.is_timed
        and not before.rstrip().endswith(("if", "while", "until", "!"))
    )  # fmt: skip
    edits: list[Edit] = []
    corrected = [f"{written} &", 'wait "$!" || wait "$!"']
    if submits(trap):
        # A second wait would have the trap submit a second job, at SIGTERM; and the training would
        # go on beside its successor.
        corrected = [f"{written} &", "trainer=$!", 'wait "$trainer"', _hand_over(job)]
    elif can_move and (launch.kind != OTHER or does_anything(trap)):
        indent = before if not before.strip() else ""
        waiting = f' &\n{indent}trainer=$!\n{indent}wait "$trainer" || wait "$trainer"'
        edits = [Edit(command.end, command.end, waiting)]
        if not does_anything(trap):
            edits = [*_forward(job, trap, '"$trainer"'), *edits]
    yield note(
        job,
        "trap-waits-for-command",
        WARNING if launch.kind == OTHER else ERROR,
        command.start,
        f"the trap for SIG{found.name} in line {job.line_of(trap.command.start)} never runs in "
        f"time: bash runs it when the command in the foreground has ended, and that is killed at "
        "the limit.",
        edits=edits,
        corrected=[] if edits else corrected,
    )


def _hand_over(job: Job) -> str:
    """A trap that submits the next job once, and when this one has saved."""
    found = job.signal
    assert found is not None
    name = found.name
    return (
        f'trap \'trap "" {name} TERM; kill -{name} "$trainer"; wait "$trainer"; sbatch …\' {name}'
    )


def _forward(job: Job, trap: Trap, pid: str) -> list[Edit]:
    found = job.signal
    assert found is not None
    word = next(w for w in trap.command.words[1:] if w.text != "--")
    send = f"kill -{found.name} {pid}"
    if word.text[:1] == "'":
        return [Edit(word.start + 1, word.start + 1, f"{send}; ")]
    if word.text[:1] == '"':
        escaped = send.replace('"', '\\"').replace("$", "\\$")
        return [Edit(word.start + 1, word.start + 1, f"{escaped}; ")]
    return [Edit(word.start, word.end, f"'{send}; {word.text}'")]


def _waits_once(
    job: Job, trap: Trap, launch: Launch, following: Launch | None
) -> Iterator[Finding]:
    found = job.signal
    assert found is not None
    end = len(job.text) if following is None else following.command.start
    waits = [
        command
        for command in job.commands
        if command.text == "wait" and launch.command.start < command.start < end
        and command.function is None
    ]  # fmt: skip
    if len(waits) != 1 or re.search(r"\bwait\b", trap.handler):
        return
    if re.search(r"\bexit\b", trap.handler):
        yield from _leaves_early(job, trap, launch)
        return
    if not does_anything(trap) or any(kind in ("while", "until") for kind in waits[0].within):
        return
    if "scontrol requeue" in trap.handler and launch.is_step:
        return  # whatever comes after the trap, the job ends and comes back
    wait = waits[0]
    written = job.text[wait.start : wait.end]
    later = [c for c in job.commands if c.start > wait.end and c.function is None]
    if wait.after not in ("\n", ";") or any(c.text in ("while", "until") for c in later):
        return
    # A second wait would have the trap submit a second job, at SIGTERM.
    is_once = submits(trap)
    yield note(
        job,
        "wait-ends-early",
        ERROR,
        wait.start,
        f"SIG{found.name} ends this wait with status {found.status} as soon as the trap has run: "
        f"the script goes on to its end, and {launch.name} is killed while it saves.",
        edits=[] if is_once else [Edit(wait.end, wait.end, f" || {written}")],
        corrected=[_hand_over(job)] if is_once else [],
    )


def _leaves_early(job: Job, trap: Trap, launch: Launch) -> Iterator[Finding]:
    """A handler that leaves never comes back to the wait."""
    if not re.search(r"\bkill\b", trap.handler) or re.search(r"sleep|requeue", trap.handler):
        return
    found = job.signal
    assert found is not None
    yield note(
        job,
        "wait-ends-early",
        WARNING,
        trap.command.start,
        f"the trap passes SIG{found.name} on and leaves at once: the job is over, and "
        f"{launch.name} is killed while it saves.",
        corrected=[f'trap \'kill -{found.name} "$pid"; wait "$pid"; exit\' {found.name}'],
    )


def _does_not_forward(job: Job, trap: Trap, launches: list[Launch]) -> Iterator[Finding]:
    found = job.signal
    assert found is not None
    if not does_anything(trap):
        yield note(
            job,
            "trap-does-not-forward",
            ERROR,
            trap.command.start,
            f"the trap does not pass SIG{found.name} on: the training never hears of it.",
            edits=_forward(job, trap, '"$!"' if len(launches) == 1 else "$(jobs -p)"),
        )
        return
    if "scontrol requeue" not in trap.handler or re.search(
        r"\bkill|scancel|\btouch\b|>", trap.handler
    ):  # fmt: skip
        return
    for launch in launches:
        if not launch.is_step:
            yield note(
                job,
                "trap-does-not-forward",
                ERROR,
                launch.command.start,
                f"scontrol requeue sends SIGTERM to bash and to the tasks of srun: {launch.name} "
                "is none, and is killed without a word.",
                # The warning itself goes to bash.
                edits=start_by_srun(job, launch, "") if launch.kind != OTHER else [],
                corrected=share_by_srun(job, launch),
            )


def check_background(job: Job) -> Iterator[Finding]:
    """A job is over when its script is, whatever still runs."""
    for launch in job.trainings:
        command = launch.command
        if not command.is_background:
            continue
        later = [c for c in job.commands if c.start > command.start]
        if any(c.text in _TAKES_TIME for c in job.commands if c.start > command.start):
            return
        if any(c.text == "wait" for c in job.commands) or any(
            kind in ("while", "until") for c in later for kind in c.within
        ):
            return
        if any(each.command in later and not each.command.is_background for each in job.launches):
            return
        if job.text.rstrip().endswith("\nwait"):
            return  # It is there, behind words that bash does not read, such as a stray `;;`.
        end = len(job.text)
        newline = "" if job.text.endswith("\n") else "\n"
        yield note(
            job,
            "wait-missing",
            ERROR,
            command.start,
            f"the script goes on to its end and the job is over: {launch.name} is killed within "
            "a second of its start.",
            edits=[Edit(end, end, f"{newline}wait\n")],
        )
        return


def check_status(job: Job) -> Iterator[Finding]:
    """An interrupted training must not end as COMPLETED."""
    if not job.is_training:
        return
    for launch in job.trainings[-1:]:
        command = launch.command
        later = [
            c for c in job.commands if c.start > command.end and c.function == command.function
        ]
        hides = "a training that is interrupted ends as COMPLETED: SLURM and whoever waits for "
        hides += "the job take it for done."
        if command.after == "||" and later and _is_nothing(later[0]):
            end = later[0].end
            yield note(
                job, "status-hidden", WARNING, command.start, hides,
                edits=[Edit(command.end, end, "")],
            )  # fmt: skip
            return
        last = later[-1] if later else None
        is_exit = last is not None and [w.text for w in last.words] == ["exit", "0"]
        between = job.text[command.end : last.start] if last is not None else ""
        if _KEEPS_STATUS.search(job.text) or _stops_at_errors(job):
            continue
        if last is not None and is_exit and not last.is_conditional and not last.within:
            if command.is_background or command.function is not None:
                continue
            is_next = not re.sub(r"[;\s]", "", between) and not command.is_piped
            yield note(
                job, "status-hidden", WARNING, last.start, hides,
                edits=[Edit(last.words[1].start, last.words[1].end, "$?")] if is_next else [],
                corrected=[] if is_next else ["status=$?   (right behind the training)",
                                              'exit "$status"'],
            )  # fmt: skip
        elif command.is_piped and not launch.is_exec:
            yield note(
                job, "status-hidden", HINT, command.start,
                "the job's status is that of the last command in the pipe: " + hides,
                corrected=["set -o pipefail"],
            )  # fmt: skip


def _stops_at_errors(job: Job) -> bool:
    """Whether `set -e` ends the script with the training's own status."""
    options = [
        word.text for command in job.commands if command.text == "set" for word in command.words[1:]
    ]
    first = job.text.partition("\n")[0]
    return any(re.fullmatch(r"-\w*e\w*|errexit", word) for word in options) or " -e" in first


def _is_nothing(command: Command) -> bool:
    texts = [word.text for word in command.words]
    return texts in (["true"], [":"], ["exit", "0"])
