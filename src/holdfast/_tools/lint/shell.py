"""The commands of a shell script, and in what each one stands.

Control structures are not followed, only noted: a command knows its function, whether it
runs in the background or in a pipe, and what operators stand before and after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from holdfast._tools.lint.tokens import REDIRECTIONS, NotUnderstood, Token, tokenize

_OPENING = frozenset(["if", "while", "until", "for", "select"])
_CLOSING = frozenset(["fi", "done", "esac", "}"])
_PASSED = frozenset(["then", "else", "elif", "do", "!", "coproc"])


@dataclass(frozen=True)
class Command:
    """One simple command as it is written."""

    words: tuple[Token, ...]  # without assignments in front and without redirections
    assignments: tuple[Token, ...]
    start: int
    end: int  # of its last word or redirection
    before: str  # the operator: "" at the beginning of a list
    after: str
    function: str | None
    within: tuple[str, ...]  # what it stands in, the outermost first: if, while, (, {, case
    is_background: bool = False
    is_piped: bool = False  # its output goes into another command
    is_timed: bool = False  # the shell's own word `time` in front
    has_document: bool = False  # its input is in the script

    @property
    def text(self) -> str:
        """The first word, as written."""
        return self.words[0].text if self.words else ""

    @property
    def is_conditional(self) -> bool:
        """Whether it may be left out, or be run several times."""
        return any(kind not in ("{", "(") for kind in self.within) or self.before in ("&&", "||")


@dataclass
class _Open:
    kind: str
    first: int  # the number of commands before it
    function: str | None = None


@dataclass
class _Parser:
    tokens: list[Token]
    commands: list[Command] = field(default_factory=list)
    _open: list[_Open] = field(default_factory=list)
    _pending: list[Token] = field(default_factory=list)
    _before: str = ""
    _closed: _Open | None = None  # a compound that ended just now: an & or | is for all of it
    _names_function: str | None = None
    _in_pattern: bool = False
    _list_start: int = 0  # the first command of a list joined by && and ||

    def parse(self) -> list[Command]:
        for at, token in enumerate(self.tokens):
            following = self.tokens[at + 1] if at + 1 < len(self.tokens) else None
            if self._in_pattern:
                self._pass_pattern(token)
            elif token.is_word:
                self._take_word(token)
            elif self._is_test() or token.text in REDIRECTIONS:
                self._pending.append(token)
            elif token.text == "(":
                self._take_parenthesis(following)
            elif token.text == ")" and self._names_function is not None:
                pass
            else:
                self._end_command(token.text)
        self._end_command("\n")
        if self._open:
            raise NotUnderstood(f"{self._open[-1].kind} without an end")
        return self.commands

    def _take_word(self, token: Token) -> None:
        if self._pending and self._pending[0].text == "function" and token.text == "{":
            self._names_function = self._pending[-1].text
            self._pending.clear()
        is_first = not self._pending
        if is_first and self._in_body(token):
            return
        if is_first and token.text in _PASSED:
            self._list_start = len(self.commands)
            return
        if is_first and token.text in _OPENING:
            self._push(token.text)
            if token.text in ("for", "select"):
                self._pending.append(token)  # up to the end of the line it names words
            return
        self._pending.append(token)
        if self._pending[0].text == "case" and token.text == "in" and len(self._pending) == 3:
            self._pending.clear()
            self._push("case")
            self._in_pattern = True

    def _in_body(self, token: Token) -> bool:
        """Whether a first word opens or closes something."""
        if token.text == "{":
            self._push("{", self._names_function)
            self._names_function = None
            return True
        if token.text in _CLOSING:
            self._close(token.text)
            return True
        return False

    def _pass_pattern(self, token: Token) -> None:
        if token.text == "esac":
            self._in_pattern = False
            self._close("esac")
        elif token.text == ")":
            self._in_pattern = False
            self._before = ""

    def _take_parenthesis(self, following: Token | None) -> None:
        if self._pending and following is not None and following.text == ")":
            self._names_function = self._pending[-1].text
            self._pending.clear()
        elif not self._pending:
            self._push("(", self._names_function)
            self._names_function = None
        else:
            raise NotUnderstood("a parenthesis amid words")

    def _is_test(self) -> bool:
        words = [token.text for token in self._pending]
        return bool(words) and words[0] == "[[" and "]]" not in words

    def _push(self, kind: str, function: str | None = None) -> None:
        self._open.append(_Open(kind, len(self.commands), function))
        self._before = ""
        self._closed = None
        self._list_start = len(self.commands)

    def _close(self, word: str) -> None:
        if not self._open:
            raise NotUnderstood(f"{word} without a beginning")
        self._closed = self._open.pop()
        self._list_start = min(self._list_start, self._closed.first)

    def _end_command(self, operator: str) -> None:
        pending, self._pending = self._pending, []
        if pending and pending[0].text == "function" and len(pending) > 1:
            self._names_function = pending[1].text
            return
        if operator == ")":
            self._add(pending, "")
            self._close(")")
            return
        if pending and pending[0].text not in ("for", "select"):
            self._add(pending, operator)
        if operator in ("&", "|", "|&"):
            self._mark(operator)
        if operator == "\n" and self._before in ("&&", "||", "|", "|&") and not pending:
            return  # the list goes on behind the end of the line
        self._before = "" if operator in ("\n", ";", "&", ";;", ";&", ";;&") else operator
        self._closed = None
        if self._before not in ("&&", "||"):
            self._list_start = len(self.commands)
        if operator in (";;", ";&", ";;&"):
            self._in_pattern = True

    def _add(self, pending: list[Token], operator: str) -> None:
        if self._closed is not None:
            pending = []  # redirections of a compound
        if not pending:
            return
        functions = [each.function for each in self._open if each.function is not None]
        command = _make_command(pending, self._before, operator)
        if command is not None:
            self.commands.append(
                replace(
                    command,
                    function=functions[-1] if functions else None,
                    within=tuple(e.kind for e in self._open if e.function is None),
                )
            )

    def _mark(self, operator: str) -> None:
        """The operator behind a list or compound is for all commands in it."""
        first = self._list_start if operator == "&" else len(self.commands) - 1
        if self._closed is not None:
            first = min(first, self._closed.first)
        for at in range(max(0, first), len(self.commands)):
            if operator == "&":
                self.commands[at] = replace(self.commands[at], is_background=True)
            else:
                self.commands[at] = replace(self.commands[at], is_piped=True)


def _make_command(pending: list[Token], before: str, after: str) -> Command | None:
    is_timed = pending[0].text == "time"
    if is_timed:
        pending = [t for t in pending[1:] if t.text != "-p"]
    if not pending:
        return None
    words: list[Token] = []
    target_follows = has_document = False
    for token, following in pairwise([*pending, pending[-1]]):
        if target_follows:
            target_follows = False
        elif not token.is_word:
            target_follows = token.text in REDIRECTIONS
            has_document |= token.text in ("<<", "<<-", "<<<")
        elif not (
            token.text.isdecimal() and following.start == token.end and not following.is_word
        ):
            words.append(token)
    assignments = []
    while words and is_assignment(words[0].text):
        assignments.append(words.pop(0))
    return Command(
        tuple(words), tuple(assignments), pending[0].start, pending[-1].end, before, after,
        None, (), is_timed=is_timed, has_document=has_document,
    )  # fmt: skip


def is_assignment(text: str) -> bool:
    """Whether a word sets a variable.

    >>> is_assignment("A+=b"), is_assignment("--a=b")
    (True, False)
    """
    name, equals, _ = text.partition("=")
    name = name.removesuffix("+")
    return bool(equals) and name.isidentifier() and name.isascii()


def parse_commands(text: str, offset: int = 0) -> list[Command]:
    """All simple commands in the order in which they are written."""
    return _Parser(tokenize(text, offset)).parse()
