"""Leaves secrets out of records: command lines, variables, hyperparameters, diffs.

A secret is recognised by its name (`--api-key x`, `HF_TOKEN=x`, `"password": "x"`), by its place
(`https://user:password@host`, `Authorization: Bearer x`), or by its form (`ghp_…`, a private key).
In doubt a value is left out: a missing value can be given again, a stored secret stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LEFT_OUT = "<left out>"

# A name with one of these anywhere is secret, also in a longer word: PGPASSWORD.
_ANYWHERE = (
    *("password", "passwd", "passphrase", "secret", "credential"),
    *("apikey", "accesskey", "privatekey"),
)
# A name that ends with one of these is secret: HF_TOKEN. num_tokens is a hyperparameter.
_LAST = """
    key token auth pass pw pwd pat sig signature cookie cookies dsn webhook jwt bearer otp
"""
# Names that end with one of these describe a secret, and are none.
_ABOUT = """
    file path dir folder length len policy prompt name manager field stdin env var ttl id
"""
_TOKENS = """
    pad eos bos mask unk sep cls special image start end begin stop prefix suffix max min num next
    per new first last
"""
_KEYS = """
    sort primary foreign metric monitor loss label image text input output target data column prng
    rng random batch group dict feature state video audio map config index order
"""
_LAST_WORDS = frozenset(_LAST.split())
_HARMLESS_LAST = frozenset(_ABOUT.split())
_HARMLESS_BEFORE = {"token": frozenset(_TOKENS.split()), "key": frozenset(_KEYS.split())}
_SWITCHES = ("no", "use", "with", "enable", "disable", "skip", "require", "has", "is")
_PLAIN_VALUES = frozenset(["", "true", "false", "none", "null", "yes", "no", "on", "off"])
_LEAST_KEY_CHARACTERS = 16  # of a value whose name is just `key`

_WORD_ENDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_ASSIGNED = re.compile(r"[+~]{0,2}-{0,2}[A-Za-z_][\w./@-]*")

_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
# user:password@; for http also a name alone, which can be a token.
_IN_ADDRESS = re.compile(
    r"(?P<scheme>(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://)"
    r"(?:[^\s/@\"']{0,200}:[^\s/\"']{0,400}|(?<=http://)[^\s/@:\"']{1,400}"
    r"|(?<=https://)[^\s/@:\"']{1,400})@"
)
_HEADER = re.compile(
    r"(?i)(?P<name>\b(?:proxy-)?authorization\b|\bx-[\w-]{0,40}(?:key|token)\b|\b(?:set-)?cookie\b)"
    r"(?P<sign>[\\\"']{0,8}\s{0,8}[:=]\s{0,8}[\\\"']{0,8})[^\n\"'\\]+"
)
_BEARER = re.compile(r"(?i)\b(?P<name>bearer)\s+[\w.~+/=-]{8,}")
# Services whose tokens have a form of their own.
_FORMS = re.compile(
    r"\b(?:gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}"
    r"|sk-[\w-]{16,}|[srp]k_(?:live|test)_\w{10,}|xox[a-z]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|AIza[\w-]{30,}|ya29\.[\w-]{16,}|npm_\w{20,}|pypi-[\w-]{16,}|SG\.[\w.-]{20,}"
    r"|dapi[0-9a-f]{32}|dop_v1_\w{16,}|dckr_pat_[\w-]{16,}|r8_\w{20,}|gsk_\w{20,}|lin_api_\w{16,}"
    r"|nvapi-[\w-]{16,}|PMAK-[\w-]{16,}|\d{8,10}:[A-Za-z0-9_-]{35}"
    r"|eyJ[\w-]{6,4000}\.[\w-]{6,4000}(?:\.[\w-]{0,4000})?)"
)
_WEBHOOK = re.compile(
    r"(?P<name>https://(?:hooks\.slack\.com/services|(?:\w+\.)?discord(?:app)?\.com/api/webhooks)/)"
    r"[^\s\"']+"
)
# Long, without a separator, in both cases and with digits: no person has chosen such a name.
_RANDOM = re.compile(
    r"(?<![\w/])(?=[A-Za-z0-9]{0,200}[a-z])(?=[A-Za-z0-9]{0,200}[A-Z])(?=[A-Za-z0-9]{0,200}[0-9])"
    r"[A-Za-z0-9]{32,}(?!\w)"
)
_NAME = re.compile(
    r"(?P<name>(?<![\w.-])-{0,2}[A-Za-z_][\w.-]{0,100})"
    r"[\\\"'\]]{0,8}\s{0,40}(?:=>|:=|=|:)\s{0,40}"
)
_VALUE = re.compile(
    r"[\\]{0,8}[\"']?(?P<value>(?<=\")(?:\\.|[^\"\\\n])+|(?<=')[^'\n]+|[^\s,;&}\])\"'\\]+)"
)
_OPTION_IN_TEXT = re.compile(r"(?P<name>(?<!\S)--?[A-Za-z][\w-]{0,100})\s{1,40}")
_VALUE_OF_OPTION = re.compile(r"(?P<value>[^\s-]\S*)")
_OPEN_PAIR = re.compile(r"(?<![\w.-])([A-Za-z_][\w.-]{0,100})[\"'\]]{0,8}\s{0,40}(?:=|:)\W{0,40}$")
_ENCODED_LINE = re.compile(r"[+ -]?\s*[\"']?[A-Za-z0-9+/]{40,}={0,2}[\"',\\n]*\s*")


@dataclass(frozen=True)
class Redacted:
    words: list[str]
    left_out: list[str]  # options by their names, other words as they are shown


def is_secret(name: str, value: str = "?") -> bool:
    """True if a value with this name is a secret.

    >>> is_secret("WANDB_API_KEY"), is_secret("--max-tokens", "512"), is_secret("sort_key", "loss")
    (True, False, False)
    """
    words = [word.lower() for word in _WORD_ENDS.split(name) if word]
    if not words or name in ("PWD", "OLDPWD") or value.lower() in _PLAIN_VALUES:
        return False
    if words[-1] in _HARMLESS_LAST or words[0] in _SWITCHES:
        return False
    joined = "".join(words)
    if any(each in joined for each in _ANYWHERE):
        return True
    last = words[-1]
    if last not in _LAST_WORDS:
        return False
    if len(words) > 1 and words[-2] in _HARMLESS_BEFORE.get(last, ()):
        return False
    if words == ["key"] and 1 < len(value) < _LEAST_KEY_CHARACTERS:
        return False
    return not (value.isdigit() and len(value) < 10)


def redact_text(text: str) -> str:
    """The text without the secrets in it.

    >>> redact_text("postgres://me:hunter2@host/db?token=abc")
    'postgres://<left out>@host/db?token=<left out>'
    """
    text = _PRIVATE_KEY.sub(LEFT_OUT, text)
    text = _IN_ADDRESS.sub(rf"\g<scheme>{LEFT_OUT}@", text)
    text = _WEBHOOK.sub(rf"\g<name>{LEFT_OUT}", text)
    text = _HEADER.sub(rf"\g<name>\g<sign>{LEFT_OUT}", text)
    text = _BEARER.sub(rf"\g<name> {LEFT_OUT}", text)
    text = _without_values(text, _NAME, _VALUE)
    text = _without_values(text, _OPTION_IN_TEXT, _VALUE_OF_OPTION)
    text = _FORMS.sub(LEFT_OUT, text)
    return _RANDOM.sub(LEFT_OUT, text)


def _without_values(text: str, names: re.Pattern[str], values: re.Pattern[str]) -> str:
    """The text without the values of secret names; other values may contain such names."""
    parts: list[str] = []
    kept = at = 0
    while (named := names.search(text, at)) is not None:
        at = named.end()
        if not is_secret(named["name"]):
            continue
        found = values.match(text, at)
        if found is None or LEFT_OUT.startswith(found["value"]):
            continue
        if is_secret(named["name"], found["value"]):
            parts += [text[kept : found.start("value")], LEFT_OUT]
            kept = at = found.end()
    return "".join(parts) + text[kept:]


def redact_words(words: Iterable[str]) -> Redacted:
    found: list[str] = []
    left_out: list[str] = []
    option = ""  # its value is the next word
    for word in words:
        name, sign, value = word.partition("=")
        if option and not word.startswith("--"):
            is_left_out = is_secret(option, word)
            found.append(LEFT_OUT if is_left_out else redact_text(word))
            if found[-1] != word:
                left_out.append(option)
            option = ""
            continue
        option = word if _OPTION.fullmatch(word) and is_secret(word) else ""
        if sign and _ASSIGNED.fullmatch(name) and is_secret(name, value):
            found.append(f"{name}={LEFT_OUT}")
            left_out.append(name)
            continue
        found.append(redact_text(word))
        if found[-1] != word:
            left_out.append(found[-1] if len(found[-1]) <= 60 else f"{found[-1][:59]}…")
    return Redacted(found, left_out)


def redact_variables(variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables without secrets, and the names of those that are left out."""
    found: dict[str, str] = {}
    left_out: list[str] = []
    for name, value in variables.items():
        # A list of folders contains colons, and is no assignment.
        is_list = name.endswith("PATH") and "://" not in value
        if is_secret(name, value) or (redact_text(value) != value and not is_list):
            left_out.append(name)
        else:
            found[name] = value
    return found, left_out


def redact_tree(value: Any, name: str = "") -> Any:
    """A JSON value without secrets, by the names of its members and by its texts."""
    if isinstance(value, dict):
        return {redact_text(key): redact_tree(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [redact_tree(each, name) for each in value]
    if isinstance(value, str):
        return LEFT_OUT if is_secret(name, value) else redact_text(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return LEFT_OUT if is_number and is_secret(name, str(value)) else value


def redact_diff(text: str) -> str:
    """A diff without each line that may contain a secret."""
    found: list[str] = []
    is_in_key = is_continued = False
    for line in text.splitlines():
        begins_key = "PRIVATE KEY-----" in line and "-----BEGIN" in line
        is_in_key = is_in_key or begins_key
        named = _OPEN_PAIR.search(line)
        opens = named is not None and is_secret(named[1])
        hides = is_in_key or is_continued or opens
        if hides or redact_text(line) != line or _ENCODED_LINE.fullmatch(line):
            found.append(f"{line[:1]}{LEFT_OUT}")
        else:
            found.append(line)
        is_continued = opens
        # A hunk ends a key too: its last line may be outside of the diff.
        is_in_key = is_in_key and "-----END" not in line and not line.startswith("@@")
    return "\n".join(found) + ("\n" if found else "")
