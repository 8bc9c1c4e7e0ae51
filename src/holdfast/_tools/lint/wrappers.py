"""Wrappers in front of a program: which words of a command are theirs.

Measured as the first process of a SLURM task: env, nice and nohup become the program, which
receives the signal; time, timeout and a shell that waits die of it, and the program with them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast._tools.lint.values import Argument

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
_BECOMING_RUNNERS = frozenset(["poetry", "pipenv"])
CONDA = frozenset(["conda", "mamba", "micromamba"])
CONTAINERS = frozenset(["apptainer", "singularity"])
RUNNERS = frozenset(["uv", "pixi", "pdm", "hatch", "rye"])
_RUNNER_VALUES = (
    "--with", "--extra", "--group", "--python", "-p", "--project", "--directory", "-e",
    "--env", "--environment", "--manifest-path", "--env-file", "--package",
)  # fmt: skip
_CONTAINER_VALUES = (
    "-B", "--bind", "--env", "--env-file", "--pwd", "--cwd", "-H", "--home", "--overlay", "-o",
    "-W", "--workdir", "--mount", "-S", "--scratch", "--security", "--hostname", "--dns",
    "--app", "--network", "--network-args", "--nvccli-path", "--fusemount", "--cpus", "--memory",
)  # fmt: skip
_SRUN_FLAGS = """
    exact overlap unbuffered label pty no-kill overcommit multi-prog quit-on-interrupt quiet
    verbose disable-status contiguous preserve-env oversubscribe test-only use-min-nodes spread-job
    reboot no-allocate hold join interactive exclusive kill-on-bad-exit container-mount-home
    no-container-mount-home container-writable container-readonly container-remap-root
    no-container-remap-root container-entrypoint no-container-entrypoint propagate export-none
    resv-ports nice get-user-env external-launcher
"""
_SRUN_LONG_FLAGS = frozenset(_SRUN_FLAGS.split())
_SRUN_SHORT_FLAGS = frozenset("ukOlqQvXEsHjZ")


def after_srun(words: Sequence[Argument]) -> int | None:
    """The number of words of srun and its options; None if that is not known."""
    at = 1
    while at < len(words):
        text = words[at].text
        if text == "--":
            return at + 1
        if text in ("--multi-prog",) or (words[at].value is None and text.startswith("$")):
            # A variable may hold options or the program; the next word often shows which.
            rest = [each.program for each in words[at + 1 :]]
            if text != "--multi-prog" and rest and is_program(rest[0]):
                at += 1
                continue
            return None
        if text.startswith("--"):
            has_value = "=" in text or text[2:] in _SRUN_LONG_FLAGS
            at += 1 if has_value else 2
        elif text.startswith("-") and len(text) > 1:
            is_flag = text[1] in _SRUN_SHORT_FLAGS or text[1] == "K" or len(text) > 2
            at += 1 if is_flag else 2
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
    name = words[0].program
    if name == "env":
        at = after_options(words, BECOMING["env"])
        while at < len(words) and re.match(r"[A-Za-z_]\w*=", words[at].text):
            at += 1
        return name, at
    if name in ("taskset", "chrt"):
        return name, after_options(words) + 1  # -c LIST or a mask; a priority
    if name in BECOMING:
        return name, after_options(words, BECOMING[name])
    if name in WAITING:
        return name, after_options(words, WAITING[name]) + (name == "timeout")
    if name in _BECOMING_RUNNERS and _second(words) == "run":
        return name, 2
    if name in RUNNERS and _second(words) == "run":
        return name, 1 + after_options(words[1:], _RUNNER_VALUES)
    if name in CONDA and _second(words) == "run":
        with_value = ("-n", "--name", "-p", "--prefix", "--cwd")
        return "conda run", 1 + after_options(words[1:], with_value)
    if name in CONTAINERS and _second(words) in ("exec", "run"):
        return name, 2 + after_options(words[1:], _CONTAINER_VALUES)
    if name == "holdfast" and _second(words) == "run":
        return "holdfast run", 1 + after_options(words[1:], _OF_THE_LEADER)
    if is_python(name):
        module_at = next((at for at, word in enumerate(words) if word.text == "-m"), 0)
        at = after_options(words[:module_at])
        if [each.text for each in words[at : at + 3]] == ["-m", "holdfast", "run"]:
            return "holdfast run", at + 2 + after_options(words[at + 2 :], _OF_THE_LEADER)
    return None


def _second(words: Sequence[Argument]) -> str:
    return words[1].text if len(words) > 1 else ""


def is_python(name: str) -> bool:
    """Whether a program is a Python.

    >>> is_python("python3.11"), is_python("pythonize")
    (True, False)
    """
    return re.fullmatch(r"i?python[0-9.]*|pypy3?", name) is not None


def is_program(name: str) -> bool:
    """Whether this is a known program that trains or wraps a training."""
    known = ("torchrun", "accelerate", "deepspeed", "holdfast", "conda", *BECOMING, *WAITING)
    return is_python(name) or name in known or name in SHELLS or name in CONTAINERS
