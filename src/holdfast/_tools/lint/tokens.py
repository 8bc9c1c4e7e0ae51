"""The words and operators of a shell script, each with its place.

A small reader of bash: quotes, comments, here-documents, substitutions. It never runs
or expands anything; a script that it cannot read to the end is NotUnderstood.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", "&>>", "&>", "<<<", "<<-", "<<", ">>", ">&")
_MORE_OPERATORS = ("<&", "<>", ">|", ";", "&", "|", "(", ")", "<", ">")
_OPERATOR = re.compile("|".join(re.escape(each) for each in (*_OPERATORS, *_MORE_OPERATORS)))
REDIRECTIONS = frozenset(["&>>", "&>", "<<<", "<<-", "<<", ">>", ">&", "<&", "<>", ">|", "<", ">"])
_BREAKS = " \t\n;&|()<>"


class NotUnderstood(Exception):
    """The script is no bash, or more bash than we read."""


@dataclass(frozen=True)
class Token:
    """A word, an operator, or the end of a line ("\\n")."""

    text: str
    start: int
    end: int
    is_word: bool


def tokenize(text: str, offset: int = 0) -> list[Token]:
    """The tokens in their order; `offset` is where `text` stands in the whole script."""
    return _Reader(text, offset).read()


def find_comments(text: str) -> list[int]:
    """Where the comments begin; what looks like one in a here-document is none."""
    reader = _Reader(text, 0)
    reader.read()
    return reader.comments


class _Reader:
    def __init__(self, text: str, offset: int) -> None:
        self._text = text
        self._offset = offset
        self._at = 0
        self._found: list[Token] = []
        self.comments: list[int] = []
        self._documents: list[tuple[str, bool]] = []  # here-documents that begin on the next line

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
            elif text.startswith("((", self._at) and self._is_first():
                self._add(skip_arithmetic(text, self._at), is_word=True)
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

    def _is_first(self) -> bool:
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
                at = skip_parentheses(text, at + 1)
            elif char in _BREAKS:
                if char == "(" and at > self._at and text[at - 1] in "=@?+*!":
                    at = skip_parentheses(text, at)  # an array, or a pattern
                    continue
                break
            else:
                at = skip_piece(text, at)
        return at


_LEADING = ("for", "if", "then", "elif", "else", "while", "until", "do", "!", "{", "time")


def skip_piece(text: str, at: int) -> int:
    """Past one character of a word, or past one quotation or substitution."""
    char = text[at]
    if char == "\\":
        return min(at + 2, len(text))
    if char == "'":
        return _find(text, "'", at + 1) + 1
    if char == '"':
        return skip_double_quotes(text, at)
    if char == "`":
        at += 1
        while at < len(text) and text[at] != "`":
            at += 2 if text[at] == "\\" else 1
        return at + 1
    if char == "$":
        if text.startswith("$((", at):
            return skip_arithmetic(text, at + 1)
        if text.startswith("$(", at):
            return skip_parentheses(text, at + 1)
        if text.startswith("${", at):
            return _skip_braces(text, at + 1)
        if text.startswith("$'", at):
            at += 2
            while at < len(text) and text[at] != "'":
                at += 2 if text[at] == "\\" else 1
            return at + 1
    return at + 1


def skip_double_quotes(text: str, at: int) -> int:
    """Past the quotation that begins at `at`."""
    at += 1
    while at < len(text) and text[at] != '"':
        at = at + 1 if text[at] == "'" else skip_piece(text, at)
    if at >= len(text):
        raise NotUnderstood("a quote that is never closed")
    return at + 1


def skip_parentheses(text: str, at: int) -> int:
    """Past the matching parenthesis of the one at `at`."""
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "#" and text[at - 1] in " \t\n(;":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        if char in "()":
            depth += 1 if char == "(" else -1
            at += 1
            if depth == 0:
                return at
        else:
            at = skip_piece(text, at)
    raise NotUnderstood("a parenthesis that is never closed")


def skip_arithmetic(text: str, at: int) -> int:
    """Past `((…))`, where a # is no comment."""
    depth = 0
    while at < len(text):
        if text[at] in "()":
            depth += 1 if text[at] == "(" else -1
            at += 1
            if depth == 0:
                return at
        else:
            at += 1
    raise NotUnderstood("a parenthesis that is never closed")


def _skip_braces(text: str, at: int) -> int:
    depth = 0
    while at < len(text):
        char = text[at]
        if char in "{}":
            depth += 1 if char == "{" else -1
            at += 1
            if depth == 0:
                return at
        else:
            at = skip_piece(text, at)
    raise NotUnderstood("a brace that is never closed")


def _find(text: str, what: str, at: int) -> int:
    found = text.find(what, at)
    if found < 0:
        raise NotUnderstood("a quote that is never closed")
    return found
