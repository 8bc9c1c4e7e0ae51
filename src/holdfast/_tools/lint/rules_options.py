"""What the options and settings of a script lose: the warning, the log, the ranks or the job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from holdfast._environment.slurm import options as slurm
from holdfast._tools.lint.finding import (
    SLACK_SECONDS,
    Edit,
    LintFinding,
    before_the_limit,
    set_value,
    signal_value,
)
from holdfast._tools.lint.job import BatchScript
from holdfast._tools.lint.launch import TORCHRUN
from holdfast._tools.lint.shell import NotUnderstood, Token, find_comments, is_assignment

_ABSURD_LEAD_SECONDS = 15
# In lower case behind a blank it is prose: how to submit the script.
_LIKE_AN_OPTION = re.compile(r"(?:#\s*SBATCH|##+\s*SBATCH|#[Ss][Bb][Aa][Tt][Cc][Hh])(?=\s)")


def check_options(job: BatchScript) -> Iterator[LintFinding]:
    rules = [_check_ignored_lines, _check_signal, _check_lead, _check_requeue]
    rules += [_check_log_folders, _check_array_log]
    if job.is_understood:
        rules += [_check_addresses, _check_ranks]
    for rule in rules:
        yield from rule(job)


def _check_ignored_lines(job: BatchScript) -> Iterator[LintFinding]:
    """Lines that look like options, and are none for sbatch."""
    try:
        comments = find_comments(job.text)
    except NotUnderstood:
        return
    end = slurm.options_end(job.text)
    taken = {option.name for option in job.options}
    for start in comments:
        line = job.text[start:].partition("\n")[0]
        stop, line_start = start + len(line), job.text.rfind("\n", 0, start) + 1
        match = _LIKE_AN_OPTION.match(line)
        if match is None or not re.match(r"\s+-", line[match.end() :]):
            continue
        names = {o.name for o in slurm.parse_option_line(line[match.end() :], 0, 0)}
        if job.text[line_start:start].strip() or not names:
            continue
        is_exact = match[0] == "#SBATCH" and line_start == start
        right = "#SBATCH" + line[match.end() :]
        rule, severity, edits = "option-too-late", "error", list[Edit]()
        if is_exact and start >= end:
            if not names & taken:
                at = job.options_at
                edits = [Edit(at, at, right + "\n"), Edit(start, min(stop + 1, len(job.text)), "")]
            text = f"sbatch ignores options after the first command (line {job.line_of(end)})."
        elif not is_exact and start < end:
            is_put_away = match[0].startswith("##") or bool(names & taken)
            rule, severity = "option-is-a-comment", "hint" if is_put_away else "warning"
            edits = [] if is_put_away else [Edit(line_start, stop, right)]
            text = "sbatch takes this line for a comment: it does not begin with #SBATCH."
        else:
            continue
        yield job.report(rule, severity, start, text, edits=edits, corrected=[right])


def _check_signal(job: BatchScript) -> Iterator[LintFinding]:
    option, warning = job.option("signal"), job.signal
    if option is not None and warning is not None and warning.name in ("KILL", "STOP"):
        when = before_the_limit(warning)
        text = f"SIG{warning.name} cannot be caught: it ends the training {when}, without a save."
        edits = [set_value(option, f"USR2@{warning.seconds}")]
        yield job.report("signal-cannot-be-caught", "error", option.start, text, edits=edits)


def _check_lead(job: BatchScript) -> Iterator[LintFinding]:
    """Whether the warning leaves time to save, and comes at all."""
    time, option, warning = job.option("time"), job.option("signal"), job.signal
    if time is not None and job.limit_seconds is None:
        return  # unlimited, filled in later, or refused by sbatch
    if time is None and job.is_training and job.options:
        text = "there is no --time: the partition sets the limit, which may be a few minutes."
        at = 0 if option is None else option.start
        right = ["#SBATCH --time=8:00:00"]
        yield job.report("time-missing", "hint", at, text, corrected=right)
    if option is None or warning is None:
        return
    limit, lead, needed = job.limit_seconds, warning.seconds, job.around.needed_seconds
    better = job.good_lead()
    edits = []
    if better is not None and better != lead:
        other = slurm.WarningSignal(warning.name, better, warning.to_batch)
        edits = [set_value(option, signal_value(option, other, to_batch=warning.to_batch))]
    rule, severity = "lead-too-short", "error"
    if limit is not None and lead >= limit - SLACK_SECONDS:
        rule, severity = "lead-too-long", "warning"
        text = (
            f"the signal comes {before_the_limit(warning)} of {limit:.0f} s: it can come before "
            "the training has started, and is sent once only."
        )
    elif needed is not None and lead < needed:
        around = job.around
        of_run = f" of {around.run_name}" if around.run_name else ""
        text = f"{lead} s are too short: a save{of_run} took up to {around.save_seconds:.3g} s"
        if around.step_seconds is not None:
            text += f", after a step of up to {around.step_seconds:.3g} s"
        text += ". The training is killed before its state is safe."
    elif needed is None and lead < _ABSURD_LEAD_SECONDS:
        severity = "warning"
        text = f"{lead} s are too short to end a step and to write a checkpoint before SIGTERM."
    else:
        return
    yield job.report(rule, severity, option.start, text, edits=edits)


def _check_requeue(job: BatchScript) -> Iterator[LintFinding]:
    """Whether the job comes back, and its log with it."""
    refused, wanted = job.option("no-requeue"), job.option("requeue")
    is_refused = refused is not None and (wanted is None or wanted.start < refused.start)
    # Without any option in the script, they are on the command line; and a script that submits
    # the next job itself does not need this one back.
    expects_return = job.is_training and bool(job.options) and not job.is_resubmitted
    last = max(0, job.options_at - 1)
    if refused is not None and is_refused and expects_return:
        text = "with --no-requeue the job never starts again after a preemption or a node failure."
        edits = [job.remove(refused.start, refused.end, around="#SBATCH")]
        if wanted is None:
            edits = [Edit(refused.start, refused.end, "--requeue")]
        yield job.report("requeue-refused", "warning", refused.start, text, edits=edits)
    elif wanted is None and not is_refused and expects_return:
        text = (
            "without --requeue the site's setting (JobRequeue) decides whether the job comes back "
            "after a preemption or a node failure."
        )
        edits = [job.add_option("--requeue")]
        yield job.report("requeue-missing", "warning", last, text, edits=edits)
    mode, output = job.option("open-mode"), job.option("output")
    if is_refused or (wanted is None and not expects_return):
        return
    name = "slurm-%j.out" if output is None else output.value
    if name == "/dev/null" or (mode and "append".startswith(mode.value.lower() or "?")):
        return
    text = f"a requeued job truncates its log: the output of earlier attempts in {name} is lost."
    at = last if output is None else output.start
    edits = [job.add_option("--open-mode=append")]
    if mode is not None:
        at, edits = mode.start, [set_value(mode, "append")]
    yield job.report("log-truncated", "warning", at, text, edits=edits)


# -- Addresses, ranks, folders and names that do not fit where the job will run --------------------
_FIRST_HOST = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
_OWN_PORT = "$((20000 + SLURM_JOB_ID % 10000))"
LOCAL_ADDRESS = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0")
_OF_TASK = re.compile(r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\}?")
_RANK_NAMES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GLOBAL_RANK", "GROUP_RANK")


def _settings(job: BatchScript) -> Iterator[tuple[str, str, Token]]:
    """Every variable that the script sets: name, value as written, and the word."""
    for command in job.commands:
        for token in (*command.assignments, *command.words):
            if is_assignment(token.text) and (
                token in command.assignments or command.text in ("export", "env", "declare")
            ):
                name, _, value = token.text.partition("=")
                yield name, value, token


def _check_addresses(job: BatchScript) -> Iterator[LintFinding]:
    """Where ranks meet: in variables, and in the options of torchrun."""
    for name, value, token in _settings(job):
        start, plain = token.start + len(name) + 1, value.strip("'\"")
        if name == "MASTER_ADDR" and re.fullmatch(r"[\w.:-]+", plain):
            edit = Edit(start, token.end, _FIRST_HOST)
            yield from _check_host(job, plain, token.start, edit)
        if name == "MASTER_PORT":
            yield from _check_port(job, plain, token.start, Edit(start, token.end, _OWN_PORT))
    for launch in job.launches:
        if launch.kind != TORCHRUN or launch.is_inside:
            continue
        words = list(launch.program)
        for at, word in enumerate(words):
            option, equals, value = word.text.replace("_", "-").partition("=")
            source, is_same = word.source, bool(equals)
            if not is_same and at + 1 < len(words):
                source, value = words[at + 1].source, words[at + 1].text
            if source.text != (word.text if is_same else value):
                continue  # it is in a variable, or in quotes
            start, end = source.end - len(value), source.end
            host, _, port = value.rpartition(":")
            is_endpoint = option == "--rdzv-endpoint"
            address = host if is_endpoint else value if option == "--master-addr" else ""
            if LOCAL_ADDRESS.fullmatch(address):
                edit = Edit(start, start + len(address), f'"{_FIRST_HOST}"')
                yield from _check_host(job, address, source.start, edit)
            number = port if is_endpoint else value if option == "--master-port" else ""
            if number != "0":
                edit = Edit(end - len(number), end, _OWN_PORT)
                yield from _check_port(job, number, source.start, edit)


def _check_host(job: BatchScript, host: str, at: int, edit: Edit) -> Iterator[LintFinding]:
    if job.nodes > 1:
        is_local = LOCAL_ADDRESS.fullmatch(host)
        why = "each node looks for the others at itself" if is_local else "this may be another one"
        text = f"on {job.nodes} nodes {why}: the ranks never meet, and the job hangs."
        severity = "error" if is_local else "warning"
        yield job.report("master-addr-fixed", severity, at, text, edits=[edit])


def _check_port(job: BatchScript, port: str, at: int, edit: Edit) -> Iterator[LintFinding]:
    if port.isdecimal() and job.option("exclusive") is None:
        text = (
            f"two jobs on one node want port {port}: the second dies at once, or joins the first."
        )
        yield job.report("master-port-fixed", "warning", at, text, edits=[edit])


def _check_ranks(job: BatchScript) -> Iterator[LintFinding]:
    """The batch shell has SLURM_PROCID=0: expanded there, every task gets 0."""
    steps = [launch for launch in job.launches if launch.is_step]
    if job.tasks < 2 or not steps:
        return
    rule = "rank-of-batch-script"
    sets_ranks = any(launch.kind == TORCHRUN or launch.is_led for launch in steps)
    for name, value, token in _settings(job):
        match = _OF_TASK.fullmatch(value.strip("\"'"))
        if sets_ranks or match is None or value.startswith("'") or name not in _RANK_NAMES:
            continue
        text = f"{match[1]} is 0 in the batch script: all {job.tasks} tasks get {name}=0."
        right = f"srun bash -c 'export {name}=${match[1]}; exec \"$@\"' _ python …"
        yield job.report(rule, "error", token.start, text, corrected=[right])
    for launch in steps:
        if launch.kind != TORCHRUN or launch.is_inside:
            continue
        if any("c10d" in word.text for word in launch.program):
            continue
        for word in launch.program:
            match = _OF_TASK.search(word.source.text)
            written = job.text[word.source.start : word.source.end]
            if match is None or written != word.source.text or "'" in written:
                continue
            if "rank" in word.text or _OF_TASK.fullmatch(word.text.strip('"')):
                text = f"{match[1]} is 0 in the batch script: every node gets the rank 0."
                right = f"srun bash -c 'exec torchrun --node-rank=${match[1]} …'"
                yield job.report(rule, "error", word.source.start, text, corrected=[right])
                break


def _check_log_folders(job: BatchScript) -> Iterator[LintFinding]:
    """SLURM makes no folders: the job fails before its first line."""
    fails = (
        "SLURM does not make it, and the job fails at once (JobLaunchFailure, 0:53): "
        "nothing runs, and no log says why. A mkdir in the script comes too late."
    )
    seen: set[str] = set()
    for name in ("output", "error"):
        option = job.option(name)
        if option is None or re.search(r"[<{$]", option.value):
            continue
        written = option.value.rpartition("/")[0]
        if written in seen or not written:
            continue
        seen.add(written)
        title = job.option("job-name")
        folder = written.replace("%x", title.value) if title is not None else written
        rule, at = "log-folder-missing", option.start
        if re.search(r"%\d*[jJAasN]", folder):
            text = f"the name of {written} is not known before the job starts. {fails}"
            edits = [set_value(option, _without_pattern(option.value))]
            yield job.report(rule, "error", at, text, edits=edits)
        elif "%" not in folder and _is_missing(job, folder):
            text = f"{folder} does not exist. {fails}"
            right = [f"mkdir -p {folder}   (before sbatch)"]
            yield job.report(rule, "error", at, text, corrected=right, folder=folder)


def _without_pattern(value: str) -> str:
    """The same log with the patterns in the name of the file.

    >>> _without_pattern("logs/%j/out.txt")
    'logs/%j-out.txt'
    """
    folders, _, name = value.rpartition("/")
    parts = folders.split("/")
    first = next(at for at, part in enumerate(parts) if "%" in part)
    return "/".join([*parts[:first], "-".join([*parts[first:], name])])


def _is_missing(job: BatchScript, folder: str) -> bool:
    path = Path(folder)
    if not path.is_absolute():
        chdir = job.option("chdir")
        around = job.around
        places = [around.folder, around.cwd] if chdir is None else [around.folder / chdir.value]
        if chdir is not None and not places[0].is_dir():
            return False
        return not any((place / path).is_dir() for place in places)
    # The disk of another machine is not known here, and every machine has a /home.
    nearest = next((each for each in (path, *path.parents) if _is_folder(each)), path)
    return nearest != path and len(nearest.parts) > 2


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # the folder belongs to another user
        return False


def _check_array_log(job: BatchScript) -> Iterator[LintFinding]:
    array = job.option("array")
    if array is None or not re.search(r"[-,]", array.value):
        return
    for name in ("output", "error"):
        option = job.option(name)
        if option is None or re.search(r"\$|%\d*[ajJ]|^/dev/null$", option.value):
            continue
        base = re.sub(r"%\d*A", "%A_%a", option.value)
        if base == option.value:
            stem, dot, suffix = option.value.rpartition(".")
            is_suffix = bool(dot) and "/" not in suffix
            base = f"{stem}-%A_%a.{suffix}" if is_suffix else f"{option.value}-%A_%a"
        text = f"all tasks of the array write to {option.value}, over each other."
        edits = [set_value(option, base)]
        yield job.report("array-log-shared", "warning", option.start, text, edits=edits)
