"""The batch shell: what it does with a signal, with its children and their status; its requeues."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from holdfast import _text
from holdfast._environment.slurm.options import Option, WarningSignal
from holdfast._errors import REQUEUE
from holdfast._tools.lint.finding import (
    Edit,
    LintFinding,
    before_the_limit,
    set_value,
    signal_value,
)
from holdfast._tools.lint.job import BatchScript, Trap
from holdfast._tools.lint.launch import OTHER, Launch
from holdfast._tools.lint.rules_launch import guard_step, share_by_srun, start_by_srun
from holdfast._tools.lint.shell import Command

_TAKES_TIME = frozenset(["sleep", "tail", "fg", "wait", "inotifywait", "jobs", "read", "srun"])
_KEEPS_STATUS = re.compile(r"\$\?|PIPESTATUS|pipefail")


def check_batch(job: BatchScript) -> Iterator[LintFinding]:
    if not job.is_understood:
        return
    yield from _check_background(job)
    yield from _check_status(job)
    yield from _check_missing_trap(job)
    if job.option("array") is not None:
        yield from _check_array(job)
    for trap in job.traps:
        if "scontrol requeue" in re.sub(r"\s+", " ", trap.handler) or _submits(trap):
            yield from _check_trap(job, trap)
    yield from _check_unconditional(job)
    option, warning = job.option("signal"), job.signal
    if option is None or warning is None:
        return
    if warning.to_batch:
        yield from _SignalToBatch(job, option, warning).check()
        return
    traps = [trap for trap in job.traps if warning.name in trap.signals and not trap.ignores]
    if traps and job.trainings and _does_anything(traps[-1]):
        yield _never_runs(job, traps[-1], option, warning)


@dataclass(frozen=True)
class _SignalToBatch:
    """The rules for `--signal=B:…`, which goes to the batch shell alone."""

    _job: BatchScript
    _option: Option
    _warning: WarningSignal

    @property
    def _name(self) -> str:
        return f"SIG{self._warning.name}"

    def check(self) -> Iterator[LintFinding]:
        job = self._job
        traps = [trap for trap in job.traps if self._warning.name in trap.signals]
        launches = [launch for launch in job.trainings or job.unseen if not launch.is_exec]
        if not launches:
            return
        if not traps or traps[-1].ignores:
            yield from self._is_lost(traps, launches)
            return
        trap = traps[-1]
        foreground = [launch for launch in launches if not launch.command.is_background]
        for launch in foreground:
            yield self._waits_for_foreground(trap, launch)
        if not foreground:
            for launch, following in zip_longest(launches, launches[1:]):
                yield from self._waits_once(trap, launch, following)
            yield from self._does_not_forward(trap, launches)

    def _is_lost(self, traps: list[Trap], launches: list[Launch]) -> Iterator[LintFinding]:
        """The shell ignores the signal, or has no trap for it and dies."""
        job, text = self._job, f"B: sends {self._name} to bash alone, which "
        if traps:
            rule, severity, at = "signal-ignored", "error", traps[-1].command.start
            text += "ignores it: the warning is lost."
        elif self._warning.name in ("CONT", "URG") or self._is_named_elsewhere():
            return
        else:
            rule, severity, at = "signal-kills-shell", "error", self._option.start
            severity = "warning" if job.reads_other_scripts() else "error"
            text += "has no trap for it and dies: "
            text += f"{launches[-1].name} is killed with it, {before_the_limit(self._warning)}."
        bare = [launch for launch in launches if not launch.is_step]
        shared = dict.fromkeys(line for each in bare for line in share_by_srun(job, each))
        right = f"#SBATCH --signal={signal_value(self._option, self._warning, to_batch=False)}"
        edits, lines = self._send_to_steps(launches), [right, *shared] if shared else []
        yield job.report(rule, severity, at, text, edits=edits, corrected=lines)

    def _is_named_elsewhere(self) -> bool:
        """Whether a command of unknown effect has the signal's name: it may set the trap."""
        return any(
            word.text.strip("'\"").removeprefix("SIG") == self._warning.name
            for command in self._job.commands
            if command.text not in ("trap", "kill", "scancel")
            for word in command.words[1:]
        )

    def _send_to_steps(self, launches: list[Launch]) -> list[Edit]:
        value = signal_value(self._option, self._warning, to_batch=False)
        edits = [set_value(self._option, value)]
        for launch in launches:
            if launch.is_step:
                edits += guard_step(self._job, launch, self._warning.name)
            elif start := start_by_srun(self._job, launch, self._warning.name):
                edits += start
            else:
                return []
        return edits

    def _waits_for_foreground(self, trap: Trap, launch: Launch) -> LintFinding:
        job, command = self._job, launch.command
        written = job.text[command.start : command.end]
        line = job.text.rfind("\n", 0, command.start) + 1
        before = job.text[line : command.start]
        can_move = (
            command.after in ("\n", ";") and not command.before and not command.is_piped
            and "(" not in command.within and command.function is None and not command.is_timed
            and not before.rstrip().endswith(("if", "while", "until", "!"))
            and written.count("`") % 2 == 0  # one that is not closed takes all that follows
        )  # fmt: skip
        edits: list[Edit] = []
        corrected = [f"{written} &", 'wait "$!" || wait "$!"']
        if _submits(trap):
            # With a second wait, the trap would submit a second job at SIGTERM, and the training
            # would run at the same time as the next job.
            corrected = [f"{written} &", "trainer=$!", 'wait "$trainer"', self._hand_over()]
        elif can_move and (launch.kind != OTHER or _does_anything(trap)):
            indent = before if not before.strip() else ""
            waiting = f' &\n{indent}trainer=$!\n{indent}wait "$trainer" || wait "$trainer"'
            edits = [Edit(command.end, command.end, waiting)]
            if not _does_anything(trap):
                edits = [self._forward(trap, '"$trainer"'), *edits]
        text = (
            f"the trap for {self._name} in line {job.line_of(trap.command.start)} runs too late: "
            "bash runs it when the command in the foreground has ended."
        )
        rule, severity = "trap-waits-for-command", "warning" if launch.kind == OTHER else "error"
        lines = [] if edits else corrected
        return job.report(rule, severity, command.start, text, edits=edits, corrected=lines)

    def _hand_over(self) -> str:
        """A trap that submits the next job once, and after this one has saved."""
        name = self._warning.name
        send = f'trap "" {name} TERM; kill -{name} "$trainer"; wait "$trainer"; sbatch …'
        return f"trap '{send}' {name}"

    def _forward(self, trap: Trap, pid: str) -> Edit:
        word = next(w for w in trap.command.words[1:] if w.text != "--")
        send = f"kill -{self._warning.name} {pid}"
        if word.text[:1] == "'":
            return Edit(word.start + 1, word.start + 1, f"{send}; ")
        if word.text[:1] == '"':
            escaped = send.replace('"', '\\"').replace("$", "\\$")
            return Edit(word.start + 1, word.start + 1, f"{escaped}; ")
        return Edit(word.start, word.end, f"'{send}; {word.text}'")

    def _waits_once(
        self, trap: Trap, launch: Launch, following: Launch | None
    ) -> Iterator[LintFinding]:
        job = self._job
        end = len(job.text) if following is None else following.command.start
        own = [c for c in job.commands if c.function is None]
        waits = [c for c in own if c.text == "wait" and launch.command.start < c.start < end]
        if len(waits) != 1 or re.search(r"\bwait\b", trap.handler):
            return
        if re.search(r"\bexit\b", trap.handler):
            yield from self._leaves_early(trap, launch)
            return
        wait = waits[0]
        if not _does_anything(trap) or any(kind in ("while", "until") for kind in wait.within):
            return
        if "scontrol requeue" in trap.handler and launch.is_step:
            return  # the job ends and comes back, whatever the script does next
        later = [c for c in own if c.start > wait.end]
        if wait.after not in ("\n", ";") or any(c.text in ("while", "until") for c in later):
            return
        text = (
            f"{self._name} ends this wait with status {self._warning.status} after the trap: the "
            f"script goes on to its end, and {launch.name} is killed while it saves."
        )
        edits, lines = [Edit(wait.end, wait.end, f" || {job.text[wait.start : wait.end]}")], []
        if _submits(trap):
            # With a second wait, the trap would submit a second job at SIGTERM.
            edits, lines = [], [self._hand_over()]
        yield job.report("wait-ends-early", "error", wait.start, text, edits=edits, corrected=lines)

    def _leaves_early(self, trap: Trap, launch: Launch) -> Iterator[LintFinding]:
        """A handler that leaves never returns to the wait."""
        if not re.search(r"\bkill\b", trap.handler) or re.search(r"sleep|requeue", trap.handler):
            return
        text = (
            f"the trap passes {self._name} on and exits at once: the job ends, and "
            f"{launch.name} is killed while it saves."
        )
        name, at = self._warning.name, trap.command.start
        right = f'trap \'kill -{name} "$pid"; wait "$pid"; exit\' {name}'
        yield self._job.report("wait-ends-early", "warning", at, text, corrected=[right])

    def _does_not_forward(self, trap: Trap, launches: list[Launch]) -> Iterator[LintFinding]:
        job, rule = self._job, "trap-does-not-forward"
        if not _does_anything(trap):
            text = f"the trap does not pass {self._name} on: the training never receives it."
            edits = [self._forward(trap, '"$!"' if len(launches) == 1 else "$(jobs -p)")]
            yield job.report(rule, "error", trap.command.start, text, edits=edits)
            return
        if "scontrol requeue" not in trap.handler:
            return
        if re.search(r"\bkill|scancel|\btouch\b|>", trap.handler):
            return
        for launch in (each for each in launches if not each.is_step):
            text = (
                f"scontrol requeue sends SIGTERM to bash and to the tasks of srun: {launch.name} "
                "is none of them, and is killed without a warning."
            )
            # The warning itself goes to bash.
            edits = start_by_srun(job, launch, "")
            lines, at = share_by_srun(job, launch), launch.command.start
            yield job.report(rule, "error", at, text, edits=edits, corrected=lines)


def _check_background(job: BatchScript) -> Iterator[LintFinding]:
    """A job is over when its script is, whatever still runs."""
    for launch in job.trainings:
        command = launch.command
        if not command.is_background:
            continue
        later = [c for c in job.commands if c.start > command.start]
        loops = any(kind in ("while", "until") for c in later for kind in c.within)
        waits = any(c.text == "wait" for c in job.commands)
        if loops or waits or any(c.text in _TAKES_TIME for c in later):
            return
        if any(each.command in later and not each.command.is_background for each in job.launches):
            return
        if job.text.rstrip().endswith("\nwait"):
            return  # behind words that bash does not parse, such as a stray `;;`
        end = len(job.text)
        newline = "" if job.text.endswith("\n") else "\n"
        text = f"the script and its job end at once: {launch.name} is killed as soon as it starts."
        edits = [Edit(end, end, f"{newline}wait\n")]
        yield job.report("wait-missing", "error", command.start, text, edits=edits)
        return


def _check_status(job: BatchScript) -> Iterator[LintFinding]:
    """An interrupted training must not end as COMPLETED."""
    if not job.is_training:
        return
    text = "an interrupted training ends as COMPLETED: dependent jobs take it for done."
    for launch in job.trainings[-1:]:
        command = launch.command
        later = [
            c for c in job.commands if c.start > command.end and c.function == command.function
        ]
        texts = [word.text for word in later[0].words] if later else []
        if command.after == "||" and texts in (["true"], [":"], ["exit", "0"]):
            edits = [Edit(command.end, later[0].end, "")]
            yield job.report("status-hidden", "warning", command.start, text, edits=edits)
            return
        if _KEEPS_STATUS.search(job.text) or _stops_at_errors(job):
            continue
        last = later[-1] if later else None
        is_exit = last is not None and [w.text for w in last.words] == ["exit", "0"]
        if last is not None and is_exit and not last.is_conditional and not last.within:
            if command.is_background or command.function is not None:
                continue
            between = re.sub(r"[;\s]", "", job.text[command.end : last.start])
            edits, corrected = [], ["status=$?   (right behind the training)", 'exit "$status"']
            if not between and not command.is_piped:
                edits, corrected = [Edit(last.words[1].start, last.words[1].end, "$?")], []
            at, rule = last.start, "status-hidden"
            yield job.report(rule, "warning", at, text, edits=edits, corrected=corrected)
        elif command.is_piped and not launch.is_exec:
            text = f"the job's status is that of the last command in the pipe: {text}"
            right = ["set -o pipefail"]
            yield job.report("status-hidden", "hint", command.start, text, corrected=right)


def _stops_at_errors(job: BatchScript) -> bool:
    """Whether `set -e` ends the script with the training's own status."""
    options = [word.text for c in job.commands if c.text == "set" for word in c.words[1:]]
    first = job.text.partition("\n")[0]
    return any(re.fullmatch(r"-\w*e\w*|errexit", word) for word in options) or " -e" in first


# -- Traps that never run, and one that is missing -------------------------------------------------
_ONLY_WORDS = frozenset(["echo", "printf", "date", "exit", "sleep", "true", ":", "logger", "sync"])
_SUBMITS = re.compile(r"(?:^|[;&|({\n]|\b(?:then|else|do|if)\s)\s*sbatch\b")


def _does_anything(trap: Trap) -> bool:
    """Whether the handler does more than print."""
    return any(name not in _ONLY_WORDS for name in _programs(trap.handler))


def _submits(trap: Trap) -> bool:
    return _SUBMITS.search(trap.handler) is not None


def _programs(handler: str) -> list[str]:
    commands = re.split(r"[;\n&|]+", handler)
    names = [each.split()[0] for each in commands if each.split()]
    return [name for name in names if not name.startswith("#")]


def _never_runs(
    job: BatchScript, trap: Trap, option: Option, warning: WarningSignal
) -> LintFinding:
    text = f"this trap never runs: without B: SIG{warning.name} goes to the tasks of srun only."
    severity = "warning" if all(launch.is_step for launch in job.trainings) else "error"
    edits: list[Edit] = []
    if any(launch.is_led or job.uses_holdfast(launch) for launch in job.trainings):
        # With B: and a wait it would run, and requeue the job before the state is saved.
        text += " It is not needed: holdfast requeues the job itself, once the state is saved."
        lines = ["(without this trap; what else it does belongs behind the training)"]
        rest = re.sub(r"scontrol\s+requeue\b[^;&|\n]*", "", trap.handler)
        functions = {command.function for command in job.commands}  # their text is in the handler
        # The training receives the signal itself.
        if not set(_programs(rest)) - _ONLY_WORDS - {"kill", "wait"} - functions:
            command = trap.command
            edit = job.remove(command.start, command.end, around="", instead=":")
            if command.within or command.before in ("&&", "||"):
                edit = Edit(command.start, command.end, ":")
            edits, lines = [edit], ["(without this trap)"]
    else:
        right = signal_value(option, warning, to_batch=True)
        lines = [f"#SBATCH --signal={right}", "… &", "wait || wait"]
        if all(launch.command.is_background for launch in job.trainings):
            edits, lines = [set_value(option, right)], []
    at = trap.command.start
    return job.report("trap-never-runs", severity, at, text, edits=edits, corrected=lines)


def _check_missing_trap(job: BatchScript) -> Iterator[LintFinding]:
    """bash dies of the SIGTERM at the limit, and with it srun, which prints for the tasks."""
    if any("TERM" in trap.signals for trap in job.traps):
        return
    for launch in job.trainings:
        command = launch.command
        if not launch.is_step or launch.is_exec or command.is_background:
            continue
        if not (launch.is_led or job.uses_holdfast(launch)):
            continue
        # With a trap, commands behind the training would also run after an interruption.
        if any(c.start > command.end and c.text not in _ONLY_WORDS for c in job.commands):
            continue
        text = (
            "at the limit and at a requeue, bash and srun die of SIGTERM: the state is saved, but "
            "the last lines of the log are lost."
        )
        right = ["trap : TERM   (in a line before it)"]
        yield job.report("trap-missing", "hint", command.start, text, corrected=right)
        return


# -- `scontrol requeue`: too many jobs of it, or too often -----------------------------------------
_REQUEUE = re.compile(
    r"scontrol\s+requeue\s+[\\\"']*"
    r"(\$\{SLURM_(?:ARRAY_JOB_ID|JOB_?ID)\}|\$SLURM_(?:ARRAY_JOB_ID|JOB_?ID)\b)"
)
_ASKS = re.compile(r"scontrol\s+(-o\s+)?show|squeue|sacct|\bif\b|\[\[?\s|\btest\b|&&|\|\||\bcase\b")
_TASK = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"


def _check_array(job: BatchScript) -> Iterator[LintFinding]:
    text = "in the task that has the array's job id, this requeues all tasks of the array."
    for command in job.commands:
        written = job.text[command.start : command.end]
        for match in _REQUEUE.finditer(written):
            if written[match.end() :].startswith("_"):
                continue
            start, end = command.start + match.start(1), command.start + match.end(1)
            is_escaped = job.text[start - 1] == "\\"
            task = _TASK.replace("$", "\\$") if is_escaped else _TASK
            edits = [Edit(start, end, task)]
            yield job.report("requeue-whole-array", "error", start, text, edits=edits)


def _check_trap(job: BatchScript, trap: Trap) -> Iterator[LintFinding]:
    """scancel sends SIGTERM, too, and every end of a script passes EXIT."""
    dangerous = [name for name in trap.signals if name in ("TERM", "EXIT", "INT")]
    if not dangerous or _ASKS.search(trap.handler):
        return
    does_submit = _submits(trap)
    again = "sbatch …" if does_submit else 'scontrol requeue "$SLURM_JOB_ID"'
    asks = 'scontrol show job -o "$SLURM_JOB_ID" | grep -qE "Reason=TimeLimit|PreemptTime=2"'
    edits, lines = [], [f"{asks} && {again}"]
    words = trap.command.words[-len(trap.signals) :]
    keeps = [w.text for w, name in zip(words, trap.signals, strict=True) if name not in dangerous]
    is_warning = job.signal is not None and job.signal.name in dangerous
    if keeps and not does_submit and not is_warning:  # else its other purpose is not known
        edits, lines = [Edit(words[0].start, words[-1].end, " ".join(keeps))], []
    does = "submits the job" if does_submit else "requeues the job"
    text = f"SIGTERM {does} here. scancel sends it too: the job cannot be cancelled."
    if "EXIT" in dangerous:
        text = f"every end of the script {does} here: a finished training starts again, for ever."
    at = trap.command.start
    yield job.report("requeue-after-cancel", "error", at, text, edits=edits, corrected=lines)


def _check_unconditional(job: BatchScript) -> Iterator[LintFinding]:
    """A requeue at the end of the script without a condition."""
    for command in job.commands:
        if command.text != "scontrol" or command.function is not None or command.is_conditional:
            continue
        if [word.text for word in command.words[1:2]] != ["requeue"] or _may_leave(job, command):
            continue
        text = "this runs however the training ended: a finished one starts again, for ever."
        corrected = [
            "status=$?   (right behind the training)",
            f"[ $status -eq {REQUEUE} ] && {job.text[command.start : command.end]}",
        ]
        yield job.report("requeue-always", "warning", command.start, text, corrected=corrected)


def _may_leave(job: BatchScript, command: Command) -> bool:
    """Whether an earlier command may have ended the script."""
    return any(
        each.text in ("exit", "return", "exec")
        or (each.text == "set" and any("e" in word.text for word in each.words[1:]))
        for each in job.commands
        if each.start < command.start
    )


# -- What lint cannot judge: said, since silence would read as a good script -----------------------


def check_understood(job: BatchScript) -> Iterator[LintFinding]:
    """One hint, if no training was found and a command could be one."""
    if job.is_python:
        return
    if not job.is_understood:
        yield job.not_understood(0, "lint could only read the #SBATCH lines.")
        return
    for launch in job.unseen[-1:]:
        command = launch.command
        written = re.sub(r"\s*\\?\n\s*", " ", job.text[command.start : command.end])
        name = _text.cut(written, 41)
        yield job.not_understood(command.start, f"lint cannot see what `{name}` starts.")
