"""What the batch shell does with a signal, with its children and with their status."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from holdfast._environment.slurm.options import Option, WarningSignal
from holdfast._tools.lint.finding import (
    ERROR,
    HINT,
    SLACK_SECONDS,
    WARNING,
    Edit,
    LintFinding,
    guard_step,
    report,
    set_value,
    share_by_srun,
    signal_value,
    start_by_srun,
)
from holdfast._tools.lint.job import BatchScript, Trap
from holdfast._tools.lint.launch import OTHER, Launch
from holdfast._tools.lint.rules_requeue import does_anything, submits
from holdfast._tools.lint.shell import Command

_TAKES_TIME = frozenset(["sleep", "tail", "fg", "wait", "inotifywait", "jobs", "read", "srun"])
_KEEPS_STATUS = re.compile(r"\$\?|PIPESTATUS|pipefail")


def check_batch(job: BatchScript) -> Iterator[LintFinding]:
    """All rules about the batch shell."""
    if not job.is_understood:
        return
    yield from _check_background(job)
    yield from _check_status(job)
    option, warning = job.option("signal"), job.signal
    if option is not None and warning is not None and warning.to_batch:
        yield from _SignalToBatch(job, option, warning).check()


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
        job, name = self._job, self._name
        traps = [trap for trap in job.traps if self._warning.name in trap.signals]
        launches = [launch for launch in job.trainings or job.unseen if not launch.is_exec]
        if not launches:
            return
        if not traps:
            yield from self._kills_shell(launches)
            return
        trap = traps[-1]
        if trap.ignores:
            text = f"B: sends {name} to bash alone, which ignores it: the warning is lost."
            edits, lines = self._send_to_steps(launches), self._shared(launches)
            at = trap.command.start
            yield report(job, "signal-ignored", ERROR, at, text, edits=edits, corrected=lines)
            return
        foreground = [launch for launch in launches if not launch.command.is_background]
        for launch in foreground:
            yield self._waits_for_foreground(trap, launch)
        if not foreground:
            for launch, following in zip_longest(launches, launches[1:]):
                yield from self._waits_once(trap, launch, following)
            yield from self._does_not_forward(trap, launches)

    def _kills_shell(self, launches: list[Launch]) -> Iterator[LintFinding]:
        job, seconds = self._job, self._warning.seconds
        if self._warning.name in ("CONT", "URG") or self._is_named_elsewhere():
            return
        text = (
            f"B: sends {self._name} to bash alone, which has no trap for it and dies: the job "
            f"fails {seconds} to {seconds + SLACK_SECONDS} s before its limit, and "
            f"{launches[-1].name} is killed with it."
        )
        severity = WARNING if job.reads_other_scripts() else ERROR
        edits, lines = self._send_to_steps(launches), self._shared(launches)
        at = self._option.start
        yield report(job, "signal-kills-shell", severity, at, text, edits=edits, corrected=lines)

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
                continue
            start: list[Edit] = []
            if launch.kind != OTHER:
                start = start_by_srun(self._job, launch, self._warning.name)
            if not start:
                return []
            edits += start
        return edits

    def _shared(self, launches: list[Launch]) -> list[str]:
        bare = [launch for launch in launches if not launch.is_step]
        lines = dict.fromkeys(line for each in bare for line in share_by_srun(self._job, each))
        right = f"#SBATCH --signal={signal_value(self._option, self._warning, to_batch=False)}"
        return [right, *lines] if lines else []

    def _waits_for_foreground(self, trap: Trap, launch: Launch) -> LintFinding:
        job, command = self._job, launch.command
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
            # With a second wait, the trap would submit a second job at SIGTERM; and the training
            # would go on beside its successor.
            corrected = [f"{written} &", "trainer=$!", 'wait "$trainer"', self._hand_over()]
        elif can_move and (launch.kind != OTHER or does_anything(trap)):
            indent = before if not before.strip() else ""
            waiting = f' &\n{indent}trainer=$!\n{indent}wait "$trainer" || wait "$trainer"'
            edits = [Edit(command.end, command.end, waiting)]
            if not does_anything(trap):
                edits = [self._forward(trap, '"$trainer"'), *edits]
        text = (
            f"the trap for {self._name} in line {job.line_of(trap.command.start)} never runs in "
            "time: bash runs it when the command in the foreground has ended, and that is killed "
            "at the limit."
        )
        return report(
            job,
            "trap-waits-for-command",
            WARNING if launch.kind == OTHER else ERROR,
            command.start,
            text,
            edits=edits,
            corrected=[] if edits else corrected,
        )

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
        waits = [
            command
            for command in job.commands
            if command.text == "wait" and launch.command.start < command.start < end
            and command.function is None
        ]  # fmt: skip
        if len(waits) != 1 or re.search(r"\bwait\b", trap.handler):
            return
        if re.search(r"\bexit\b", trap.handler):
            yield from self._leaves_early(trap, launch)
            return
        wait = waits[0]
        if not does_anything(trap) or any(kind in ("while", "until") for kind in wait.within):
            return
        if "scontrol requeue" in trap.handler and launch.is_step:
            return  # the job ends and comes back, whatever the script does next
        later = [c for c in job.commands if c.start > wait.end and c.function is None]
        if wait.after not in ("\n", ";") or any(c.text in ("while", "until") for c in later):
            return
        text = (
            f"{self._name} ends this wait with status {self._warning.status} as soon as the trap "
            f"has run: the script goes on to its end, and {launch.name} is killed while it saves."
        )
        edits, lines = [Edit(wait.end, wait.end, f" || {job.text[wait.start : wait.end]}")], []
        if submits(trap):
            # With a second wait, the trap would submit a second job at SIGTERM.
            edits, lines = [], [self._hand_over()]
        yield report(job, "wait-ends-early", ERROR, wait.start, text, edits=edits, corrected=lines)

    def _leaves_early(self, trap: Trap, launch: Launch) -> Iterator[LintFinding]:
        """A handler that leaves never returns to the wait."""
        if not re.search(r"\bkill\b", trap.handler) or re.search(r"sleep|requeue", trap.handler):
            return
        text = (
            f"the trap passes {self._name} on and leaves at once: the job is over, and "
            f"{launch.name} is killed while it saves."
        )
        name, at = self._warning.name, trap.command.start
        right = f'trap \'kill -{name} "$pid"; wait "$pid"; exit\' {name}'
        yield report(self._job, "wait-ends-early", WARNING, at, text, corrected=[right])

    def _does_not_forward(self, trap: Trap, launches: list[Launch]) -> Iterator[LintFinding]:
        job, rule = self._job, "trap-does-not-forward"
        if not does_anything(trap):
            text = f"the trap does not pass {self._name} on: the training never hears of it."
            edits = [self._forward(trap, '"$!"' if len(launches) == 1 else "$(jobs -p)")]
            yield report(job, rule, ERROR, trap.command.start, text, edits=edits)
            return
        if "scontrol requeue" not in trap.handler:
            return
        if re.search(r"\bkill|scancel|\btouch\b|>", trap.handler):
            return
        for launch in launches:
            if launch.is_step:
                continue
            text = (
                f"scontrol requeue sends SIGTERM to bash and to the tasks of srun: {launch.name} "
                "is none, and is killed without a word."
            )
            # The warning itself goes to bash.
            edits = start_by_srun(job, launch, "") if launch.kind != OTHER else []
            lines, at = share_by_srun(job, launch), launch.command.start
            yield report(job, rule, ERROR, at, text, edits=edits, corrected=lines)


def _check_background(job: BatchScript) -> Iterator[LintFinding]:
    """A job is over when its script is, whatever still runs."""
    for launch in job.trainings:
        command = launch.command
        if not command.is_background:
            continue
        later = [c for c in job.commands if c.start > command.start]
        if any(c.text in _TAKES_TIME for c in later):
            return
        if any(c.text == "wait" for c in job.commands) or any(
            kind in ("while", "until") for c in later for kind in c.within
        ):
            return
        if any(each.command in later and not each.command.is_background for each in job.launches):
            return
        if job.text.rstrip().endswith("\nwait"):
            return  # behind words that bash does not parse, such as a stray `;;`
        end = len(job.text)
        newline = "" if job.text.endswith("\n") else "\n"
        text = (
            f"the script goes on to its end and the job is over: {launch.name} is killed within "
            "a second of its start."
        )
        edits = [Edit(end, end, f"{newline}wait\n")]
        yield report(job, "wait-missing", ERROR, command.start, text, edits=edits)
        return


def _check_status(job: BatchScript) -> Iterator[LintFinding]:
    """An interrupted training must not end as COMPLETED."""
    if not job.is_training:
        return
    text = (
        "a training that is interrupted ends as COMPLETED: SLURM and jobs that wait for "
        "the job take it for done."
    )
    for launch in job.trainings[-1:]:
        command = launch.command
        later = [
            c for c in job.commands if c.start > command.end and c.function == command.function
        ]
        if command.after == "||" and later and _is_nothing(later[0]):
            edits = [Edit(command.end, later[0].end, "")]
            yield report(job, "status-hidden", WARNING, command.start, text, edits=edits)
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
            yield report(
                job, "status-hidden", WARNING, last.start, text, edits=edits, corrected=corrected
            )
        elif command.is_piped and not launch.is_exec:
            text = f"the job's status is that of the last command in the pipe: {text}"
            right = ["set -o pipefail"]
            yield report(job, "status-hidden", HINT, command.start, text, corrected=right)


def _stops_at_errors(job: BatchScript) -> bool:
    """Whether `set -e` ends the script with the training's own status."""
    options = [
        word.text for command in job.commands if command.text == "set" for word in command.words[1:]
    ]
    first = job.text.partition("\n")[0]
    return any(re.fullmatch(r"-\w*e\w*|errexit", word) for word in options) or " -e" in first


def _is_nothing(command: Command) -> bool:
    texts = [word.text for word in command.words]
    return texts in (["true"], [":"], ["exit", "0"])
