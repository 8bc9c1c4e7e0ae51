"""What words stand for, as far as the script itself says: literal text and plain variables.

A variable counts as known if every assignment to it in the script is the same literal.
Anything else (a command's output, the environment, arithmetic) is not known, and a word
with such a part has no value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast._tools.lint.shell import Command, is_assignment
from holdfast._tools.lint.tokens import NotUnderstood, Token, skip_double_quotes, tokenize

_NAME = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(\[[@*]\])?\})")
_DECLARING = frozenset(["export", "declare", "typeset", "readonly", "local"])
_DEPTH = 5  # of variables that stand for variables
_UNKNOWN = "\0"


@dataclass(frozen=True)
class Argument:
    """A word of a command, expanded; several may come from one word."""

    value: str | None
    source: Token

    @property
    def text(self) -> str:
        """The value, or if that is not known what is written."""
        return self.source.text if self.value is None else self.value

    @property
    def program(self) -> str:
        """The name of the program that it names, without its folder; "" if nobody can know."""
        if self.value is not None:
            return self.value.rpartition("/")[2]
        name = self.source.text.strip('"').rpartition("/")[2]
        return name if re.fullmatch(r"[\w.+-]+", name) and "/" in self.source.text else ""


@dataclass
class Values:
    """The variables that a script sets."""

    plain: dict[str, str | None] = field(default_factory=dict)
    arrays: dict[str, list[Token] | None] = field(default_factory=dict)

    def arguments(self, words: Iterable[Token], depth: int = 0) -> list[Argument]:
        """Words expanded."""
        found: list[Argument] = []
        for word in words:
            found += self._expand(word, depth)
        return found

    def value(self, text: str, depth: int = 0) -> str | None:
        """One word's value, where it stays one word."""
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

    def _fill(self, text: str, depth: int) -> str:
        """The text without quotes, with a mark where something is not known."""
        filled = []
        at = 0
        while at < len(text):
            char = text[at]
            if char == "'":
                end = text.find("'", at + 1)
                if end < 0:
                    raise NotUnderstood("a quote that is never closed")
                filled.append(text[at + 1 : end])
                at = end + 1
            elif char == '"':
                end = skip_double_quotes(text, at)
                filled.append(self._fill_quoted(text[at + 1 : end - 1], depth))
                at = end
            elif char == "\\":
                filled.append("" if text[at + 1 : at + 2] == "\n" else text[at + 1 : at + 2])
                at += 2
            elif char in "$`*?{":
                piece, at = self._variable(text, at, depth)
                filled.append(piece)
                if piece == _UNKNOWN:
                    break
            else:
                filled.append(char)
                at += 1
        return "".join(filled)

    def _fill_quoted(self, text: str, depth: int) -> str:
        filled = []
        at = 0
        while at < len(text):
            char = text[at]
            if char == "\\" and text[at + 1 : at + 2] in ('"', "$", "`", "\\", "\n"):
                filled.append("" if text[at + 1] == "\n" else text[at + 1])
                at += 2
            elif char in "$`":
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
    """The variables, with what is known of them."""
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
    """A value whose first words are known is worth keeping: `"python train.py $ARGS"`."""
    filled = values._fill(text, 0)
    if _UNKNOWN not in filled:
        return filled
    whole, _, cut = filled.partition(_UNKNOWN)
    if cut or not whole.strip() or not whole[-1].isspace():
        return None
    return whole + _UNKNOWN
