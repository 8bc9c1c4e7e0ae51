"""What lint finds, and the edits that several rules make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast._environment.slurm.options import Option, WarningSignal
from holdfast._tools.lint.job import BatchScript
from holdfast._tools.lint.launch import OTHER, PYTHON, TORCHRUN, Launch
from holdfast._tools.lint.signal_handlers import has_no_handler

ERROR = "error"
WARNING = "warning"
HINT = "hint"
NOT_UNDERSTOOD = "not-understood"  # the rule that says so: silence would read as a good script
SLACK_SECONDS = 30  # SLURM checks every 30 s, so a signal may come that much earlier
HANDLED_BY_TORCHRUN = ("TERM", "INT", "HUP", "QUIT")
_LEAD_SECONDS = 120
_LEAST_LEAD_SECONDS = 15
_GUARDED = ("USR1", "USR2")  # any other signal means the end, also for a program that starts


@dataclass(frozen=True)
class Edit:
    """Replace the text from `start` to `end`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class LintFinding:
    """One defect, and the correction."""

    rule: str
    severity: str
    line: int
    message: str
    source: str = ""  # the line as it stands
    corrected: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    folder: str | None = None  # a missing one, which --fix makes
    is_fixable: bool = False


def report(
    job: BatchScript,
    rule: str,
    severity: str,
    at: int,
    message: str,
    *,
    edits: Iterable[Edit] = (),
    corrected: Iterable[str] = (),
    folder: str | None = None,
) -> LintFinding:
    """A finding at an offset of the script."""
    line = job.line_of(at)
    changes = tuple(edits)
    lines = tuple(corrected) or changed_lines(job.text, changes)
    fixable = bool(changes) or folder is not None
    source = job.source(line)
    return LintFinding(rule, severity, line, message, source, lines, changes, folder, fixable)


# -- Edits -----------------------------------------------------------------------------------------


def apply_edits(text: str, *groups: Iterable[Edit]) -> str:
    """The text with the changes; of two groups that overlap, only the first."""
    chosen: list[Edit] = []
    for group in groups:
        edits = [edit for edit in group if edit not in chosen]
        if not any(_overlap(edit, other) for edit in edits for other in chosen):
            chosen += edits
    # From the end, so that offsets before stay valid; insertions at one place keep their order.
    chosen.sort(key=lambda each: (each.start, each.end))
    chosen.reverse()
    for edit in chosen:
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _overlap(one: Edit, other: Edit) -> bool:
    return one.start < other.end and other.start < one.end


def changed_lines(text: str, edits: Iterable[Edit]) -> tuple[str, ...]:
    """The lines that the edits make, in their order."""
    found: list[str] = []
    for start, end, inside in _by_lines(text, edits):
        before = text[start:end].splitlines()
        moved = [Edit(each.start - start, each.end - start, each.text) for each in inside]
        after = apply_edits(text[start:end], moved).splitlines()
        while before and after and before[-1] == after[-1]:
            before.pop()
            after.pop()
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        found += after[same:]
    return tuple(found)


def _by_lines(text: str, edits: Iterable[Edit]) -> list[tuple[int, int, list[Edit]]]:
    """The edits that touch the same whole lines, and the offsets of those lines."""
    groups: list[tuple[int, int, list[Edit]]] = []
    for edit in sorted(edits, key=lambda each: (each.start, each.end)):
        start, end = whole_lines(text, edit.start, edit.end)
        if groups and start < groups[-1][1]:
            first, last, inside = groups.pop()
            groups.append((first, max(last, end), [*inside, edit]))
        else:
            groups.append((start, end, [edit]))
    return groups


def whole_lines(text: str, start: int, end: int) -> tuple[int, int]:
    """The offsets of the whole lines around a part of the text."""
    last = text.find("\n", end)
    return text.rfind("\n", 0, start) + 1, len(text) if last < 0 else last + 1


def add_option(job: BatchScript, *lines: str) -> Edit:
    """Further #SBATCH lines."""
    at = job.options_at
    before = "" if at == 0 or job.text[at - 1] == "\n" else "\n"
    return Edit(at, at, before + "".join(f"#SBATCH {line}\n" for line in lines))


def set_value(option: Option, value: str) -> Edit:
    """The option with another value, in the same notation."""
    if option.value_start >= option.end:
        return Edit(option.start, option.end, f"--{option.name}={value}")
    return Edit(option.value_start, option.end, value)


def remove_option(job: BatchScript, option: Option) -> Edit:
    """Without the option; without its line if nothing else is there."""
    start, end = whole_lines(job.text, option.start, option.end)
    before, after = job.text[start : option.start], job.text[option.end : end]
    if before.strip() == "#SBATCH" and not after.strip():
        return Edit(start, end, "")
    return Edit(option.start, option.end, "")


# -- The warning: how long before the limit, and how it reaches the training -----------------------


def needed_seconds(job: BatchScript) -> float | None:
    """The time of a save from its request on, as the run has measured it."""
    if job.save_seconds is None:
        return None
    return job.save_seconds + (job.step_seconds or 0.0)


def good_lead(job: BatchScript) -> int | None:
    """Seconds of warning that are enough, and fit into the limit; None if no number does."""
    needed = needed_seconds(job)
    lead = _LEAD_SECONDS if needed is None else max(60, -(-int(1.5 * needed + 30) // 30) * 30)
    if job.limit_seconds is not None and lead > job.limit_seconds / 3:
        lead = int(job.limit_seconds / 3)
        if lead < _LEAST_LEAD_SECONDS or (needed is not None and lead < needed):
            return None
    return lead


def signal_value(option: Option, warning: WarningSignal, *, to_batch: bool) -> str:
    """A value for --signal with the same signal and time."""
    flags, _, rest = option.value.rpartition(":")
    prefix = ("R" if "R" in flags.upper() else "") + ("B" if to_batch else "")
    written = rest.partition("@")[0]
    return f"{prefix}{':' if prefix else ''}{written}@{warning.seconds}"


def start_by_srun(job: BatchScript, launch: Launch, signal_name: str) -> list[Edit]:
    """The training as a step of its own, where this signal reaches it; empty if that is not enough.

    Steps beside each other need a share of the CPUs and the memory each, which only the author
    knows: without it, the second would wait for the end of the first. A shell script in between
    would die of the signal, and is another file.
    """
    if is_packed(job, launch) or (launch.swallow is not None and launch.swallow.place):
        return []
    words = ["srun"]
    is_one_per_node = launch.kind == TORCHRUN and job.tasks == job.nodes and _many_nodes(launch)
    if job.tasks > 1 and not is_one_per_node:
        words += ["--nodes=1", "--ntasks=1"] if job.nodes > 1 else ["--ntasks=1"]
    if job.option("cpus-per-task") is not None:
        # Since 22.05 srun does not take it from sbatch, and one CPU would be left.
        words.append('--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    words += leading_words(job, launch, signal_name)
    edits = [Edit(launch.step_at, launch.step_at, " ".join(words) + " ")]
    if "holdfast" not in words:
        edits += handle_by_torchrun(job, launch)
    return edits


def leading_words(job: BatchScript, launch: Launch, signal_name: str) -> list[str]:
    """The words between srun and the training."""
    words = _guard(job, launch, signal_name)
    if job.uses_holdfast(launch) and not launch.is_led:
        words += ["holdfast", "run", "--"]
    return words


def guard_step(job: BatchScript, launch: Launch, signal_name: str) -> list[Edit]:
    """The guard for a training that srun starts already."""
    if launch.is_led or launch.is_inside or launch.kind == OTHER:
        return []
    program = launch.program[0].source
    at = next(n for n, word in enumerate(launch.arguments) if word is launch.program[0])
    if launch.arguments[at - 1].source is program:
        return []  # one variable holds srun, too
    words = _guard(job, launch, signal_name)
    return [Edit(program.start, program.start, " ".join(words) + " ")] if words else []


def _guard(job: BatchScript, launch: Launch, signal_name: str) -> list[str]:
    """Ignore a signal that comes while Python imports, instead of dying of it.

    Not where the training would die of it later as well: another rule says that, and this would
    hide it.
    """
    if signal_name not in _GUARDED or launch.is_guarded:
        return []
    if launch.kind == PYTHON and launch.script and has_no_handler(launch.script, job.read):
        return []
    return ["bash", "-c", f'\'trap "" {signal_name}; exec "$@"\'', "_"]


def is_packed(job: BatchScript, launch: Launch) -> bool:
    """Whether several trainings run beside each other, without srun."""
    beside = [e for e in job.trainings if e.command.is_background and not e.is_step]
    command = launch.command
    return command.is_background and (len(beside) > 1 or command.is_conditional)


def share_by_srun(job: BatchScript, launch: Launch) -> tuple[str, ...]:
    """The line for one of several trainings."""
    written = job.text[launch.command.start : launch.command.end]
    return (f"srun --exact --ntasks=1 --mem=… {written} &",) if is_packed(job, launch) else ()


def _many_nodes(launch: Launch) -> bool:
    return any(word.text.startswith(("--nnodes", "--rdzv")) for word in launch.program)


def handle_by_torchrun(job: BatchScript, launch: Launch) -> list[Edit]:
    """The flag by which torchrun passes the signal on to its workers."""
    warning = job.signal
    if launch.kind != TORCHRUN or warning is None or not launch.is_editable:
        return []
    if warning.name in HANDLED_BY_TORCHRUN:
        return []
    if any(is_signals_option(word.text) for word in launch.torchrun_options):
        return []
    at = launch.torchrun_at
    after = launch.program[at].source
    if any(word.source is after for word in launch.program[at + 1 : at + 2]):
        return []  # torchrun and its options are in one variable
    return [Edit(after.end, after.end, f" {signals_to_handle(warning)}")]


def signals_to_handle(warning: WarningSignal) -> str:
    names = ",".join(f"SIG{name}" for name in (*HANDLED_BY_TORCHRUN, warning.name))
    return f"--signals-to-handle={names}"


def is_signals_option(text: str) -> bool:
    return text.replace("_", "-").startswith("--signals-to-handle")
