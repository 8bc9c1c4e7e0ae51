"""What lint finds, and the changes that put it right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast._environment.slurm.options import Option
from holdfast._tools.lint.job import Job
from holdfast._tools.lint.launch import OTHER, PYTHON, TORCHRUN, Launch
from holdfast._tools.lint.signal_handlers import has_no_handler

ERROR = "error"
WARNING = "warning"
HINT = "hint"
NOT_UNDERSTOOD = "not-understood"  # the rule by which silence is not taken for a good script


@dataclass(frozen=True)
class Edit:
    """Replace what stands from `start` to `end`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Finding:
    """One thing that goes wrong, and how it would be right."""

    rule: str
    severity: str
    line: int
    message: str
    source: str = ""  # the line as it stands
    corrected: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    folder: str | None = None  # one that is missing, and that --fix makes
    is_fixable: bool = False


def apply_edits(text: str, *groups: Iterable[Edit]) -> str:
    """The text with the changes; of two groups that want the same place, only the first."""
    chosen: list[Edit] = []
    for group in groups:
        edits = [edit for edit in group if edit not in chosen]
        if not any(_overlap(edit, other) for edit in edits for other in chosen):
            chosen += edits
    # From the end, so that places before stay right; insertions at one place keep their order.
    chosen.sort(key=lambda each: (each.start, each.end))
    chosen.reverse()
    for edit in chosen:
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _overlap(one: Edit, other: Edit) -> bool:
    return one.start < other.end and other.start < one.end


def changed_lines(text: str, edits: Iterable[Edit]) -> tuple[str, ...]:
    """The lines that the changes make, in their order."""
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
    """The changes that touch the same whole lines, and where those lines are."""
    groups: list[tuple[int, int, list[Edit]]] = []
    for edit in sorted(edits, key=lambda each: (each.start, each.end)):
        start = text.rfind("\n", 0, edit.start) + 1
        end = text.find("\n", edit.end)
        end = len(text) if end < 0 else end + 1
        if groups and start < groups[-1][1]:
            first, last, inside = groups.pop()
            groups.append((first, max(last, end), [*inside, edit]))
        else:
            groups.append((start, end, [edit]))
    return groups


# -- How the rules write down what they find, and the changes that several of them make ------------


_LEAD_SECONDS = 120
_LEAST_LEAD_SECONDS = 15
HANDLED_BY_TORCHRUN = ("TERM", "INT", "HUP", "QUIT")
_GUARDED = ("USR1", "USR2")  # the others mean the end also for a program that only begins


def note(
    job: Job,
    rule: str,
    severity: str,
    at: int,
    message: str,
    *,
    edits: Iterable[Edit] = (),
    corrected: Iterable[str] = (),
    folder: str | None = None,
) -> Finding:
    """A finding at an offset of the script."""
    line = job.line_of(at)
    changes = tuple(edits)
    lines = tuple(corrected) or changed_lines(job.text, changes)
    fixable = bool(changes) or folder is not None
    source = job.source(line)
    return Finding(rule, severity, line, message, source, lines, changes, folder, fixable)


def add_option(job: Job, *lines: str) -> Edit:
    """Further #SBATCH lines."""
    at = job.options_at
    before = "" if at == 0 or job.text[at - 1] == "\n" else "\n"
    return Edit(at, at, before + "".join(f"#SBATCH {line}\n" for line in lines))


def set_value(option: Option, value: str) -> Edit:
    """The option with another value, written as it was written."""
    if option.value_start >= option.end:
        return Edit(option.start, option.end, f"--{option.name}={value}")
    return Edit(option.value_start, option.end, value)


def remove_option(job: Job, option: Option) -> Edit:
    """Without the option; without its line if nothing else stands there."""
    start = job.text.rfind("\n", 0, option.start) + 1
    end = job.text.find("\n", option.end)
    end = len(job.text) if end < 0 else end + 1
    if (
        job.text[start : option.start].strip() == "#SBATCH"
        and not job.text[option.end : end].strip()
    ):
        return Edit(start, end, "")
    return Edit(option.start, option.end, "")


def needed_seconds(job: Job) -> float | None:
    """What the run's own measurements say that a save takes, from the asking on."""
    if job.save_seconds is None:
        return None
    return job.save_seconds + (job.step_seconds or 0.0)


def good_lead(job: Job) -> int | None:
    """Seconds of warning that are enough, and fit into the limit; None if none would."""
    needed = needed_seconds(job)
    lead = _LEAD_SECONDS if needed is None else max(60, -(-int(1.5 * needed + 30) // 30) * 30)
    if job.limit_seconds is not None and lead > job.limit_seconds / 3:
        lead = int(job.limit_seconds / 3)
        if lead < _LEAST_LEAD_SECONDS or (needed is not None and lead < needed):
            return None
    return lead


def signal_value(job: Job, *, to_batch: bool, seconds: int | None = None) -> str:
    """A value for --signal with the same signal."""
    found = job.signal
    option = job.option("signal")
    assert found is not None
    assert option is not None
    written = option.value.rpartition(":")[2].partition("@")[0]
    lead = found.seconds if seconds is None else seconds
    reservation = (
        "R" if "R" in option.value.partition(":")[0].upper() and ":" in option.value else ""
    )
    prefix = f"{reservation}{'B' if to_batch else ''}"
    return f"{prefix}{':' if prefix else ''}{written}@{lead}"


def start_by_srun(job: Job, launch: Launch, signal_name: str) -> list[Edit]:
    """The training as a step of its own, where this signal finds it; none if that is not enough.

    Steps beside each other need a share of the CPUs and the memory each, which only the
    author knows: as they are, the second would wait for the end of the first. A shell script in
    between would die of the signal, and is another file.
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


def leading_words(job: Job, launch: Launch, signal_name: str) -> list[str]:
    """What stands between srun and the training."""
    words = _guard(job, launch, signal_name)
    if job.uses_holdfast(launch) and not launch.is_led:
        words += ["holdfast", "run", "--"]
    return words


def guard_step(job: Job, launch: Launch, signal_name: str) -> list[Edit]:
    """The guard for a training that srun starts already."""
    if launch.is_led or launch.is_inside or launch.kind == OTHER:
        return []
    program = launch.program[0].source
    at = next(n for n, word in enumerate(launch.arguments) if word is launch.program[0])
    if launch.arguments[at - 1].source is program:
        return []  # one variable holds srun, too
    words = _guard(job, launch, signal_name)
    return [Edit(program.start, program.start, " ".join(words) + " ")] if words else []


def _guard(job: Job, launch: Launch, signal_name: str) -> list[str]:
    """A signal that comes while Python imports is ignored, instead of killing it.

    Not where the training would die of it later as well: lint says that, and this would hide it.
    """
    if signal_name not in _GUARDED or launch.is_guarded:
        return []
    if launch.kind == PYTHON and launch.script and has_no_handler(launch.script, job.read):
        return []
    return ["bash", "-c", f'\'trap "" {signal_name}; exec "$@"\'', "_"]


def is_packed(job: Job, launch: Launch) -> bool:
    """Whether several trainings run beside each other, without srun."""
    beside = [e for e in job.trainings if e.command.is_background and not e.is_step]
    command = launch.command
    return command.is_background and (len(beside) > 1 or command.is_conditional)


def share_by_srun(job: Job, launch: Launch) -> tuple[str, ...]:
    """The line for one of several trainings."""
    written = job.text[launch.command.start : launch.command.end]
    return (f"srun --exact --ntasks=1 --mem=… {written} &",) if is_packed(job, launch) else ()


def _many_nodes(launch: Launch) -> bool:
    return any(word.text.startswith(("--nnodes", "--rdzv")) for word in launch.program)


def handle_by_torchrun(job: Job, launch: Launch) -> list[Edit]:
    """torchrun with the flag by which it passes the signal on to its workers."""
    found = job.signal
    if launch.kind != TORCHRUN or found is None or not launch.is_editable:
        return []
    if found.name in HANDLED_BY_TORCHRUN:
        return []
    if any(is_signals_option(word.text) for word in launch.torchrun_options):
        return []
    names = ",".join(f"SIG{name}" for name in ("TERM", "INT", "HUP", "QUIT", found.name))
    at = launch.torchrun_at
    after = launch.program[at].source
    if any(word.source is after for word in launch.program[at + 1 : at + 2]):
        return []  # it stands in a variable, with words behind it
    return [Edit(after.end, after.end, f" --signals-to-handle={names}")]


def is_signals_option(text: str) -> bool:
    """Whether a word of torchrun says which signals it passes on."""
    return text.replace("_", "-").startswith("--signals-to-handle")
