"""Who gets the signal: the training, or somebody who dies of it."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast._tools.lint.finding import (
    ERROR,
    HANDLED_BY_TORCHRUN,
    HINT,
    WARNING,
    Edit,
    Finding,
    add_option,
    good_lead,
    handle_by_torchrun,
    is_signals_option,
    leading_words,
    note,
    set_value,
    share_by_srun,
    signal_value,
    start_by_srun,
)
from holdfast._tools.lint.job import Job
from holdfast._tools.lint.launch import LAUNCHERS, PYTHON, TORCHRUN, Launch
from holdfast._tools.lint.signal_handlers import has_no_handler

_LATE_SECONDS = 30
_DEADLY = ("USR1", "USR2", "TERM", "HUP", "ALRM", "XCPU", "QUIT")


def check_launches(job: Job) -> Iterator[Finding]:
    """All rules about how the training is started."""
    found = job.signal
    if job.is_python:
        yield from check_python_script(job)
    for launch in job.trainings:
        if job.option("signal") is None:
            yield from check_without_signal(job, launch)
        elif found is not None and not found.to_batch:
            yield from check_signal_to_steps(job, launch)
        if launch.is_step or launch.is_exec:
            yield from check_swallowed(job, launch)
            yield from check_launcher(job, launch)
        yield from check_deaf(job, launch)


def check_python_script(job: Job) -> Iterator[Finding]:
    """A batch script that is a Python itself is the batch shell, as SLURM sees it."""
    option, found = job.option("signal"), job.signal
    if option is not None and found is not None and not found.to_batch:
        yield note(
            job,
            "signal-never-arrives",
            ERROR,
            option.start,
            f"without B: SIG{found.name} goes to the tasks of srun only, and never to the script "
            "itself, which is the training here.",
            edits=[set_value(option, signal_value(job, to_batch=True))],
        )


def check_without_signal(job: Job, launch: Launch) -> Iterator[Finding]:
    start = launch.command.start
    if launch.is_step or launch.is_exec:
        lead = good_lead(job)
        if job.is_training and lead is not None:
            yield note(
                job,
                "no-warning",
                HINT,
                start,
                "without --signal the first word of the end is SIGTERM, and SIGKILL follows after "
                "KillWait (30 s by default).",
                corrected=[f"#SBATCH --signal={'' if launch.is_step else 'B:'}USR2@{lead}"],
            )
        return
    if launch.command.is_background and _is_waited_for(job):
        return  # a trap may do what is needed; rules_batch looks at those
    lead = good_lead(job)
    edits = start_by_srun(job, launch, "")
    is_known = job.is_training and bool(job.options)
    # A program that does not know the signal would die of it, before its time.
    if edits and lead is not None and job.hears_signals(launch):
        edits = [
            add_option(job, f"--signal=USR2@{lead}"),
            *start_by_srun(job, launch, "USR2"),
        ]
    yield note(
        job,
        "no-warning",
        WARNING if is_known else HINT,
        start,
        f"at the time limit SIGTERM goes to bash alone: bash dies, and {launch.name} is killed at "
        "once, without any warning.",
        edits=edits,
        corrected=share_by_srun(job, launch),
    )


def _is_waited_for(job: Job) -> bool:
    return bool(job.traps) and any(command.text == "wait" for command in job.commands)


def _is_trapped(job: Job) -> bool:
    found = job.signal
    return found is not None and any(
        found.name in trap.signals and not trap.ignores for trap in job.traps
    )


def check_signal_to_steps(job: Job, launch: Launch) -> Iterator[Finding]:
    """Without B: the signal goes to the tasks of srun, and to nobody else."""
    found, option = job.signal, job.option("signal")
    assert found is not None
    assert option is not None
    if launch.is_step or (launch.command.is_background and _is_trapped(job)):
        return  # what is wrong with a trap is said there
    name = f"SIG{found.name}"
    if launch.is_exec:
        yield note(
            job,
            "signal-never-arrives",
            ERROR,
            launch.command.start,
            f"{name} never arrives: without B: it goes to the tasks of srun only. "
            f"{launch.name} gets SIGTERM at the limit, and SIGKILL after KillWait.",
            edits=start_by_srun(job, launch, found.name),
        )
        return
    yield note(
        job,
        "signal-never-arrives",
        ERROR,
        launch.command.start,
        f"{name} never arrives: it goes to the tasks of srun only. At the limit SIGTERM goes to "
        f"bash alone, and {launch.name} is killed at once: nothing is saved.",
        edits=start_by_srun(job, launch, found.name),
        corrected=share_by_srun(job, launch),
    )


def check_swallowed(job: Job, launch: Launch) -> Iterator[Finding]:
    """The signal goes to the leader of a task, not to its children."""
    swallow = launch.swallow
    if swallow is None:
        return
    found = job.signal
    gets_it = found is not None and found.to_batch == (not launch.is_step)
    name = f"SIG{found.name}" if found is not None and gets_it else "SIGTERM"
    seconds = found.seconds if found is not None else 0
    when = f", {seconds} to {seconds + _LATE_SECONDS} s before the limit" if gets_it else ""
    exec_edits = []
    if swallow.exec_at is not None:
        exec_edits = [Edit(swallow.exec_at, swallow.exec_at, "exec ")]
    corrected = () if exec_edits else _without_wrapper(launch)
    start = launch.command.start
    if swallow.how == "may wait":
        yield note(
            job,
            "wrapper-may-wait",
            HINT,
            start,
            f"{name} goes to bash: from 5.1 on it becomes its last command, before that it waits "
            f"for it, dies of the signal, and {launch.name} with it.",
            edits=exec_edits,
            corrected=corrected,
        )
        return
    if found is None and not job.is_training:
        return
    where = f" (see {swallow.place})" if swallow.place else ""
    yield note(
        job,
        "wrapper-swallows-signal",
        ERROR if swallow.is_certain and gets_it else WARNING,
        start,
        f"{name} goes to the task's first process, {swallow.who}{where}: it dies of it{when}, and "
        f"{launch.name} below it is killed without having seen it.",
        edits=exec_edits,
        corrected=corrected,
    )


def _without_wrapper(launch: Launch) -> tuple[str, ...]:
    swallow = launch.swallow
    assert swallow is not None
    program = launch.program
    written = " ".join(dict.fromkeys(word.source.text for word in program))
    if swallow.place:
        return (f"exec {' '.join(word.text for word in program)}   ({swallow.place})",)
    if swallow.who.endswith("-c"):
        return ("srun " + " ".join(word.text for word in program),)
    if swallow.who == "conda run":
        return ("conda activate …", f"srun {written}")
    if launch.is_step:  # what measures or bounds the time belongs outside
        return (f"{swallow.who} … srun {written}",)
    return (f"exec {written}",)


def check_launcher(job: Job, launch: Launch) -> Iterator[Finding]:
    """Launchers of ranks die of a signal that they do not handle."""
    found = job.signal
    if found is None or launch.is_led or found.name in HANDLED_BY_TORCHRUN:
        return
    if found.to_batch and not launch.is_exec:
        return
    if not found.to_batch and not launch.is_step:
        return
    if launch.kind == TORCHRUN:
        flags = [w.text for w in launch.torchrun_options if is_signals_option(w.text)]
        if flags and (f"SIG{found.name}" in flags[-1] or "=" not in flags[-1] or "$" in flags[-1]):
            return
        how = f"torchrun dies of it (status {found.status}) and ends its workers"
    elif launch.kind in LAUNCHERS:
        how = f"{launch.kind}'s launcher does not handle it, and dies of it"
    else:
        return
    if launch.is_guarded:
        how = f"{launch.kind} ignores it, and does not pass it on"
    edits = handle_by_torchrun(job, launch)
    corrected: tuple[str, ...] = ()
    if job.uses_holdfast(launch) and launch.is_step and launch.is_editable:
        # The leader gives the signal to the ranks by itself, and waits until all is durable.
        at = launch.program[0].source.start
        edits = [Edit(at, at, " ".join(leading_words(job, launch, found.name)) + " ")]
        if launch.swallow is not None:
            return
    elif not edits:
        flag = f"--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIG{found.name}"
        corrected = (f"{'srun ' if launch.kind in LAUNCHERS else ''}torchrun {flag} …",)
    yield note(
        job,
        "launcher-dies",
        ERROR if launch.kind == TORCHRUN else WARNING,
        launch.command.start,
        f"SIG{found.name} goes to the launcher, not to the ranks: {how}.",
        edits=edits,
        corrected=corrected,
    )


def check_deaf(job: Job, launch: Launch) -> Iterator[Finding]:
    """A program that nobody has told of the signal dies of it: with it, less is trained."""
    found = job.signal
    if found is None or found.name not in _DEADLY or launch.kind != PYTHON or not launch.script:
        return
    # `holdfast run` keeps a signal back that nobody catches; of the others we cannot see enough.
    if launch.is_led or launch.is_enclosed or launch.is_inside or launch.swallow is not None:
        return
    if launch.is_guarded:
        return  # it does not die of it
    if any(found.name in trap.signals for trap in job.traps):
        return
    if not has_no_handler(launch.script, job.read):
        return
    arrives = launch.is_exec if found.to_batch else launch.is_step
    name, early = f"SIG{found.name}", f"{found.seconds} to {found.seconds + _LATE_SECONDS} s"
    dies = "it dies of it" if arrives else "once it arrives, the training dies of it"
    yield note(
        job,
        "signal-not-handled",
        WARNING,
        launch.command.start,
        f"{launch.script} installs no handler for {name}: {dies}, {early} before the limit.",
        corrected=[
            f"with holdfast.Run(…) as run:   (in {launch.script}: it saves, and comes back)",
            "or no --signal at all: it is trained until the limit, and not saved",
        ],
    )
