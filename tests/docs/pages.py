"""The documentation as the tests read it: pages, their fenced blocks, and what stands above each.

A comment above a block says what it takes to run it:

    needs: model, loader     these names, as tests/docs/stand_ins has them (for torch)
    needs: keras: model      the same for another framework
    joined                   it goes on with the names and the folder of the block before it
    file: job.sbatch         the block is a file of that name for the blocks behind it
    script: plain.py         the block is a whole script, which another test runs as well
    output: exact            what the commands print is compared, folded lines apart
    output: begins           the same, and the page shows only the beginning
    diff: OLD NEW            the block leads from the one script to the other
    lint: errors             a batch script that is wrong on purpose
    not run: REASON          it cannot be run, and why
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"( *)```(\w*)\s*")
_MARK = re.compile(r" *<!-- (.*) -->\s*")


@dataclass
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """What a person types in it, without prompts and comments, lines that go on joined."""
        lines = iter(self.text.splitlines())
        found = []
        for line in lines:
            if not line.startswith("$ "):
                continue
            command = line[2:]
            while command.endswith("\\"):
                command = command[:-1] + next(lines).strip()
            found.append(without_comment(command))
        return found

    @property
    def framework(self) -> str:
        """What it trains with, by what it needs."""
        before, colon, _ = self.marks.get("needs", "").partition(":")
        return before.strip() if colon else "torch"

    @property
    def needs(self) -> list[str]:
        text = self.marks.get("needs", "").rpartition(":")[2]
        return [name.strip() for name in text.split(",") if name.strip()]


def without_comment(command: str) -> str:
    """A command without what stands behind it for the reader.

    >>> without_comment("holdfast status runs/   # all of them")
    'holdfast status runs/'
    """
    return re.split(r"\s+#\s", command, maxsplit=1)[0].rstrip()


def words_of(command: str) -> list[str]:
    return shlex.split(command)


def pages() -> list[Path]:
    """What is read by people: README, the docs, and the README of the examples."""
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md")), ROOT / "examples" / "README.md"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.fullmatch(lines[number])
        if opening is None:
            number += 1
            continue
        indent, first = opening[1], number
        body = []
        number += 1
        while not lines[number].startswith(f"{indent}```"):
            body.append(lines[number].removeprefix(indent))
            number += 1
        number += 1
        marks = _marks_above(lines, first)
        text = "".join(f"{line}\n" for line in body)
        found.append(Block(name_of(page), first + 1, opening[2], text, marks))
    return found


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks_of(page)]


def text_without_blocks(page: Path) -> str:
    """A page without its blocks and comments, for what is about its words."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def _marks_above(lines: list[str], first: int) -> dict[str, str]:
    marks = {}
    while first and (match := _MARK.fullmatch(lines[first - 1])):
        key, _, value = match[1].partition(":")
        marks[key.strip()] = value.strip()
        first -= 1
    return marks
