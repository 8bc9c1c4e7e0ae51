"""Which program of a command is the training: by its words, and by the scripts that it names."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast._environment.slurm.options import WarningSignal, batch_options, parse_signal
from holdfast._tools.doctor.signals.probe import what_it_runs
from holdfast._tools.lint.shell import NotUnderstood, parse_commands
from holdfast._tools.lint.values import find_values
from holdfast._tools.lint.wrappers import SHELLS, is_python

_DEPTH = 4
_MOST_BYTES = 1_000_000
_LAUNCHER_MODULES = ("torch.distributed.", "accelerate.", "deepspeed.")
_NOT_TRAINING_MODULES = (*_LAUNCHER_MODULES, "holdfast", "pip")
# They name the training's script among words of their own.
_LAUNCHERS = frozenset(["torchrun", "accelerate", "deepspeed", "horovodrun"])
# They start programs in a container or on another host, with another environment.
_ELSEWHERE = frozenset(
    ["docker", "podman", "nerdctl", "kubectl", "ssh", "pdsh", "ray", "sbatch", "sudo"]
)
_BY_HOSTS = frozenset(["mpirun", "mpiexec", "horovodrun"])
_HOST_OPTIONS = ("-H", "-host", "--host", "-hostfile", "--hostfile", "-f", "-machinefile")
# Words that replace or remove the PYTHONPATH of what follows.
_LOSES_PATH = re.compile(
    r"(?:^|[\s;&|('\"])(?:PYTHONPATH=(?!.*\$\{?PYTHONPATH)|unset\s[^;&|]*\bPYTHONPATH\b"
    r"|env\s[^;&|]*?(?:-u\s*|--unset=)PYTHONPATH\b|env\s+(?:-\S*i\S*|-|--ignore-environment)\s)"
)
_CLEARS = re.compile(r"--export=(?:NONE|NIL|(?!ALL\b)\w)")


@dataclass
class Target:
    """The training, by the names that a Python may be started with."""

    names: list[str] = field(default_factory=list)  # train.py, or package.train
    scripts: list[Path] = field(default_factory=list)  # shell scripts on the way
    warning: WarningSignal | None = None  # which one of them asks SLURM for
    clears: str = ""  # a word that keeps the environment from the training
    loses_path: str = ""  # what keeps PYTHONPATH from the training: a line of a script, an option
    elsewhere: str = ""  # a program that starts it where no variable of ours arrives
    is_vague: bool = False  # its name is in a variable of unknown value
    program_at: int | None = None  # the word of the command that is a program and no Python

    @property
    def label(self) -> str:
        return self.names[0] if self.names else "the training"

    def add(self, name: str) -> None:
        if "$" in name:
            self.is_vague = True
        elif name not in self.names:
            self.names.append(name)


def find_target(command: Sequence[str], folder: Path) -> Target:
    """The training in a command that is started in this folder."""
    target = Target()
    if _LOSES_PATH.search(" ".join(command)):
        target.loses_path = "the command"
    _search(list(command), folder, target, 0)
    target.names = _most_likely(target.names, is_vague=target.is_vague)
    if not target.names and not target.scripts:
        _search_program(command, target)
    return target


def interpreter_flags(words: Sequence[str]) -> str:
    """The letters of a Python's own options.

    >>> interpreter_flags(["python", "-u", "-Im", "train"])
    'uI'
    """
    found = ""
    for word in words[1:]:
        if not word.startswith("-") or word.startswith("--"):
            break
        found += word[1:].partition("m")[0].partition("c")[0]
    return found


def _most_likely(names: list[str], *, is_vague: bool = False) -> list[str]:
    """Of several programs in one script: those with "train" in their name, else all of them.

    With a name that is not known: none. Then the first Python script is taken for the training.

    >>> _most_likely(["prepare.py", "train.py", "evaluate.py"])
    ['train.py']
    """
    said = [name for name in names if "train" in name.lower() or "finetune" in name.lower()]
    return said or ([] if is_vague else names)


def _search(words: list[str], folder: Path, target: Target, depth: int) -> None:
    """Add what the words of one command start."""
    if depth > _DEPTH:
        return
    for at, word in enumerate(words):
        name, rest = word.rpartition("/")[2], words[at + 1 :]
        if _is_elsewhere(name, rest, depth):
            target.elsewhere = target.elsewhere or name
            return
        if _CLEARS.match(word) and any(each.endswith("srun") for each in words[:at]):
            target.clears = word
        if is_python(name):
            flags = interpreter_flags(words[at:])
            if set(flags) & set("EIS"):
                target.loses_path = target.loses_path or f"python -{flags}"
            kind, what = what_it_runs(words[at:])
            program = what.rpartition("/")[2]
            if kind == "text" or (kind == "module" and what.startswith(_NOT_TRAINING_MODULES)):
                continue  # another launcher, or no training
            if kind == "file" and (program in _LAUNCHERS or program == "holdfast"):
                continue
            target.add(what if kind == "module" else program)
            return
        if name in _LAUNCHERS or word.startswith(_LAUNCHER_MODULES):
            found = _named_by_launcher(rest)
            if found:
                target.add(found)
                return
            target.is_vague |= any("$" in each for each in rest)
        if name in SHELLS:
            _search_shell(rest, folder, target, depth)
            return
        if (at == 0 or name.endswith(".sh")) and _is_shell_script(folder / word):
            _search_file(folder / word, folder, target, depth)
            return
        if word.endswith(".py") and not word.startswith("-"):
            target.add(name)
            return


def _is_elsewhere(name: str, rest: Sequence[str], depth: int) -> bool:
    if name in _BY_HOSTS:
        return any(word.partition("=")[0] in _HOST_OPTIONS for word in rest)
    if name not in _ELSEWHERE or (depth and name == "sbatch"):
        return False  # a script may submit its successor: the shim prevents that
    programs = [word.rpartition("/")[2] for word in rest]
    trains = any(is_python(each) or each in SHELLS or each.endswith(".py") for each in programs)
    return trains or not depth


def _named_by_launcher(words: Sequence[str]) -> str:
    for at, word in enumerate(words):
        if word in ("-m", "--module") and at + 1 < len(words):
            return words[at + 1]
        if word.endswith(".py"):
            return word.rpartition("/")[2]
    return ""


def _search_shell(words: Sequence[str], folder: Path, target: Target, depth: int) -> None:
    at = 0
    while at < len(words) and words[at].startswith(("-", "+")):
        option = words[at]
        at += 1
        if option in ("-o", "+o", "-O", "+O"):
            at += 1
        elif not option.startswith("--") and option.endswith("c"):
            if at < len(words):
                _search_text(words[at], folder, target, depth)
                _search(list(words[at + 2 :]), folder, target, depth + 1)  # its "$@"
            return
    if at < len(words):
        _search(list(words[at + 1 :]), folder, target, depth + 1)  # its "$@"
        _search_file(folder / words[at], folder, target, depth)


def _search_file(path: Path, folder: Path, target: Target, depth: int) -> None:
    text = _read(path)
    if text is None:
        return
    target.scripts.append(path)
    for number, line in enumerate(text.splitlines(), 1):
        if _LOSES_PATH.search(line) and not line.lstrip().startswith("#"):
            target.loses_path = target.loses_path or f"{path.name}:{number}"
    option = batch_options(text).get("signal")
    target.warning = target.warning or (parse_signal(option) if option else None)
    _search_text(text, folder, target, depth)


def _search_text(text: str, folder: Path, target: Target, depth: int) -> None:
    try:
        commands = parse_commands(text)
        values = find_values(commands)
    except NotUnderstood:
        return
    for command in commands:
        words = [each.text.strip("\"'") for each in values.arguments(command.words)]
        _search(words, folder, target, depth + 1)


def _is_shell_script(path: Path) -> bool:
    first = (_read(path) or "").partition("\n")[0]
    return first.startswith("#!") and bool(re.search(r"\b(?:ba|da|z|k)?sh\b", first))


def _read(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return None


def _search_program(command: Sequence[str], target: Target) -> None:
    """A command without a Python script: an installed one, or one in another language.

    A program in another language is found only behind `--`, as in `holdfast run -- ./train`:
    elsewhere it is not known where a launcher's own words end.
    """
    at = list(command).index("--") + 1 if "--" in command else 0
    program = command[at] if at < len(command) else ""
    found = shutil.which(program) if program else None
    if found is not None and b"python" in _shebang(found):
        target.add(program.rpartition("/")[2])
    elif program and at:
        target.program_at = at


def _shebang(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            line = file.readline(200)
    except OSError:
        return b""
    return line if line.startswith(b"#!") else b""
