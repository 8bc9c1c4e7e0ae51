"""The values of words, as far as the script itself shows them: literals and plain variables.

A variable is known if every assignment to it in the script is the same literal. A word with any
other part (a command's output, the environment, arithmetic) has no value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast._tools.lint.shell import (
    Command,
    NotUnderstood,
    Token,
    is_assignment,
    skip_double_quotes,
    tokenize,
)

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
    """The variables that a script sets."""

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
