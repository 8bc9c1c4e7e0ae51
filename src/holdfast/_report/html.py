"""One file of HTML with everything in it: the page, its scripts, and the view as JSON.

Every string of a run may be hostile. Only its name enters HTML, escaped. All else is JSON in
which nothing can end a script, and the page shows it as text. The policy in the page allows its
own scripts by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._report.view import View

if TYPE_CHECKING:
    from holdfast._report.compare import RunComparison

_PAGE = Path(__file__).with_name("page")
_FILE = re.compile(r"\{\{file ([\w./-]+)\}\}")
_PLACE = re.compile(r"\{\{(title|view|attributes|csp)\}\}")
_ESCAPED = {
    ord(each): f"\\u{ord(each):04x}" for each in ("<", ">", "&", "\u2028", "\u2029", "\x7f")
}
RUN_PAGE, COMPARE_PAGE, LIST_PAGE = "page.html", "compare.html", "list.html"


def render(view: View) -> str:
    return fill_page(RUN_PAGE, view["run"]["name"], to_json(view))


def render_comparison(found: RunComparison, title: str) -> str:
    return fill_page(COMPARE_PAGE, title, to_json(found))


def short_page(sentence: str, *, reloads: bool = False) -> str:
    """A page of one sentence; it may load its address again at once."""
    refresh = '<meta http-equiv="refresh" content="0">' if reloads else ""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><meta name="color-scheme" content="light dark">{refresh}'
        f"<title>holdfast</title><p>{html.escape(sentence)}</p></html>"
    )


@functools.cache
def policy(page: str = RUN_PAGE, *, is_live: bool) -> str:
    """The Content-Security-Policy of a page: only its own scripts and styles, by their hashes."""
    text = _template(page)
    rules = ["default-src 'none'"]
    rules += [f"script-src {_hashes('script', text)}", f"style-src {_hashes('style', text)}"]
    rules += ["img-src data:", "base-uri 'none'", "form-action 'none'"]
    rules += ["connect-src 'self'"] if is_live else []
    return "; ".join(rules)


def to_json(view: Any) -> str:
    """JSON that can stand between two tags; a number that is not finite becomes null."""
    try:
        text = json.dumps(view, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    except ValueError:
        text = json.dumps(finite(view), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    # A name of undecodable bytes has surrogates in it, which UTF-8 cannot encode.
    return escape(text.encode("utf-8", errors="replace").decode())


def escape(text: str) -> str:
    """JSON in which nothing can end a script."""
    return text.translate(_ESCAPED)


def finite(value: Any) -> Any:
    """JSON has no infinity, and no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


@functools.cache
def _template(name: str) -> str:
    """A file of the page with all files in it that it names."""
    text = (_PAGE / name).read_text(encoding="utf-8")
    return _FILE.sub(lambda found: _template(found[1]), text)


def _hashes(tag: str, text: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    sums = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found]
    return " ".join(f"'sha256-{each}'" for each in sums) or "'none'"


def fill_page(page: str, title: str, data: str, attributes: Mapping[str, str] | None = None) -> str:
    """A page with its JSON; one with attributes requests what is new from the addresses in them."""
    values = {
        "title": html.escape(title.encode("utf-8", errors="replace").decode()),
        "view": data,
        "attributes": " ".join(
            f'{name}="{html.escape(text)}"' for name, text in (attributes or {}).items()
        ),
        "csp": html.escape(policy(page, is_live=attributes is not None), quote=True),
    }
    # In one pass, so that no place is filled inside of what was filled in.
    return _PLACE.sub(lambda found: values[found[1]], _template(page))
