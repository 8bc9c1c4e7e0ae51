"""A command line of Python, taken apart: the interpreter, its options, and what it runs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)?)?t?")
# Options without a value that change nothing about how the script is run.
_FLAGS = frozenset("bBdEIOPqsSuv")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True)
class PythonCommand:
    """`interpreter *options *target`; the target is `-m MODULE ARGS…` or `SCRIPT ARGS…`."""

    interpreter: str
    options: tuple[str, ...]
    target: tuple[str, ...]

    def running(self, program: str, *arguments: str) -> list[str]:
        """The same interpreter with the same options, but for another program.

        The target follows as arguments, so `ps` shows whose spare it is.
        """
        return [self.interpreter, *self.options, program, *arguments, *self.target]


def parse_command(command: Sequence[str]) -> PythonCommand | str:
    """The parts, or why there can be no spare for it."""
    name = os.path.basename(command[0])  # noqa: PTH119  no Path at a start
    if not _PYTHON.fullmatch(name):
        return f"the command is {name!r}, and not `python SCRIPT` or `python -m MODULE`"
    options, rest = list[str](), list(command[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word in _WITH_VALUE:
            options += [word, *rest[:1]]
            del rest[:1]
        elif word.startswith(("-W", "-X")) or _FLAGS.issuperset(word[1:]):
            options.append(word)
        elif word[-1] == "m" and _FLAGS.issuperset(word[1:-1]) and rest:
            options += [f"-{word[1:-1]}"] if len(word) > len("-m") else []
            return PythonCommand(command[0], tuple(options), ("-m", *rest))
        else:
            return f"Python's option {word} is not known to it"
    if not rest or rest[0] == "-":
        return "it runs no script"
    if not os.path.isfile(rest[0]):  # noqa: PTH113  as above
        return f"{rest[0]!r} is no file"
    return PythonCommand(command[0], tuple(options), tuple(rest))
