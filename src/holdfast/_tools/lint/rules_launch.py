"""Which process receives the signal: the training, or a launcher that dies of it."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast._environment.slurm.options import WarningSignal
from holdfast._tools.lint.finding import (
    ERROR,
    HANDLED_BY_TORCHRUN,
    HINT,
    SLACK_SECONDS,
    WARNING,
    Edit,
    LintFinding,
    add_option,
    good_lead,
    handle_by_torchrun,
    is_signals_option,
    leading_words,
    report,
    set_value,
    share_by_srun,
    signal_value,
    signals_to_handle,
    start_by_srun,
)
from holdfast._tools.lint.job import BatchScript
from holdfast._tools.lint.launch import LAUNCHERS, PYTHON, TORCHRUN, Launch
from holdfast._tools.lint.signal_handlers import has_no_handler

_DEADLY = ("USR1", "USR2", "TERM", "HUP", "ALRM", "XCPU", "QUIT")


def check_launches(job: BatchScript) -> Iterator[LintFinding]:
    """All rules about how the training is started."""
    warning = job.signal
    if job.is_python:
        yield from _check_python_script(job)
    for launch in job.trainings:
        if job.option("signal") is None:
            yield from _check_without_signal(job, launch)
        elif warning is not None and not warning.to_batch:
            yield from _check_signal_to_steps(job, launch, warning)
        if launch.is_step or launch.is_exec:
            yield from _check_swallowed(job, launch)
            yield from _check_launcher(job, launch)
        yield from _check_handlers(job, launch)


def _check_python_script(job: BatchScript) -> Iterator[LintFinding]:
    """A batch script in Python is the batch shell, for SLURM."""
    option, warning = job.option("signal"), job.signal
    if option is not None and warning is not None and not warning.to_batch:
        text = (
            f"without B: SIG{warning.name} goes to the tasks of srun only, and never to the script "
            "itself, which is the training here."
        )
        edits = [set_value(option, signal_value(option, warning, to_batch=True))]
        yield report(job, "signal-never-arrives", ERROR, option.start, text, edits=edits)


def _check_without_signal(job: BatchScript, launch: Launch) -> Iterator[LintFinding]:
    start, lead = launch.command.start, good_lead(job)
    if launch.is_step or launch.is_exec:
        if job.is_training and lead is not None:
            text = (
                "without --signal the first word of the end is SIGTERM, and SIGKILL follows after "
                "KillWait (30 s by default)."
            )
            right = f"#SBATCH --signal={'' if launch.is_step else 'B:'}USR2@{lead}"
            yield report(job, "no-warning", HINT, start, text, corrected=[right])
        return
    is_waited_for = bool(job.traps) and any(command.text == "wait" for command in job.commands)
    if launch.command.is_background and is_waited_for:
        return  # a trap may do what is needed: rules_batch checks it
    edits = start_by_srun(job, launch, "")
    # A program that does not know the signal would die of it, before the limit.
    if edits and lead is not None and job.handles_signals(launch):
        edits = [add_option(job, f"--signal=USR2@{lead}"), *start_by_srun(job, launch, "USR2")]
    severity = WARNING if job.is_training and job.options else HINT
    text = (
        f"at the time limit SIGTERM goes to bash alone: bash dies, and {launch.name} is killed at "
        "once, without any warning."
    )
    corrected = share_by_srun(job, launch)
    yield report(job, "no-warning", severity, start, text, edits=edits, corrected=corrected)


def _check_signal_to_steps(
    job: BatchScript, launch: Launch, warning: WarningSignal
) -> Iterator[LintFinding]:
    """Without B: the signal goes to the tasks of srun alone."""
    is_trapped = any(warning.name in trap.signals and not trap.ignores for trap in job.traps)
    if launch.is_step or (launch.command.is_background and is_trapped):
        return  # another rule checks the trap
    start = launch.command.start
    edits = start_by_srun(job, launch, warning.name)
    text = f"SIG{warning.name} never arrives: "
    if launch.is_exec:
        text += (
            "without B: it goes to the tasks of srun only. "
            f"{launch.name} gets SIGTERM at the limit, and SIGKILL after KillWait."
        )
        yield report(job, "signal-never-arrives", ERROR, start, text, edits=edits)
        return
    text += (
        "it goes to the tasks of srun only. At the limit SIGTERM goes to "
        f"bash alone, and {launch.name} is killed at once: nothing is saved."
    )
    shared = share_by_srun(job, launch)
    yield report(job, "signal-never-arrives", ERROR, start, text, edits=edits, corrected=shared)


def _check_swallowed(job: BatchScript, launch: Launch) -> Iterator[LintFinding]:
    """The signal goes to the first process of a task, not to its children."""
    swallow, warning = launch.swallow, job.signal
    if swallow is None:
        return
    name, when, gets_it = "SIGTERM", "", False
    if warning is not None and warning.to_batch == (not launch.is_step):
        name, gets_it = f"SIG{warning.name}", True
        when = f", {warning.seconds} to {warning.seconds + SLACK_SECONDS} s before the limit"
    at = swallow.exec_at
    edits = [] if at is None else [Edit(at, at, "exec ")]
    corrected = () if edits else _without_wrapper(launch)
    start = launch.command.start
    if swallow.how == "may wait":
        text = (
            f"{name} goes to bash: from 5.1 on it becomes its last command, before that it waits "
            f"for it, dies of the signal, and {launch.name} with it."
        )
        yield report(job, "wrapper-may-wait", HINT, start, text, edits=edits, corrected=corrected)
        return
    if warning is None and not job.is_training:
        return
    where = f" (see {swallow.place})" if swallow.place else ""
    severity = ERROR if swallow.is_certain and gets_it else WARNING
    text = (
        f"{name} goes to the task's first process, {swallow.who}{where}: it dies of it{when}, and "
        f"{launch.name} below it is killed without having seen it."
    )
    rule = "wrapper-swallows-signal"
    yield report(job, rule, severity, start, text, edits=edits, corrected=corrected)


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
    if warning is None or launch.is_led or warning.name in HANDLED_BY_TORCHRUN:
        return
    if not (launch.is_exec if warning.to_batch else launch.is_step):
        return
    if launch.kind == TORCHRUN:
        flags = [w.text for w in launch.torchrun_options if is_signals_option(w.text)]
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
    edits = handle_by_torchrun(job, launch)
    corrected: tuple[str, ...] = ()
    if job.uses_holdfast(launch) and launch.is_step and launch.is_editable:
        # `holdfast run` sends the signal to the ranks itself, and waits until all is durable.
        if launch.swallow is not None:
            return
        at = launch.program[0].source.start
        edits = [Edit(at, at, " ".join(leading_words(job, launch, warning.name)) + " ")]
    elif not edits:
        before = "srun " if launch.kind in LAUNCHERS else ""
        corrected = (f"{before}torchrun {signals_to_handle(warning)} …",)
    severity = ERROR if launch.kind == TORCHRUN else WARNING
    text = f"SIG{warning.name} goes to the launcher, not to the ranks: {how}."
    at = launch.command.start
    yield report(job, "launcher-dies", severity, at, text, edits=edits, corrected=corrected)


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
    text = (
        f"{launch.script} installs no handler for SIG{warning.name}: {dies}, {warning.seconds} to "
        f"{warning.seconds + SLACK_SECONDS} s before the limit."
    )
    corrected = [
        f"with holdfast.Run(…) as run:   (in {launch.script}: it saves, and comes back)",
        "or no --signal at all: it is trained until the limit, and not saved",
    ]
    at = launch.command.start
    yield report(job, "signal-not-handled", WARNING, at, text, corrected=corrected)
