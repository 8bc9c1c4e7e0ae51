"""Which process receives the signal: the training, or a launcher that dies of it."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast._environment.slurm.options import WarningSignal
from holdfast._tools.lint.finding import (
    Edit,
    LintFinding,
    before_the_limit,
    set_value,
    signal_value,
)
from holdfast._tools.lint.job import BatchScript
from holdfast._tools.lint.launch import LAUNCHERS, OTHER, PYTHON, TORCHRUN, Launch
from holdfast._tools.lint.signal_handlers import has_no_handler

_HANDLED_BY_TORCHRUN = ("TERM", "INT", "HUP", "QUIT")
_GUARDED = ("USR1", "USR2")  # any other signal means the end, also for a program that starts
_DEADLY = ("USR1", "USR2", "TERM", "HUP", "ALRM", "XCPU", "QUIT")


def check_launches(job: BatchScript) -> Iterator[LintFinding]:
    warning = job.signal
    option = job.option("signal")
    # A batch script in Python is the batch shell, for SLURM.
    if job.is_python and option is not None and warning is not None and not warning.to_batch:
        text = f"without B: SIG{warning.name} goes to the tasks of srun only, not to this script."
        edits = [set_value(option, signal_value(option, warning, to_batch=True))]
        yield job.report("signal-never-arrives", "error", option.start, text, edits=edits)
    for launch in job.trainings:
        if option is None:
            yield from _check_without_signal(job, launch)
        elif warning is not None and not warning.to_batch:
            yield from _check_signal_to_steps(job, launch, warning)
        if launch.is_step or launch.is_exec:
            yield from _check_swallowed(job, launch)
            yield from _check_launcher(job, launch)
        yield from _check_handlers(job, launch)


def _check_without_signal(job: BatchScript, launch: Launch) -> Iterator[LintFinding]:
    start, lead = launch.command.start, job.good_lead()
    if launch.is_step or launch.is_exec:
        if job.is_training and lead is not None:
            text = "without --signal SIGTERM comes at the limit, and SIGKILL 30 s later (KillWait)."
            right = f"#SBATCH --signal={'' if launch.is_step else 'B:'}USR2@{lead}"
            yield job.report("no-warning", "hint", start, text, corrected=[right])
        return
    is_waited_for = bool(job.traps) and any(command.text == "wait" for command in job.commands)
    if launch.command.is_background and is_waited_for:
        return  # a trap may do what is needed: rules_batch checks it
    edits = start_by_srun(job, launch, "")
    # A program that does not know the signal would die of it, before the limit.
    if edits and lead is not None and job.handles_signals(launch):
        edits = [job.add_option(f"--signal=USR2@{lead}"), *start_by_srun(job, launch, "USR2")]
    severity = "warning" if job.is_training and job.options else "hint"
    text = f"at the limit SIGTERM goes to bash alone: {launch.name} is killed without a warning."
    corrected = share_by_srun(job, launch)
    yield job.report("no-warning", severity, start, text, edits=edits, corrected=corrected)


def _check_signal_to_steps(
    job: BatchScript, launch: Launch, warning: WarningSignal
) -> Iterator[LintFinding]:
    """Without B: the signal goes to the tasks of srun alone."""
    is_trapped = any(warning.name in trap.signals and not trap.ignores for trap in job.traps)
    if launch.is_step or (launch.command.is_background and is_trapped):
        return  # another rule checks the trap
    start = launch.command.start
    edits = start_by_srun(job, launch, warning.name)
    text = f"SIG{warning.name} never arrives: it goes to the tasks of srun only. "
    shared = () if launch.is_exec else share_by_srun(job, launch)
    text += (
        f"{launch.name} gets SIGTERM at the limit, and SIGKILL after KillWait."
        if launch.is_exec
        else f"At the limit {launch.name} is killed with bash: nothing is saved."
    )
    yield job.report("signal-never-arrives", "error", start, text, edits=edits, corrected=shared)


def _check_swallowed(job: BatchScript, launch: Launch) -> Iterator[LintFinding]:
    """The signal goes to the first process of a task, not to its children."""
    swallow, warning = launch.swallow, job.signal
    if swallow is None:
        return
    name, when, gets_it = "SIGTERM", "", False
    if warning is not None and warning.to_batch == (not launch.is_step):
        name, gets_it, when = f"SIG{warning.name}", True, f", {before_the_limit(warning)}"
    at = swallow.exec_at
    edits = [] if at is None else [Edit(at, at, "exec ")]
    corrected = () if edits else _without_wrapper(launch)
    start = launch.command.start
    if warning is None and not job.is_training:
        return
    where = f" (see {swallow.place})" if swallow.place else ""
    severity = "error" if swallow.is_certain and gets_it else "warning"
    text = (
        f"{name} goes to the task's first process, {swallow.who}{where}, which dies of it{when}: "
        f"{launch.name} below it is killed and never receives it."
    )
    rule = "wrapper-swallows-signal"
    yield job.report(rule, severity, start, text, edits=edits, corrected=corrected)


def _without_wrapper(launch: Launch) -> tuple[str, ...]:
    swallow, program = launch.swallow, launch.program
    assert swallow is not None
    words = " ".join(word.text for word in program)
    written = " ".join(dict.fromkeys(word.source.text for word in program))
    if swallow.place:
        return (f"exec {words}   ({swallow.place})",)
    if swallow.who.endswith("-c"):
        return (f"srun {words}",)
    if swallow.who == "conda run":
        return ("conda activate …", f"srun {written}")
    if launch.is_step:  # time and timeout belong outside
        return (f"{swallow.who} … srun {written}",)
    return (f"exec {written}",)


def _check_launcher(job: BatchScript, launch: Launch) -> Iterator[LintFinding]:
    """Launchers of ranks die of a signal that they do not handle."""
    warning = job.signal
    if warning is None or launch.is_led or warning.name in _HANDLED_BY_TORCHRUN:
        return
    if not (launch.is_exec if warning.to_batch else launch.is_step):
        return
    if launch.kind == TORCHRUN:
        flags = [w.text for w in launch.torchrun_options if _is_signals_option(w.text)]
        if flags and (
            f"SIG{warning.name}" in flags[-1] or "=" not in flags[-1] or "$" in flags[-1]
        ):
            return
        how = f"torchrun dies of it (status {warning.status}) and ends its workers"
    elif launch.kind in LAUNCHERS:
        how = f"{launch.kind}'s launcher does not handle it, and dies of it"
    else:
        return
    if launch.is_guarded:
        how = f"{launch.kind} ignores it, and does not pass it on"
    edits = _handle_by_torchrun(job, launch)
    corrected: tuple[str, ...] = ()
    if job.uses_holdfast(launch) and launch.is_step and launch.is_editable:
        # `holdfast run` sends the signal to the ranks itself, and waits until all is durable.
        if launch.swallow is not None:
            return
        at = launch.program[0].source.start
        edits = [Edit(at, at, " ".join(_leading_words(job, launch, warning.name)) + " ")]
    elif not edits:
        before = "srun " if launch.kind in LAUNCHERS else ""
        corrected = (f"{before}torchrun {_signals_to_handle(warning)} …",)
    severity = "error" if launch.kind == TORCHRUN else "warning"
    text = f"SIG{warning.name} goes to the launcher, not to the ranks: {how}."
    at = launch.command.start
    yield job.report("launcher-dies", severity, at, text, edits=edits, corrected=corrected)


def _check_handlers(job: BatchScript, launch: Launch) -> Iterator[LintFinding]:
    """A program without a handler dies of the signal: with --signal, less is trained."""
    warning = job.signal
    if warning is None or warning.name not in _DEADLY:
        return
    if launch.kind != PYTHON or not launch.script:
        return
    # `holdfast run` holds back a signal that the program does not catch; the others may handle it.
    if launch.is_led or launch.is_enclosed or launch.is_inside or launch.swallow is not None:
        return
    if launch.is_guarded or any(warning.name in trap.signals for trap in job.traps):
        return
    if not has_no_handler(launch.script, job.read):
        return
    arrives = launch.is_exec if warning.to_batch else launch.is_step
    dies = "it dies of it" if arrives else "once it arrives, the training dies of it"
    when = before_the_limit(warning)
    text = f"{launch.script} installs no handler for SIG{warning.name}: {dies}, {when}."
    corrected = [
        f"with holdfast.Run(…) as run:   (in {launch.script}: it saves, and comes back)",
        "or no --signal at all: it is trained until the limit, and not saved",
    ]
    at = launch.command.start
    yield job.report("signal-not-handled", "warning", at, text, corrected=corrected)


# -- Edits: the training as a step of srun, where a signal reaches it ------------------------------


def start_by_srun(job: BatchScript, launch: Launch, signal_name: str) -> list[Edit]:
    """The training as a step of its own, where this signal reaches it; empty if that is not enough.

    Parallel steps need a share of the CPUs and the memory each, which only the author knows:
    without it, the second would wait for the end of the first. A shell script in between would die
    of the signal, and is another file.
    """
    in_file = launch.swallow is not None and launch.swallow.place
    if launch.kind == OTHER or _is_packed(job, launch) or in_file:
        return []
    words = ["srun"]
    meets = any(word.text.startswith(("--nnodes", "--rdzv")) for word in launch.program)
    is_one_per_node = launch.kind == TORCHRUN and job.tasks == job.nodes and meets
    if job.tasks > 1 and not is_one_per_node:
        words += ["--nodes=1", "--ntasks=1"] if job.nodes > 1 else ["--ntasks=1"]
    if job.option("cpus-per-task") is not None:
        # Since 22.05 srun does not take it from sbatch, and one CPU would be left.
        words.append('--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    words += _leading_words(job, launch, signal_name)
    edits = [Edit(launch.step_at, launch.step_at, " ".join(words) + " ")]
    if "holdfast" not in words:
        edits += _handle_by_torchrun(job, launch)
    return edits


def _leading_words(job: BatchScript, launch: Launch, signal_name: str) -> list[str]:
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


def _is_packed(job: BatchScript, launch: Launch) -> bool:
    """Whether several trainings run in parallel, without srun."""
    parallel = [e for e in job.trainings if e.command.is_background and not e.is_step]
    command = launch.command
    return command.is_background and (len(parallel) > 1 or command.is_conditional)


def share_by_srun(job: BatchScript, launch: Launch) -> tuple[str, ...]:
    """The line for one of several trainings."""
    written = job.text[launch.command.start : launch.command.end]
    return (f"srun --exact --ntasks=1 --mem=… {written} &",) if _is_packed(job, launch) else ()


def _handle_by_torchrun(job: BatchScript, launch: Launch) -> list[Edit]:
    """The flag by which torchrun passes the signal on to its workers."""
    warning = job.signal
    if launch.kind != TORCHRUN or warning is None or not launch.is_editable:
        return []
    if warning.name in _HANDLED_BY_TORCHRUN:
        return []
    if any(_is_signals_option(word.text) for word in launch.torchrun_options):
        return []
    at = launch.torchrun_at
    after = launch.program[at].source
    if any(word.source is after for word in launch.program[at + 1 : at + 2]):
        return []  # torchrun and its options are in one variable
    return [Edit(after.end, after.end, f" {_signals_to_handle(warning)}")]


def _signals_to_handle(warning: WarningSignal) -> str:
    names = ",".join(f"SIG{name}" for name in (*_HANDLED_BY_TORCHRUN, warning.name))
    return f"--signals-to-handle={names}"


def _is_signals_option(text: str) -> bool:
    return text.replace("_", "-").startswith("--signals-to-handle")
