"""The HTML of the list of runs, and short pages of one sentence."""

from __future__ import annotations

import functools
import html
import re
from pathlib import Path

from holdfast._report import html as report_page

_OURS = Path(__file__).with_name("page")
_THEIRS = _OURS.parents[1] / "page"  # of the report


def list_page(title: str, rows: str, attributes: dict[str, str]) -> tuple[str, str]:
    """The list with its first rows (JSON) in it, and its Content-Security-Policy."""
    values = {
        "title": html.escape(title),
        "rows": report_page.escape(rows),
        "attributes": " ".join(
            f'data-{name}="{html.escape(value)}"' for name, value in attributes.items()
        ),
    }
    # In one pass: a folder may be called {{rows}}.
    filled = re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], _template())
    return filled, _policy()


@functools.cache
def _template() -> str:
    def include(found: re.Match[str]) -> str:
        folder = _OURS if found[1] == "ours" else _THEIRS
        return (folder / found[2]).read_text(encoding="utf-8")

    page = (_OURS / "index.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(ours|theirs) ([\w./-]+)\}\}", include, page)


@functools.cache
def _policy() -> str:
    return f"{report_page.policy_of(_template(), live=True)}; frame-ancestors 'none'"


def bounce_page() -> str:
    """Reloads at once, as a visit from this page: then the browser sends its strict cookie."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="refresh" content="0"><title>holdfast</title>'
        "<p>One moment…</p></html>"
    )


def word_page(sentence: str) -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>holdfast</title><p>{html.escape(sentence)}</p></html>"
    )
