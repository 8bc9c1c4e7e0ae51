"""A batch script as a job: its options, its commands, and which of them train."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from holdfast._environment.slurm import options as slurm
from holdfast._tools.lint import finding, shell
from holdfast._tools.lint.launch import LAUNCHERS, OTHER, PYTHON, TORCHRUN, Launch, find_launch

_SHELLS = re.compile(r"#!\s*(?:\S*/)?(?:env\s+(?:-S\s+)?)?(?:\S*/)?(ba|da|z|k)?sh\b")
_PYTHONS = re.compile(r"#!.*\bpython[0-9.]*\b")
_TRAINING = re.compile(r"train|tune|sft|dpo|rlhf|fit(_|$)|main$|^run|learn|distill|ddp|fsdp", re.I)
_PREPARING = re.compile(
    r"prep|download|convert|split|tokeni|^make|^build|plot|eval|test|collect|merge|summar|index|"
    r"cache|extract|install|setup|check|report|analy|copy|stage|unpack|gather|config|generate",
    re.I,
)
_TRIVIAL = frozenset([
    "hostname", "nvidia-smi", "echo", "mkdir", "cp", "rsync", "tar", "ls", "env", "printenv", "rm",
    "sleep", "true", "date", "cat", "lscpu", "free", "df", "touch", "rocm-smi", "sbcast", "unzip",
    "module", "which", "pwd", "chmod", "ln", "mv",
])  # fmt: skip
# Short commands; any command that is in neither list may be the training.
_SHORT = _TRIVIAL | frozenset([
    ".", ":", "[", "[[", "alias", "awk", "basename", "bc", "break", "case", "cd", "chgrp", "chown",
    "conda", "continue", "cut", "curl", "declare", "dirname", "du", "exit", "export", "false",
    "find", "getent", "git", "grep", "gunzip", "gzip", "hash", "head", "id", "jobs", "kill", "let",
    "local", "mamba", "micromamba", "mapfile", "mkfifo", "mktemp", "ml", "mount", "nproc",
    "nvidia-cuda-mps-control", "pip", "pip3", "popd", "printf", "ps", "pushd", "read", "readarray",
    "readlink", "readonly", "realpath", "return", "sacct", "sbatch", "scancel", "scontrol", "scp",
    "sed", "seq", "set", "shift", "shopt", "sinfo", "sort", "source", "spack", "squeue", "stat",
    "sync", "tail", "tee", "test", "tr", "trap", "type", "typeset", "ulimit", "umask", "umount",
    "uname", "uniq", "unset", "wait", "wc", "wget", "whoami", "xargs", "zip",
])  # fmt: skip
_SETUP = re.compile(r"activate|conda|bashrc|profile|\.env|modul|setup|/etc/|mamba|venv|spack")
_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
_FRAMEWORKS = re.compile(r"^\s*(?:import|from)\s+(torch|jax|tensorflow|lightning|flax|keras)", re.M)
_HANDLES = re.compile(r"\bholdfast\b|SIGUSR[12]|signal\.signal")
_MOST_BYTES = 1_000_000
_LEAD_SECONDS = 120
_LEAST_LEAD_SECONDS = 15


@dataclass(frozen=True)
class Trap:
    command: shell.Command
    handler: str  # its text, with that of the functions that it calls
    signals: tuple[str, ...]  # without SIG

    @property
    def ignores(self) -> bool:
        return self.handler == ""


class BatchScript:
    def __init__(self, text: str, around: finding.Surroundings) -> None:
        self.text = text
        self.around = around
        self.options = slurm.read_options(text)
        self.commands: list[shell.Command] = []
        self.values = shell.Values()
        self.everything: list[Launch] = []  # all commands, as what they start
        self.launches: list[Launch] = []  # those of a known kind, and those of srun
        self.is_understood = False  # as a shell script
        if not _SHELLS.match(text) and text.startswith("#!"):
            return
        try:
            self.commands = shell.parse_commands(text)
            self.values = shell.find_values(self.commands)
            self.everything = self._find_launches()
        except (shell.NotUnderstood, RecursionError):
            self.commands = []
            return
        self.launches = [each for each in self.everything if each.kind != OTHER or each.is_step]
        self.is_understood = True

    def option(self, name: str) -> slurm.Option | None:
        """The one in force; of a heterogeneous job, that of its first part."""
        found = [each for each in self.options if each.name == name and each.component == 0]
        return found[-1] if found else None

    @property
    def signal(self) -> slurm.WarningSignal | None:
        option = self.option("signal")
        return None if option is None else slurm.parse_signal(option.value)

    @property
    def limit_seconds(self) -> float | None:
        option = self.option("time")
        return None if option is None else slurm.parse_time_limit(option.value)

    def count(self, name: str) -> int | None:
        """The number that an option gives; the least of a range."""
        option = self.option(name)
        match = re.match(r"\d+", option.value) if option is not None else None
        return int(match[0]) if match else None

    @property
    def nodes(self) -> int:
        components = {option.component for option in self.options}
        return max(self.count("nodes") or 1, len(components))

    @property
    def tasks(self) -> int:
        per_node = self.count("ntasks-per-node") or 1
        return max(self.count("ntasks") or 1, per_node * self.nodes)

    @property
    def is_python(self) -> bool:
        return _PYTHONS.match(self.text) is not None

    def good_lead(self) -> int | None:
        """Seconds of warning that are enough, and fit into the limit; None if no number does."""
        needed = self.around.needed_seconds
        lead = _LEAD_SECONDS if needed is None else max(60, -(-int(1.5 * needed + 30) // 30) * 30)
        if self.limit_seconds is not None and lead > self.limit_seconds / 3:
            lead = int(self.limit_seconds / 3)
            if lead < _LEAST_LEAD_SECONDS or (needed is not None and lead < needed):
                return None
        return lead

    def report(
        self,
        rule: str,
        severity: str,
        at: int,
        message: str,
        *,
        edits: Iterable[finding.Edit] = (),
        corrected: Iterable[str] = (),
        folder: str | None = None,
    ) -> finding.LintFinding:
        line, changes = self.line_of(at), tuple(edits)
        lines = tuple(corrected) or finding.changed_lines(self.text, changes)
        fixable = severity != "hint" and (bool(changes) or folder is not None)
        source = self.text.split("\n")[line - 1]
        return finding.LintFinding(
            rule, severity, line, message, source, lines, changes, folder, fixable
        )

    def not_understood(self, at: int, fact: str) -> finding.LintFinding:
        text = f"{fact} Whether the warning reaches the training is not known."
        right = ["holdfast doctor -- bash SCRIPT   (in an allocation: it sends the signals)"]
        return self.report(finding.NOT_UNDERSTOOD, "hint", at, text, corrected=right)

    def line_of(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1

    def add_option(self, line: str) -> finding.Edit:
        at = self.options_at
        before = "" if at == 0 or self.text[at - 1] == "\n" else "\n"
        return finding.Edit(at, at, f"{before}#SBATCH {line}\n")

    def remove(self, start: int, end: int, *, around: str, instead: str = "") -> finding.Edit:
        """Without this part; without its line if that has nothing else than `around`."""
        first, last = finding.whole_lines(self.text, start, end)
        if (self.text[first:start] + self.text[end:last]).strip() == around:
            return finding.Edit(first, last, "")
        return finding.Edit(start, end, instead)

    @property
    def options_at(self) -> int:
        """The offset for a further #SBATCH line: below the last valid one."""
        last = max((each.end for each in self.options if each.component == 0), default=0)
        if not self.options and not self.text.startswith("#!"):
            return 0
        end = self.text.find("\n", last)
        return len(self.text) if end < 0 else end + 1

    def read(self, name: str) -> str | None:
        """A file that the script names, in its own folder or in the current one."""
        folder = self.around.folder
        places = [folder, self.around.cwd]
        chdir = self.option("chdir")
        if chdir is not None:
            places.append(folder / chdir.value)
        for place in places:
            try:
                path = place / name
                if path.is_file() and path.stat().st_size <= _MOST_BYTES:
                    return path.read_text(encoding="utf-8", errors="replace")
            except (OSError, ValueError):
                continue
        return None

    def _find_launches(self) -> list[Launch]:
        calls: dict[str, list[shell.Command]] = {}
        for command in self.commands:
            calls.setdefault(command.text, []).append(command)
        found = []
        for command in self.commands:
            if command.function is not None:
                called = calls.get(command.function)
                if not called:
                    continue
                # A command in a function runs where the function is called.
                command = replace(
                    command,
                    is_background=command.is_background or any(c.is_background for c in called),
                    is_piped=command.is_piped or any(c.is_piped for c in called),
                )
            launch = find_launch(command, self.values.arguments(command.words), self.read)
            if launch is not None:
                found.append(launch)
        return found

    @cached_property
    def trainings(self) -> list[Launch]:
        """The launches that train; a wrong guess would be a false alarm."""
        found = [each for each in self.launches if not _is_housekeeping(each)]
        steps = [each for each in found if each.is_step and not _is_trivial(each)]
        if steps or any(e.arguments[0].program in _OTHER_LAUNCHERS for e in self.everything):
            return [each for each in steps if each.kind != OTHER]
        bare = [each for each in found if not each.is_step and each.kind != OTHER]
        rest = [each for each in bare if not _is_preparing(each)]
        named = [e for e in rest if e.kind != PYTHON or _TRAINING.search(_stem(e.script))]
        return named or (rest or bare)[-1:]

    @cached_property
    def unseen(self) -> list[Launch]:
        """If no training is found: the commands of unknown effect that may be one."""
        if self.trainings:
            return []
        found = [each for each in self.everything if not _is_short(each)]
        steps = [each for each in found if each.is_step]
        return steps or found

    def reads_other_scripts(self) -> bool:
        """Whether the script sources a file that is not one for the environment."""
        return any(map(_is_read_in, self.everything))

    @cached_property
    def is_training(self) -> bool:
        if self.option("signal") is not None or self.option("requeue") is not None:
            return True
        found = [each for each in self.trainings if not _is_preparing(each)]
        for each in found:
            if each.kind in LAUNCHERS or each.kind == TORCHRUN:
                return True
            if _TRAINING.search(_stem(each.script)) or _FRAMEWORKS.search(self.program_text(each)):
                return True
        gres = self.option("gres")
        has_gpus = any(map(self.option, _GPU_OPTIONS)) or (gres is not None and "gpu" in gres.value)
        steps = [each for each in self.launches if each.is_step and not _is_trivial(each)]
        return has_gpus and bool(found or (steps and not self.trainings))

    @property
    def is_resubmitted(self) -> bool:
        """Whether the script calls sbatch: then it continues as another job."""
        return any(
            re.search(r"\bsbatch\s", self.text[command.start : command.end])
            for command in self.commands
            if command.text not in ("echo", "printf")
        )

    def program_text(self, launch: Launch) -> str:
        return (self.read(launch.script) or "") if launch.script else ""

    def uses_holdfast(self, launch: Launch) -> bool:
        return re.search(r"\bholdfast\b", self.program_text(launch)) is not None

    def handles_signals(self, launch: Launch) -> bool:
        """Whether the program seems to handle a signal; otherwise it would die of one."""
        return _HANDLES.search(self.program_text(launch)) is not None

    @cached_property
    def traps(self) -> list[Trap]:
        found = []
        for command in self.commands:
            if command.text != "trap" or command.function is not None:
                continue
            words = [word.text for word in command.words[1:] if word.text != "--"]
            if len(words) < 2 or words[0].startswith("-"):
                continue
            handler = self._handler_text(words[0])
            signals = tuple(word.strip("'\"").upper().removeprefix("SIG") for word in words[1:])
            found.append(Trap(command, handler, tuple(_NUMBERS.get(s, s) for s in signals)))
        return found

    def _handler_text(self, word: str) -> str:
        text = word[1:-1] if word[:1] == word[-1:] and word[:1] in "'\"" else word
        for name in re.findall(r"[\w-]+", text):
            body = [c for c in self.commands if c.function == name]
            if body:
                text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", ":", text)
            for each in body:
                condition = "if " if each.is_conditional else ""
                text += f"\n{condition}{self.text[each.start : each.end]}"
        return text


_NUMBERS = {"0": "EXIT", "1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}
_OTHER_LAUNCHERS = frozenset(
    ["mpirun", "mpiexec", "mpiexec.hydra", "ibrun", "jsrun", "horovodrun", "ray", "parallel"]
)


def _stem(script: str | None) -> str:
    return "" if script is None else script.rpartition("/")[2].removesuffix(".py")


def _is_housekeeping(launch: Launch) -> bool:
    """A Python that is done in a moment."""
    if launch.kind != PYTHON:
        return False
    words = [each.text for each in launch.program[1:]]
    modules = ("pip", "venv", "torch.utils", "json.tool", "ensurepip", "virtualenv", "site")
    if "-m" in words and words.index("-m") + 1 < len(words):
        return words[words.index("-m") + 1].startswith(modules)
    if launch.script is not None:
        return launch.script.endswith("setup.py")
    named = next((each for each in launch.program[1:] if not each.text.startswith("-")), None)
    return (
        "-c" in words or named is None or named.value is not None
    )  # else its name is in a variable


def _is_preparing(launch: Launch) -> bool:
    """By its name, something before or after a training."""
    name = _stem(launch.script)
    return _PREPARING.search(name) is not None and not re.search(r"train|tune", name, re.I)


def _is_trivial(launch: Launch) -> bool:
    return launch.kind == OTHER and bool(launch.program) and launch.program[0].program in _TRIVIAL


def _is_short(launch: Launch) -> bool:
    """By its name done soon; a name in a variable is unknown."""
    if launch.kind != OTHER:
        return _is_housekeeping(launch) and not launch.command.has_document
    name = launch.program[0].program if launch.program else ""
    return not _is_read_in(launch) and (name in _SHORT or name.startswith(("((", "module")))


def _is_read_in(launch: Launch) -> bool:
    """`source FILE`, if the file is not one for the environment."""
    words = [each.text for each in launch.arguments]
    return words[0] in ("source", ".") and len(words) > 1 and not _SETUP.search(words[1])
