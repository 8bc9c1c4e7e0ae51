"""A reader of bash: the words of a script, its simple commands, and the values of its variables.

Quotes, comments, here-documents and substitutions are read, and nothing is run.
Control structures are not followed: a command only knows its function, whether it runs in the
background or in a pipe, and the operators before and after it. A script that cannot be read to the
end raises NotUnderstood.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

REDIRECTIONS = ("&>>", "&>", "<<<", "<<-", "<<", ">>", ">&", "<&", "<>", ">|", "<", ">")
_OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", *REDIRECTIONS, ";", "&", "|", "(", ")")
_OPERATOR = re.compile("|".join(map(re.escape, _OPERATORS)))
_BREAKS = " \t\n;&|()<>"


class NotUnderstood(Exception):
    """The script is not bash, or uses more of bash than this reader knows."""


@dataclass(frozen=True)
class Token:
    """A word, an operator, or the end of a line ("\\n")."""

    text: str
    start: int
    end: int
    is_word: bool


def tokenize(text: str, offset: int = 0) -> list[Token]:
    """The tokens in their order; `offset` is the place of `text` in the whole script."""
    return _Reader(text, offset).read()


def find_comments(text: str) -> list[int]:
    """The offsets of all comments; a # in a here-document is none."""
    reader = _Reader(text, 0)
    reader.read()
    return reader.comments


@dataclass
class _Reader:
    _text: str
    _offset: int
    _at: int = 0
    _found: list[Token] = field(default_factory=list)
    comments: list[int] = field(default_factory=list)
    # Here-documents that begin on the next line.
    _documents: list[tuple[str, bool]] = field(default_factory=list)

    def read(self) -> list[Token]:
        try:
            return self._read()
        except RecursionError as error:
            raise NotUnderstood("quotes and parentheses too deep in each other") from error

    def _read(self) -> list[Token]:
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if text.startswith("\\\n", self._at):
                self._at += 2
            elif char in " \t\r":
                self._at += 1
            elif char == "\n":
                self._add(self._at + 1, is_word=False)
                self._pass_documents()
            elif char == "#":
                self.comments.append(self._at)
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif text.startswith("((", self._at) and self._begins_a_command():
                self._add(_skip_arithmetic(text, self._at), is_word=True)
            elif (operator := self._operator()) is not None:
                self._take_operator(operator)
            else:
                self._add(self._word_end(), is_word=True)
        if self._documents:
            raise NotUnderstood("a here-document without an end")
        return self._found

    def _operator(self) -> str | None:
        text = self._text
        if text[self._at] in "<>" and text.startswith("(", self._at + 1):
            return None  # a process substitution is part of a word
        match = _OPERATOR.match(text, self._at)
        return None if match is None else match[0]

    def _take_operator(self, operator: str) -> None:
        self._add(self._at + len(operator), is_word=False)
        if operator in ("<<", "<<-"):
            while self._at < len(self._text) and self._text[self._at] in " \t":
                self._at += 1
            start, end = self._at, self._word_end()
            self._add(end, is_word=True)
            name = re.sub(r"[\"'\\]", "", self._text[start:end])
            self._documents.append((name, operator == "<<-"))

    def _begins_a_command(self) -> bool:
        return not self._found or not self._found[-1].is_word or self._found[-1].text in _LEADING

    def _add(self, end: int, *, is_word: bool) -> None:
        start = self._at
        self._found.append(
            Token(self._text[start:end], self._offset + start, self._offset + end, is_word)
        )
        self._at = end

    def _pass_documents(self) -> None:
        for name, is_indented in self._documents:
            while True:
                if self._at >= len(self._text):
                    raise NotUnderstood("a here-document without an end")
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = end + 1
                if (line.lstrip("\t") if is_indented else line) == name:
                    break
        self._documents.clear()

    def _word_end(self) -> int:
        text, at = self._text, self._at
        while at < len(text):
            char = text[at]
            if char in "<>" and text.startswith("(", at + 1):
                at = _skip_parentheses(text, at + 1)
            elif char in _BREAKS:
                if char == "(" and at > self._at and text[at - 1] in "=@?+*!":
                    at = _skip_parentheses(text, at)  # an array, or a pattern
                    continue
                break
            else:
                at = skip_piece(text, at)
        return at


_LEADING = ("for", "if", "then", "elif", "else", "while", "until", "do", "!", "{", "time")


# An escape, a quotation without substitutions, or any other character.
_PIECE = re.compile(r"\\.?|'[^']*'|`(?:\\.|[^`\\])*`?|\$'(?:\\.|[^'\\])*'?|.", re.DOTALL)


def skip_piece(text: str, at: int) -> int:
    """Past one character of a word, or past one quotation or substitution."""
    if text[at] == '"':
        return skip_double_quotes(text, at)
    if text.startswith("$((", at):
        return _skip_arithmetic(text, at + 1)
    if text.startswith("$(", at):
        return _skip_parentheses(text, at + 1)
    if text.startswith("${", at):
        return _skip_nested(text, at + 1, "{}", "a brace that is never closed")
    match = _PIECE.match(text, at)
    if match is None or match[0] == "'":
        raise NotUnderstood("a quote that is never closed")
    return match.end()


def skip_double_quotes(text: str, at: int) -> int:
    """Past the quotation that begins at `at`."""
    at += 1
    while at < len(text) and text[at] != '"':
        at = at + 1 if text[at] == "'" else skip_piece(text, at)
    if at >= len(text):
        raise NotUnderstood("a quote that is never closed")
    return at + 1


def _skip_parentheses(text: str, at: int) -> int:
    return _skip_nested(text, at, "()", "a parenthesis that is never closed", has_comments=True)


def _skip_arithmetic(text: str, at: int) -> int:
    """Past `((…))`, in which quotes and # have no meaning."""
    return _skip_nested(text, at, "()", "a parenthesis that is never closed", is_plain=True)


def _skip_nested(
    text: str,
    at: int,
    pair: str,
    problem: str,
    *,
    has_comments: bool = False,
    is_plain: bool = False,
) -> int:
    """Past the end that belongs to the opening sign at `at`."""
    depth = 0
    while at < len(text):
        char = text[at]
        if has_comments and char == "#" and text[at - 1] in " \t\n(;":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif char in pair:
            depth += 1 if char == pair[0] else -1
            at += 1
            if depth == 0:
                return at
        else:
            at = at + 1 if is_plain else skip_piece(text, at)
    raise NotUnderstood(problem)


# Simple commands.
_OPENING = frozenset(["if", "while", "until", "for", "select"])
_CLOSING = frozenset(["fi", "done", "esac", "}"])
_PASSED = frozenset(["then", "else", "elif", "do", "!", "coproc"])


@dataclass(frozen=True)
class Command:
    words: tuple[Token, ...]  # without assignments in front and without redirections
    assignments: tuple[Token, ...]
    start: int
    end: int  # of its last word or redirection
    before: str  # the operator: "" at the beginning of a list
    after: str
    function: str | None
    within: tuple[str, ...]  # the compounds around it, the outermost first: if, while, (, {, case
    is_background: bool = False
    is_piped: bool = False  # its output goes into another command
    is_timed: bool = False  # the shell's own word `time` in front
    has_document: bool = False  # its input is in the script

    @property
    def text(self) -> str:
        return self.words[0].text if self.words else ""

    @property
    def is_conditional(self) -> bool:
        """Whether it may run never, or several times."""
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
    _closed: _Open | None = None  # a compound that has just ended: an & or | applies to all of it
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
        if not self._pending and self._take_keyword(token):
            return
        self._pending.append(token)
        if self._pending[0].text == "case" and token.text == "in" and len(self._pending) == 3:
            self._pending.clear()
            self._push("case")
            self._in_pattern = True

    def _take_keyword(self, token: Token) -> bool:
        """Whether a first word was a keyword, and no command."""
        if token.text == "{":
            self._push("{")
        elif token.text in _CLOSING:
            self._close(token.text)
        elif token.text in _PASSED:
            self._list_start = len(self.commands)
        elif token.text in _OPENING:
            self._push(token.text)
            if token.text in ("for", "select"):
                self._pending.append(token)  # the rest of the line is a list of words
        else:
            return False
        return True

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
            self._push("(")
        else:
            raise NotUnderstood("a parenthesis amid words")

    def _is_test(self) -> bool:
        words = [token.text for token in self._pending]
        return bool(words) and words[0] == "[[" and "]]" not in words

    def _push(self, kind: str) -> None:
        function = None
        if kind in ("{", "("):
            function, self._names_function = self._names_function, None
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
            return  # the list continues on the next line
        self._before = "" if operator in ("\n", ";", "&", ";;", ";&", ";;&") else operator
        self._closed = None
        if self._before not in ("&&", "||"):
            self._list_start = len(self.commands)
        if operator in (";;", ";&", ";;&"):
            self._in_pattern = True

    def _add(self, pending: list[Token], operator: str) -> None:
        if self._closed is not None:
            return  # redirections of a compound
        is_timed = bool(pending) and pending[0].text == "time"
        if is_timed:
            pending = [token for token in pending[1:] if token.text != "-p"]
        if not pending:
            return
        words, has_document = _without_redirections(pending)
        assigned = next((n for n, w in enumerate(words) if not is_assignment(w.text)), len(words))
        functions = [each.function for each in self._open if each.function is not None]
        self.commands.append(
            Command(
                words=tuple(words[assigned:]),
                assignments=tuple(words[:assigned]),
                start=pending[0].start,
                end=pending[-1].end,
                before=self._before,
                after=operator,
                function=functions[-1] if functions else None,
                within=tuple(each.kind for each in self._open if each.function is None),
                is_timed=is_timed,
                has_document=has_document,
            )
        )

    def _mark(self, operator: str) -> None:
        """The operator behind a list or compound applies to all commands in it."""
        first = self._list_start if operator == "&" else len(self.commands) - 1
        if self._closed is not None:
            first = min(first, self._closed.first)
        for at in range(max(0, first), len(self.commands)):
            if operator == "&":
                self.commands[at] = replace(self.commands[at], is_background=True)
            else:
                self.commands[at] = replace(self.commands[at], is_piped=True)


def _without_redirections(pending: list[Token]) -> tuple[list[Token], bool]:
    """The words of a command, and whether it has a here-document."""
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
    return words, has_document


def is_assignment(text: str) -> bool:
    """Whether a word sets a variable.

    >>> is_assignment("A+=b"), is_assignment("--a=b")
    (True, False)
    """
    name, equals, _ = text.partition("=")
    name = name.removesuffix("+")
    return bool(equals) and name.isidentifier() and name.isascii()


def parse_commands(text: str, offset: int = 0) -> list[Command]:
    return _Parser(tokenize(text, offset)).parse()


# -- The values of words, as far as the script itself shows them -----------------------------------

# A variable is known if every assignment to it in the script is the same literal. A word with any
# other part (a command's output, the environment, arithmetic) has no value.


_NAME = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(\[[@*]\])?\})")
_DECLARING = frozenset(["export", "declare", "typeset", "readonly", "local"])
_DEPTH = 5  # of variables in variables
_UNKNOWN = "\0"


@dataclass(frozen=True)
class Argument:
    """A word of a command, expanded; several may come from one word."""

    value: str | None
    source: Token

    @property
    def text(self) -> str:
        """The value, or the word as written if the value is not known."""
        return self.source.text if self.value is None else self.value

    @property
    def program(self) -> str:
        """The program that it names, without its folder; "" if that is not known."""
        if self.value is not None:
            return self.value.rpartition("/")[2]
        name = self.source.text.strip('"').rpartition("/")[2]
        return name if re.fullmatch(r"[\w.+-]+", name) and "/" in self.source.text else ""


@dataclass
class Values:
    plain: dict[str, str | None] = field(default_factory=dict)
    arrays: dict[str, list[Token] | None] = field(default_factory=dict)

    def arguments(self, words: Iterable[Token], depth: int = 0) -> list[Argument]:
        return [argument for word in words for argument in self._expand(word, depth)]

    def value(self, text: str, depth: int = 0) -> str | None:
        """The value of a word that stays one word."""
        filled = self._fill(text, depth)
        return None if _UNKNOWN in filled else filled

    def _expand(self, word: Token, depth: int) -> list[Argument]:
        inner = word.text[1:-1] if re.fullmatch(r'"[^"]*"', word.text) else word.text
        match = _NAME.fullmatch(inner)
        if match is None or depth > _DEPTH:
            return [Argument(self.value(word.text, depth), word)]
        name, is_whole_array = match[1] or match[2], match[3] is not None
        if is_whole_array:
            items = self.arrays.get(name)
            if items is None:
                return [Argument(None, word)]
            return [Argument(each.value, word) for each in self.arguments(items, depth + 1)]
        value = self.plain.get(name)
        if value is None:
            return [Argument(None, word)]
        if inner != word.text:
            return [Argument(value, word)]
        return [Argument(None if _UNKNOWN in part else part, word) for part in value.split()]

    def _fill(self, text: str, depth: int, *, in_quotes: bool = False) -> str:
        """The text without quotes, with a mark at each unknown part."""
        filled = []
        at = 0
        while at < len(text):
            char, following = text[at], text[at + 1 : at + 2]
            if char == "'" and not in_quotes:
                end = text.find("'", at + 1)
                if end < 0:
                    raise NotUnderstood("a quote that is never closed")
                filled.append(text[at + 1 : end])
                at = end + 1
            elif char == '"' and not in_quotes:
                end = skip_double_quotes(text, at)
                filled.append(self._fill(text[at + 1 : end - 1], depth, in_quotes=True))
                at = end
            elif char == "\\" and (not in_quotes or following in ('"', "$", "`", "\\", "\n")):
                filled.append("" if following == "\n" else following)
                at += 2
            elif char in ("$`" if in_quotes else "$`*?{"):
                piece, at = self._variable(text, at, depth)
                filled.append(piece)
                if piece == _UNKNOWN:
                    break
            else:
                filled.append(char)
                at += 1
        return "".join(filled)

    def _variable(self, text: str, at: int, depth: int) -> tuple[str, int]:
        match = _NAME.match(text, at)
        if match is not None and match[3] is None and depth <= _DEPTH:
            value = self.plain.get(match[1] or match[2])
            if value is not None and _UNKNOWN not in value:
                return value, match.end()
        if text[at] in "*?" or (text[at] == "{" and "," not in text[at:]):
            return text[at], at + 1
        return _UNKNOWN, len(text)


def find_values(commands: Iterable[Command]) -> Values:
    values = Values()
    seen: dict[str, set[str]] = {}
    for command in commands:
        setting = list(command.assignments) if not command.words else []
        if command.text in _DECLARING:
            setting += [word for word in command.words if is_assignment(word.text)]
        if command.text == "read":
            setting += [
                Token(f"{word.text}=$(x)", 0, 0, is_word=True) for word in command.words[1:]
            ]
        for token in setting:
            name, _, text = token.text.partition("=")
            _set(values, name, text, token, seen)
    return values


def read_script(text: str, offset: int = 0) -> tuple[list[Command], Values] | None:
    """The commands and the values of a text; None if it is not understood."""
    try:
        commands = parse_commands(text, offset)
        return commands, find_values(commands)
    except NotUnderstood:
        return None


def _set(values: Values, name: str, text: str, token: Token, seen: dict[str, set[str]]) -> None:
    adds = name.endswith("+")
    name = name.removesuffix("+")
    if text.startswith("("):
        items = [t for t in tokenize(text[1:-1], token.end - len(text) + 1) if t.is_word]
        if adds and values.arrays.get(name) is not None:
            values.arrays[name] = [*(values.arrays[name] or []), *items]
        else:
            values.arrays[name] = None if adds or name in values.arrays else items
        return
    seen.setdefault(name, set()).add(text)
    is_same = not adds and len(seen[name]) == 1
    values.plain[name] = _known_words(values, text) if is_same else None


def _known_words(values: Values, text: str) -> str | None:
    """Also a value whose first words are known: `"python train.py $ARGS"`."""
    filled = values._fill(text, 0)
    if _UNKNOWN not in filled:
        return filled
    whole, _, cut = filled.partition(_UNKNOWN)
    if cut or not whole.strip() or not whole[-1].isspace():
        return None
    return whole + _UNKNOWN
