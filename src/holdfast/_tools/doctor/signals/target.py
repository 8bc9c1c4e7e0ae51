"""Which program of a command is the training: by its words, and by the scripts that it names."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast._environment.slurm.options import batch_options, parse_signal
from holdfast._tools.doctor.signals.probe import read_python
from holdfast._tools.lint.launch import SHELLS, is_python, shell_input
from holdfast._tools.lint.shell import NotUnderstood, Values, read_script

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
_OF_A_SHELL = re.compile(r"\b(?:ba|da|z|k)?sh\b")
_CLEARS = re.compile(r"--export=(?:NONE|NIL|(?!ALL\b)\w)")


def find_target(command: Sequence[str], folder: Path) -> Target:
    target = Target(list(command), folder)
    target.search(target.command, 0)
    if _LOSES_PATH.search(" ".join(command)):
        target.lose_path("the command")
    # Of several programs in one script, those with "train" in their name. If a name is not known
    # and none has that word: no name, and then the first Python script counts as the training.
    words = ("train", "finetune")
    likely = [name for name in target.names if any(word in name.lower() for word in words)]
    target.names = likely or ([] if target.is_vague else target.names)
    if not target.names and not target.scripts:
        # An installed program may be a Python.
        found = shutil.which(target.command[0])
        if found is not None and "python" in shebang(Path(found)):
            target.add(target.command[0].rpartition("/")[2])
    return target


def shebang(path: Path) -> str:
    """The first line of a script; empty for another file."""
    with contextlib.suppress(OSError, ValueError):
        if path.is_file():  # a pipe would block
            with path.open("rb") as file:
                line = file.readline(512).decode(errors="replace")
            return line if line.startswith("#!") else ""
    return ""


@dataclass
class Target:
    """The training, by the names that a Python may be started with."""

    command: list[str]
    folder: Path  # in which the command is started
    names: list[str] = field(default_factory=list)  # train.py, or package.train
    scripts: dict[Path, str] = field(default_factory=dict)  # the text of shell scripts on the way
    warning_name: str = ""  # of the signal that one of them asks SLURM for
    warns_batch: bool = False  # it goes to the shell of the job, not to the tasks
    refusal: tuple[str, str] | None = None  # why the probe cannot replace it, and what to do
    is_vague: bool = False  # its name is in a variable of unknown value

    @property
    def label(self) -> str:
        return self.names[0] if self.names else "the training"

    def read(self, name: str) -> str | None:
        """The text of a file that the command names; None for anything else."""
        path = self.folder / name
        with contextlib.suppress(OSError, ValueError):
            # A pipe would block.
            if path.is_file() and path.stat().st_size <= _MOST_BYTES:
                return path.read_text(errors="replace")
        return None

    def lose_path(self, what: str) -> None:
        found = f"{what} keeps PYTHONPATH from the training, and so the probe"
        remedy = "leave it out for this test, or write PYTHONPATH=…:$PYTHONPATH there"
        self.refusal = self.refusal or (found, remedy)

    def add(self, name: str) -> None:
        if "$" in name:
            self.is_vague = True
        elif name not in self.names:
            self.names.append(name)

    def search(self, words: list[str], depth: int) -> None:
        if depth > _DEPTH:
            return
        for at, word in enumerate(words):
            name, rest = word.rpartition("/")[2], words[at + 1 :]
            if _is_elsewhere(name, rest, depth):
                remedy = f"behind {name}, where the training runs: {name} … holdfast doctor -- …"
                if name == "sbatch":
                    remedy = "in an allocation (salloc): holdfast doctor -- bash job.sbatch"
                found = f"{name} starts the training where the probe does not come"
                self.refusal = self.refusal or (found, f"try it {remedy}")
                return
            if _CLEARS.match(word) and any(each.endswith("srun") for each in words[:at]):
                found = f"with {word} the probe does not reach the tasks"
                remedy = "leave it out for this test: srun passes the environment on by itself"
                self.refusal = self.refusal or (found, remedy)
            if is_python(name):
                if self._search_python(words[at:]):
                    return
                continue
            if name in _LAUNCHERS or word.startswith(_LAUNCHER_MODULES):
                if script := _named_by_launcher(rest):
                    self.add(script)
                    return
                self.is_vague |= any("$" in each for each in rest)
            if name in SHELLS:
                self._search_shell(words[at:], depth)
                return
            is_first = at == 0 or name.endswith(".sh")
            if is_first and _OF_A_SHELL.search(shebang(self.folder / word)):
                self._search_file(word, depth)
                return
            if word.endswith(".py") and not word.startswith("-"):
                self.add(name)
                return

    def _search_python(self, words: Sequence[str]) -> bool:
        """False for another launcher, and for what is no training."""
        started = read_python(words)
        if started.loses_path:
            self.lose_path(f"python -{started.flags}")
        if started.kind == "module":
            name, trains = started.name, not started.name.startswith(_NOT_TRAINING_MODULES)
        else:
            name = started.name.rpartition("/")[2]
            trains = started.kind == "file" and name not in (*_LAUNCHERS, "holdfast")
        if trains:
            self.add(name)
        return trains

    def _search_shell(self, words: Sequence[str], depth: int) -> None:
        kind, at = shell_input(words) or ("", 0)
        if kind == "text":
            self._search_text(words[at], depth)
            self.search(list(words[at + 2 :]), depth + 1)  # its "$@"
        elif kind == "file":
            self.search(list(words[at + 1 :]), depth + 1)  # its "$@"
            self._search_file(words[at], depth)

    def _search_file(self, name: str, depth: int) -> None:
        text = self.read(name)
        if text is None:
            return
        path = self.folder / name
        self.scripts[path] = text
        warning = parse_signal(batch_options(text).get("signal", ""))
        if warning is not None and not self.warning_name:
            self.warning_name, self.warns_batch = f"SIG{warning.name}", warning.to_batch
        self._search_text(text, depth)
        for number, line in enumerate(text.splitlines(), 1):
            if _LOSES_PATH.search(line) and not line.lstrip().startswith("#"):
                self.lose_path(f"{path.name}:{number}")

    def _search_text(self, text: str, depth: int) -> None:
        with contextlib.suppress(NotUnderstood):
            commands, values = read_script(text) or ([], Values())
            for command in commands:
                words = [each.text.strip("\"'") for each in values.arguments(command.words)]
                self.search(words, depth + 1)


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
