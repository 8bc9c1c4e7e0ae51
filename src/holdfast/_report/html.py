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
    from holdfast._report.compare import Comparison

_PAGE = Path(__file__).with_name("page")
_FILE = re.compile(r"\{\{file ([\w./-]+)\}\}")
_PLACE = re.compile(r"\{\{(title|view|attributes|csp)\}\}")
_ESCAPED = {
    ord(each): f"\\u{ord(each):04x}" for each in ("<", ">", "&", "\u2028", "\u2029", "\x7f")
}


RUN_PAGE, COMPARE_PAGE = "page.html", "compare.html"


def render(view: View, attributes: Mapping[str, str] | None = None) -> str:
    """The report of a run."""
    return _fill(RUN_PAGE, view["run"]["name"], to_json(view), attributes or {}, live=False)


def page(title: str, attributes: Mapping[str, str], view: View | None = None) -> str:
    """The live page, which requests its data from the addresses in `attributes`."""
    text = "null" if view is None else to_json(view)
    return _fill(RUN_PAGE, title, text, attributes, live=True)


def render_comparison(found: Comparison, title: str) -> str:
    """Runs side by side, as one file."""
    return _fill(COMPARE_PAGE, title, to_json(found), {}, live=False)


def comparison_page(title: str, attributes: Mapping[str, str], found: Comparison | None) -> str:
    """Runs side by side, live."""
    text = "null" if found is None else to_json(found)
    return _fill(COMPARE_PAGE, title, text, attributes, live=True)


@functools.cache
def policy(*, live: bool, page: str = RUN_PAGE) -> str:
    return policy_of(_template(page), live=live)


def policy_of(page: str, *, live: bool) -> str:
    """The Content-Security-Policy of a page: only its own scripts and styles, by their hashes."""
    rules = ["default-src 'none'"]
    rules += [f"script-src {_hashes('script', page)}", f"style-src {_hashes('style', page)}"]
    rules += ["img-src data:", "base-uri 'none'", "form-action 'none'"]
    rules += ["connect-src 'self'"] if live else []
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
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list) else value


@functools.cache
def _template(name: str) -> str:
    page = (_PAGE / name).read_text(encoding="utf-8")
    return _FILE.sub(lambda found: (_PAGE / found[1]).read_text(encoding="utf-8"), page)


def _hashes(tag: str, text: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    sums = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found]
    return " ".join(f"'sha256-{each}'" for each in sums) or "'none'"


def _fill(page: str, title: str, view: str, attributes: Mapping[str, str], *, live: bool) -> str:
    values = {
        "title": html.escape(title.encode("utf-8", errors="replace").decode()),
        "view": view,
        "attributes": " ".join(
            f'{name}="{html.escape(text)}"' for name, text in attributes.items()
        ),
        "csp": html.escape(policy(live=live, page=page), quote=True),
    }
    # In one pass, so that no place is filled inside of what was filled in.
    return _PLACE.sub(lambda found: values[found[1]], _template(page))
