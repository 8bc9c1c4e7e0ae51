"""Addresses, ranks, folders and names that do not fit the place where the job will run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from holdfast._tools.lint.finding import ERROR, HINT, WARNING, Edit, LintFinding, report, set_value
from holdfast._tools.lint.job import BatchScript
from holdfast._tools.lint.launch import TORCHRUN
from holdfast._tools.lint.shell import Token, is_assignment

_FIRST_HOST = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
_OWN_PORT = "$((20000 + SLURM_JOB_ID % 10000))"
_LOCAL = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0")
_OF_TASK = re.compile(r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\}?")
_RANK_NAMES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GLOBAL_RANK", "GROUP_RANK")
_PLACEHOLDER = re.compile(
    r"<(?i:your|my|path|insert|enter|replace|fill|change)[\w .:/-]*>|"
    r"(?<![\w$])YOUR_\w+|(?<![\w$/{])your[_-]\w+|/path/to/[^\s\"']*|"
    r"\bFIXME\b|\bCHANGE_?ME\b|\bREPLACE_?ME\b"
)
# In a command <pad> or <s> may be meant literally; in an option nothing like it is.
_IN_OPTION = re.compile(rf"<[A-Za-z][\w .:-]*>|{_PLACEHOLDER.pattern}")
_PLACEHOLDER_VALUE = re.compile(r"x{3,}|TODO|TBD|\?{2,}|\.{3}", re.I)


def check_places(job: BatchScript) -> Iterator[LintFinding]:
    """All rules about addresses, folders and names."""
    yield from _check_log_folders(job)
    yield from _check_array_log(job)
    yield from _check_placeholders(job)
    if job.is_understood:
        yield from _check_addresses(job)
        yield from _check_launcher_addresses(job)
        yield from _check_ranks(job)


def _settings(job: BatchScript) -> Iterator[tuple[str, str, Token]]:
    """Every variable that the script sets: name, value as written, and the word."""
    for command in job.commands:
        for token in (*command.assignments, *command.words):
            if is_assignment(token.text) and (
                token in command.assignments or command.text in ("export", "env", "declare")
            ):
                name, _, value = token.text.partition("=")
                yield name, value, token


def _local_address(job: BatchScript, at: int, edit: Edit) -> LintFinding:
    text = (
        f"on {job.nodes} nodes each node looks for the others at itself: the ranks never meet, and "
        "the job hangs until they time out."
    )
    return report(job, "master-addr-fixed", ERROR, at, text, edits=[edit])


def _fixed_port(job: BatchScript, at: int, port: str, edit: Edit) -> LintFinding:
    text = f"two jobs on one node want port {port}: the second dies at its start, or joins the "
    return report(job, "master-port-fixed", WARNING, at, f"{text}first.", edits=[edit])


def _check_addresses(job: BatchScript) -> Iterator[LintFinding]:
    is_shared = job.option("exclusive") is None
    for name, value, token in _settings(job):
        start = token.start + len(name) + 1
        plain = value.strip("'\"")
        if name == "MASTER_ADDR" and job.nodes > 1 and re.fullmatch(r"[\w.:-]+", plain):
            edit = Edit(start, token.end, _FIRST_HOST)
            if _LOCAL.fullmatch(plain):
                yield _local_address(job, token.start, edit)
            else:
                text = (
                    f"on {job.nodes} nodes it is the first node only by chance: the ranks never "
                    "meet, and the job hangs until they time out."
                )
                yield report(job, "master-addr-fixed", WARNING, token.start, text, edits=[edit])
        if name == "MASTER_PORT" and plain.isdecimal() and is_shared:
            yield _fixed_port(job, token.start, plain, Edit(start, token.end, _OWN_PORT))


def _check_launcher_addresses(job: BatchScript) -> Iterator[LintFinding]:
    is_shared = job.option("exclusive") is None
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
            if job.nodes > 1 and address and _LOCAL.fullmatch(address):
                edit = Edit(start, start + len(address), f'"{_FIRST_HOST}"')
                yield _local_address(job, source.start, edit)
            number = port if is_endpoint else value if option == "--master-port" else ""
            if is_shared and number.isdecimal() and number != "0":
                edit = Edit(end - len(number), end, _OWN_PORT)
                yield _fixed_port(job, source.start, number, edit)


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
        yield report(job, rule, ERROR, token.start, text, corrected=[right])
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
                text = f"{match[1]} is expanded in the batch script, where it is 0: every node "
                right = f"srun bash -c 'exec torchrun --node-rank=${match[1]} …'"
                at = word.source.start
                yield report(job, rule, ERROR, at, f"{text}gets the rank 0.", corrected=[right])
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
        if option is None or "/" not in option.value or re.search(r"[<{$]", option.value):
            continue
        written = option.value.rpartition("/")[0]
        if written in seen or not written:
            continue
        seen.add(written)
        title = job.option("job-name")
        folder = written.replace("%x", title.value) if title is not None else written
        rule, at = "log-folder-missing", option.start
        if re.search(r"%\d*[jJAasN]", folder):
            text = f"{written} has a name that is not known before the job starts. {fails}"
            edits = [set_value(option, _without_pattern(option.value))]
            yield report(job, rule, ERROR, at, text, edits=edits)
        elif "%" not in folder and _is_missing(job, folder):
            text = f"{folder} does not exist. {fails}"
            right = [f"mkdir -p {folder}   (before sbatch)"]
            yield report(job, rule, ERROR, at, text, corrected=right, folder=folder)


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
        places = [job.folder, job.cwd] if chdir is None else [job.folder / chdir.value]
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
        if option is None or option.value == "/dev/null" or "$" in option.value:
            continue
        if re.search(r"%\d*[ajJ]", option.value):
            continue
        base = re.sub(r"%\d*A", "%A_%a", option.value)
        if base == option.value:
            stem, dot, suffix = option.value.rpartition(".")
            is_suffix = bool(dot) and "/" not in suffix
            base = f"{stem}-%A_%a.{suffix}" if is_suffix else f"{option.value}-%A_%a"
        text = f"all tasks of the array write to {option.value}, over each other."
        edits = [set_value(option, base)]
        yield report(job, "array-log-shared", WARNING, option.start, text, edits=edits)


def _check_placeholders(job: BatchScript) -> Iterator[LintFinding]:
    """What a template leaves to be filled in."""
    found: dict[int, LintFinding] = {}
    for option in job.options:
        if option.name == "comment" or "{{" in option.value:
            continue  # free text; or a program fills it in
        match = _IN_OPTION.search(option.value)
        value = match[0] if match else option.value
        if match is not None or _PLACEHOLDER_VALUE.fullmatch(option.value):
            text = (
                f"{value} still has to be filled in: sbatch takes --{option.name}={option.value} "
                "as it stands."
            )
            found[option.line] = report(job, "placeholder", ERROR, option.start, text)
    for command in job.commands:
        if command.text in ("echo", "printf", "sed", "cat", "grep"):
            continue
        for token in (*command.assignments, *command.words):
            match = _PLACEHOLDER.search(token.text)
            line = job.line_of(token.start)
            if match is not None and line not in found:
                text = f"{match[0]} still has to be filled in."
                found[line] = report(job, "placeholder", WARNING, token.start, text)
    yield from found.values()
    for option in job.options:
        if option.line not in found and "example.com" in option.value:
            text = f"{option.value} is a placeholder, not an address."
            yield report(job, "placeholder", HINT, option.start, text)
