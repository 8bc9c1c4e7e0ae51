"""What a command starts: a Python, a launcher of ranks, or a program of unknown kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast._tools.lint.shell import Argument, Command, Values, is_assignment, read_script
from holdfast._tools.lint.signal_handlers import Reader

PYTHON = "python"
TORCHRUN = "torchrun"
LAUNCHERS = frozenset(["accelerate", "deepspeed"])
OTHER = "other"
_TORCHRUN_MODULES = tuple(f"torch.distributed.{name}" for name in ("run", "launch", "elastic"))
# All other options of torchrun have a value, in the same word or in the next one.
_TORCHRUN_FLAGS = frozenset([
    "--standalone", "--no-python", "--run-path", "--use-env", "--virtual-local-rank",
])  # fmt: skip


@dataclass(frozen=True)
class Swallow:
    """The first process of a task, which keeps the signal from the program below it."""

    who: str
    is_certain: bool
    exec_at: int | None = None  # the offset in the script at which `exec ` corrects it
    place: str = ""  # the line of another file


@dataclass(frozen=True)
class Launch:
    """One command of the script that may be a training."""

    command: Command
    arguments: tuple[Argument, ...]
    kind: str  # python, torchrun, accelerate, deepspeed, other
    program: tuple[Argument, ...] = ()  # from the word of the program that trains
    is_exec: bool = False
    is_step: bool = False  # srun starts it
    is_led: bool = False  # by `holdfast run`
    is_enclosed: bool = False  # in a container or `uv run`: srun must be in front of it
    is_inside: bool = False  # its words are in the text of a `-c`, or in another file
    is_editable: bool = True  # and are there as written in the script
    is_guarded: bool = False  # it starts with the signal ignored: `trap "" USR2; exec "$@"`
    swallow: Swallow | None = None
    step_at: int = 0  # the offset for `srun `

    @property
    def script(self) -> str | None:
        if self.kind == OTHER:
            return None
        words = [each.text.strip("\"'") for each in self.program]
        for at, word in enumerate(words):
            if word.endswith(".py"):
                return word
            if word == "-m" and at + 1 < len(words) and not words[at + 1].startswith("torch."):
                return words[at + 1].replace(".", "/") + ".py"
        return None

    @property
    def torchrun_at(self) -> int:
        """The word before torchrun's options: torchrun, or its module."""
        if self.program[0].program == TORCHRUN:
            return 0
        return next(n for n, word in enumerate(self.program) if word.text == "-m") + 1

    @property
    def torchrun_options(self) -> tuple[Argument, ...]:
        """torchrun's own words, up to the script or module that it starts."""
        start = at = self.torchrun_at + 1
        while at < len(self.program):
            word = self.program[at]
            name, equals, _ = word.text.replace("_", "-").partition("=")
            if name in ("-m", "--module") or not name.startswith(("-", "$")):
                break
            has_value = name.startswith("-") and not equals and name not in _TORCHRUN_FLAGS
            at += 2 if has_value else 1
        return self.program[start:at]

    @property
    def name(self) -> str:
        return {PYTHON: "python", OTHER: "the program"}.get(self.kind, self.kind)


def find_launch(command: Command, arguments: Sequence[Argument], read: Reader) -> Launch | None:
    """What this command starts; None for an empty one."""
    if not arguments:
        return None
    launch = Launch(command, tuple(arguments), OTHER, step_at=arguments[0].source.start)
    if arguments[0].value == "exec":
        rest = arguments[after_options(arguments, ("-a",)) :]
        if not rest:
            return None
        # In a pipe or in parentheses, exec replaces a subshell only.
        is_exec = not command.is_piped and command.before != "|" and "(" not in command.within
        launch = replace(launch, is_exec=is_exec and not command.is_background)
        arguments = rest
    return _unwrap(launch, tuple(arguments), read, 0)


def _unwrap(launch: Launch, words: tuple[Argument, ...], read: Reader, depth: int) -> Launch | None:
    if not words or depth > 12:
        return launch
    launch = replace(launch, program=words)
    if not launch.is_enclosed:
        launch = replace(launch, step_at=words[0].source.start)
    name = words[0].program
    if name == "srun":
        at = after_srun(words)
        launch = replace(launch, is_step=True)
        return launch if at is None else _unwrap(launch, words[at:], read, depth + 1)
    wrapper = after_wrapper(words)
    if wrapper is not None:
        return _unwrap(_wrap(launch, wrapper[0]), words[wrapper[1] :], read, depth + 1)
    if name in SHELLS:
        kind, at = shell_input([each.text for each in words]) or ("", 0)
        if kind == "text":
            return _read_text(launch, name, words[at], words[at + 2 :], read)
        text = words[at].text
        return _read_file(launch, f"{name} {text}", text, read) if kind else launch
    if name.endswith(".sh") and (launch.is_step or read(words[0].text) is not None):
        return _read_file(launch, name, words[0].text, read)
    return replace(launch, kind=_kind(words))


def _wrap(launch: Launch, name: str) -> Launch:
    if name == "holdfast run":
        return replace(launch, is_led=True)
    if name in CONTAINERS or name in RUNNERS:
        return replace(launch, is_enclosed=True)
    if launch.is_led or launch.swallow is not None or not (launch.is_step or launch.is_exec):
        return launch
    if name in WAITING:
        return replace(launch, swallow=Swallow(name, is_certain=True))
    if name == "conda run":
        return replace(launch, swallow=Swallow(name, is_certain=False))
    return launch  # it becomes the program


def _kind(words: Sequence[Argument]) -> str:
    name = words[0].program
    if name in (TORCHRUN, "deepspeed") or (name == "accelerate" and _second(words) == "launch"):
        return name
    if name.endswith(".py"):
        return PYTHON
    if is_python(name):
        texts = [each.text for each in words[1:]]
        if "-m" in texts[:4] and texts.index("-m") + 1 < len(texts):
            module = texts[texts.index("-m") + 1]
            if module.startswith(_TORCHRUN_MODULES):
                return TORCHRUN
            if module.startswith("accelerate.commands.launch"):
                return "accelerate"
        return PYTHON
    return OTHER


def _inner_text(argument: Argument) -> tuple[str, int | None] | None:
    """The text of a `-c`, and its offset if the script has it literally."""
    written = argument.source.text
    if written[:1] == written[-1:] == "'" and written.count("'") == 2:
        return written[1:-1], argument.source.start + 1
    if written[:1] == written[-1:] == '"' and len(written) > 1:
        inner = written[1:-1]
        if "\\" not in inner and '"' not in inner:
            return inner, argument.source.start + 1
        return inner.replace('\\"', '"').replace("\\$", "$").replace("\\\\", "\\"), None
    return None if argument.value is None else (argument.value, None)


def _read_text(
    launch: Launch, shell: str, argument: Argument, rest: tuple[Argument, ...], read: Reader
) -> Launch | None:
    found = _inner_text(argument)
    if found is None:
        return launch
    text, offset = found
    script = read_script(text, offset or 0)
    if script is None:
        return launch
    commands, values = script
    handlers = [c.words[1].text if len(c.words) > 1 else "-" for c in commands if c.text == "trap"]
    if set(handlers) - {"''", '""', "-"}:
        return launch  # it may pass the signal on
    for index, command in enumerate(commands):
        words = values.arguments(command.words)
        if command.words and command.words[-1].text in ('"$@"', "$@"):
            words = [*words[:-1], *rest]
        inner = find_launch(command, words, read)
        if inner is None or inner.kind == OTHER:
            continue
        is_last = index == len(commands) - 1 and command.after != "&"
        is_bare = not command.within and not command.is_piped and command.before != "|"
        swallow = inner.swallow
        if not (inner.is_exec or (inner.is_led and len(commands) == 1) or inner.is_step):
            swallow = _judge_shell(shell, inner, len(commands), is_last and is_bare, offset)
        if launch.is_led or not (launch.is_step or launch.is_exec):
            swallow = None
        is_given = any(word is inner.program[0] for word in rest)
        return replace(
            launch,
            kind=inner.kind,
            program=inner.program,
            is_enclosed=launch.is_enclosed or inner.is_enclosed,
            is_inside=inner.is_inside or not is_given,
            is_editable=inner.is_editable and (is_given or offset is not None),
            is_guarded=launch.is_guarded or inner.is_guarded or bool(handlers),
            is_led=launch.is_led or inner.is_led,
            is_step=launch.is_step or inner.is_step,
            swallow=launch.swallow or swallow,
        )
    return launch


def _judge_shell(
    shell: str, inner: Launch, commands: int, is_last: bool, offset: int | None
) -> Swallow | None:
    becomes = is_last and not inner.command.is_timed
    if becomes and (commands == 1 or shell == "bash"):
        return None  # every shell becomes its only command, and bash its last one
    exec_at = inner.command.words[0].start if offset is not None and becomes else None
    return Swallow(f"{shell} -c", is_certain=not is_last, exec_at=exec_at)


def _read_file(launch: Launch, who: str, name: str, read: Reader) -> Launch:
    text = read(name) or ""
    commands, values = read_script(text) or ([], Values())
    if any(command.text == "trap" for command in commands):
        return launch
    found = [find_launch(each, values.arguments(each.words), lambda _: None) for each in commands]
    trainers = [each for each in found if each is not None and each.kind != OTHER]
    if any(each is not None and each.is_step for each in found) or not trainers:
        return launch
    last = trainers[-1]
    swallow = None
    if not (last.is_exec or launch.is_led or launch.swallow):
        line = text.count("\n", 0, last.command.start) + 1
        swallow = Swallow(who, is_certain=True, place=f"{name}:{line}")
    return replace(
        launch,
        kind=last.kind,
        program=last.program,
        is_inside=True,
        is_editable=False,
        is_led=launch.is_led or last.is_led,
        swallow=launch.swallow or swallow,
    )


# -- Wrappers in front of a program: which words of a command are theirs ---------------------------

# Measured as the first process of a SLURM task: env, nice and nohup become the program, which
# receives the signal; time, timeout and a shell that waits die of it, and the program with them.

# They replace themselves by the program, which then receives a signal. Their options with a value.
BECOMING = {
    "env": ("-u", "--unset", "-C", "--chdir"),
    "nice": ("-n",),
    "nohup": (),
    "numactl": ("-N", "-m", "-C", "-p", "-i"),
    "taskset": (),
    "stdbuf": ("-i", "-o", "-e"),
    "ionice": ("-c", "-n"),
    "chrt": (),
}
# They start the program as a child, and die of a signal that they do not know.
WAITING = {
    "time": ("-o", "-f", "--output", "--format"),
    "timeout": ("-k", "-s", "--kill-after", "--signal"),
}
SHELLS = frozenset(["bash", "sh", "dash", "zsh", "ksh"])
_OF_THE_LEADER = ("--max-restarts", "--hang-timeout")
CONDA = frozenset(["conda", "mamba", "micromamba"])
CONTAINERS = frozenset(["apptainer", "singularity"])
RUNNERS = frozenset(["uv", "pixi", "pdm", "hatch", "rye"])
_RUNNER_VALUES = (
    "--with", "--extra", "--group", "--python", "-p", "--project", "--directory", "-e",
    "--env", "--environment", "--manifest-path", "--env-file", "--package",
)  # fmt: skip
_CONDA_VALUES = ("-n", "--name", "-p", "--prefix", "--cwd")
# `NAME run PROGRAM`: the options of `run` with a value.
_RUN_VALUES: dict[str, tuple[str, ...]] = {
    "poetry": (),
    "pipenv": (),
    "holdfast": _OF_THE_LEADER,
    **dict.fromkeys(RUNNERS, _RUNNER_VALUES),
    **dict.fromkeys(CONDA, _CONDA_VALUES),
}
_CONTAINER_VALUES = (
    "-B", "--bind", "--env", "--env-file", "--pwd", "--cwd", "-H", "--home", "--overlay", "-o",
    "-W", "--workdir", "--mount", "-S", "--scratch", "--security", "--hostname", "--dns",
    "--app", "--network", "--network-args", "--nvccli-path", "--fusemount", "--cpus", "--memory",
)  # fmt: skip
_SRUN_FLAGS = """
    exact overlap unbuffered label pty no-kill overcommit quit-on-interrupt quiet verbose
    disable-status contiguous preserve-env oversubscribe test-only use-min-nodes spread-job reboot
    no-allocate hold join interactive exclusive kill-on-bad-exit container-mount-home
    no-container-mount-home container-writable container-readonly container-remap-root
    no-container-remap-root container-entrypoint no-container-entrypoint propagate export-none
    resv-ports nice get-user-env external-launcher
"""
_SRUN_LONG_FLAGS = frozenset(_SRUN_FLAGS.split())
_SRUN_SHORT_FLAGS = frozenset("ukKOlqQvXEsHjZ")


def after_srun(words: Sequence[Argument]) -> int | None:
    """The number of words of srun and its options; None if that is not known."""
    at = 1
    while at < len(words):
        text = words[at].text
        if text == "--":
            return at + 1
        if text == "--multi-prog":
            return None
        if words[at].value is None and text.startswith("$"):
            # A variable may hold options or the program; the next word often shows which.
            if not is_program("".join(each.program for each in words[at + 1 : at + 2])):
                return None
            at += 1
        elif text.startswith("--"):
            at += 1 if "=" in text or text[2:] in _SRUN_LONG_FLAGS else 2
        elif text.startswith("-") and len(text) > 1:
            at += 1 if text[1] in _SRUN_SHORT_FLAGS or len(text) > 2 else 2
        else:
            return at
    return None


def after_options(words: Sequence[Argument], with_value: Sequence[str] = ()) -> int:
    """The number of words of a wrapper and its options."""
    at = 1
    while at < len(words) and words[at].text.startswith("-"):
        if words[at].text == "--":
            return at + 1
        at += 2 if words[at].text in with_value else 1
    return at


def after_wrapper(words: Sequence[Argument]) -> tuple[str, int] | None:
    """The wrapper in front, and the number of its words; None if there is none."""
    name, second = words[0].program, _second(words)
    if name in BECOMING or name in WAITING:
        at = after_options(words, BECOMING[name] if name in BECOMING else WAITING[name])
        at += name in ("taskset", "chrt", "timeout")  # a list of cores, a priority, a time
        while name == "env" and at < len(words) and is_assignment(words[at].text):
            at += 1
        return name, at
    if name in CONTAINERS and second in ("exec", "run"):
        return name, 2 + after_options(words[1:], _CONTAINER_VALUES)
    if name in _RUN_VALUES and second == "run":
        shown = f"{'conda' if name in CONDA else name} run" if name not in RUNNERS else name
        return shown, 1 + after_options(words[1:], _RUN_VALUES[name])
    if is_python(name):
        module_at = next((at for at, word in enumerate(words) if word.text == "-m"), 0)
        at = after_options(words[:module_at])
        if [each.text for each in words[at : at + 3]] == ["-m", "holdfast", "run"]:
            return "holdfast run", at + 2 + after_options(words[at + 2 :], _OF_THE_LEADER)
    return None


def _second(words: Sequence[Argument]) -> str:
    return words[1].text if len(words) > 1 else ""


def shell_input(words: Sequence[str]) -> tuple[str, int] | None:
    """What a shell reads, and which of its words that is: ("text", 2) or ("file", 1).

    >>> shell_input(["bash", "-euo", "pipefail", "-c", "python train.py"])
    ('text', 4)
    >>> shell_input(["sh", "job.sh"]), shell_input(["sh"])
    (('file', 1), None)
    """
    at = 1
    while at < len(words):
        word = words[at]
        if not word.startswith(("-", "+")):
            return "file", at
        at += 1
        if not word.startswith("--") and word.endswith("c"):
            return ("text", at) if at < len(words) else None
        if not word.startswith("--") and word.endswith(("o", "O")):
            at += 1
    return None


def is_python(name: str) -> bool:
    """Whether a program is a Python.

    >>> is_python("python3.11"), is_python("pythonize")
    (True, False)
    """
    return re.fullmatch(r"i?python[0-9.]*|pypy3?", name) is not None


def is_program(name: str) -> bool:
    known = ("torchrun", "accelerate", "deepspeed", "holdfast", "conda", *BECOMING, *WAITING)
    return is_python(name) or name in known or name in SHELLS or name in CONTAINERS
