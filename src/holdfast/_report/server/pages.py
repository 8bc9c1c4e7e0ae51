"""The HTML of the list, and the few words for whoever is not let in."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
from importlib import resources

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_UNSAFE_PATTERN = re.compile("[<>&\u2028\u2029]")


def list_page(title: str, rows: str, attributes: dict[str, str]) -> tuple[str, str]:
    """The list with its first rows (JSON) in it, and the content policy that goes with it."""
    values = {
        "title": html.escape(title),
        "rows": _UNSAFE_PATTERN.sub(lambda found: _UNSAFE[found[0]], rows),
        "attributes": " ".join(
            f'data-{name}="{html.escape(value)}"' for name, value in attributes.items()
        ),
    }
    # In one pass: a folder may be called {{rows}}.
    filled = re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], _template())
    return filled, _policy()


@functools.cache
def _template() -> str:
    """The page with style and scripts in place, and places for what differs."""
    return re.sub(
        r"\{\{(ours|theirs) ([\w./-]+)\}\}",
        _include,
        _read("holdfast._report.server", "index.html"),
    )


def _include(found: re.Match[str]) -> str:
    return _read("holdfast._report.server" if found[1] == "ours" else "holdfast._report", found[2])


def _read(package: str, name: str) -> str:
    path = resources.files(package).joinpath("page")
    for part in name.split("/"):
        path = path.joinpath(part)
    return path.read_text(encoding="utf-8")


@functools.cache
def _policy() -> str:
    """Only our own scripts and styles, each known by its hash."""
    scripts = " ".join(map(_hash, _SCRIPT.findall(_template())))
    styles = " ".join(map(_hash, _STYLE.findall(_template())))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def bounce_page() -> str:
    """Comes back at once, as a visit from this page: then the browser sends its strict cookie."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="refresh" content="0"><title>holdfast</title>'
        "<p>One moment…</p></html>"
    )


def word_page(sentence: str) -> str:
    """A page of one sentence."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>holdfast</title><p>{html.escape(sentence)}</p></html>"
    )
