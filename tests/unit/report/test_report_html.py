"""The page is one file in which nothing of a run can act."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._report import html
from holdfast._report.model import RunModel
from tests.unit.report_folder import killed_and_resumed

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{view}}{{file style.css}}"


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[int, str] = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.found and self.found[-1][0] in ("script", "style", "title"):
            at = len(self.found) - 1
            self.inside[at] = self.inside.get(at, "") + data

    def texts(self, tag: str, **wanted: str) -> list[str]:
        return [
            self.inside.get(at, "")
            for at, (name, attributes) in enumerate(self.found)
            if name == tag and all(attributes.get(key) == each for key, each in wanted.items())
        ]


@pytest.fixture
def view(folder):
    killed_and_resumed(folder)
    model = RunModel(folder)
    model.update()
    return model.view()


def test_the_view_comes_back_out_of_the_page(view):
    view["metrics"][0]["name"] = ATTACK + "\u2028\u2029"
    tags = Tags(html.render(view))
    (text,) = tags.texts("script", id="holdfast-view")
    assert json.loads(text) == json.loads(json.dumps(view))


def test_a_hostile_name_stays_text(view):
    usual = html.render(view)
    view["run"]["name"] = view["run"]["headline"] = view["events"][0]["title"] = ATTACK
    hostile = html.render(view)
    assert [tag for tag, _ in Tags(hostile).found] == [tag for tag, _ in Tags(usual).found]
    assert ATTACK in "".join(Tags(hostile).texts("title"))


def test_scripts_and_styles_are_allowed_by_their_hashes_only(view):
    text = html.render(view)
    policy = html.policy(is_live=False)
    tags = Tags(text)
    (told,) = [a["content"] for tag, a in tags.found if a.get("http-equiv")]
    assert told == policy
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert "connect-src 'self'" in html.policy(is_live=True)
    for script in re.findall(r"<script>(.*?)</script>", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_the_page_needs_nothing_from_anywhere(view):
    for tag, attributes in Tags(html.render(view)).found:
        for name in ("src", "href"):
            where = attributes.get(name)
            assert where is None or where.startswith(("#", "data:")), (tag, where)
        assert not any(name.startswith("on") for name in attributes)


def test_the_live_page_has_its_addresses(view):
    text = html.fill_page(html.RUN_PAGE, 'a "run"', "null", {"data-live": '/api/"x"'})
    tags = Tags(text)
    assert dict(tags.found[0][1])["data-live"] == '/api/"x"'
    (told,) = tags.texts("script", id="holdfast-view")
    assert json.loads(told) is None


@given(st.recursive(st.none() | st.floats() | st.text() | st.booleans(), st.lists, max_leaves=20))
def test_what_becomes_json_can_stand_between_two_tags(value):
    text = html.to_json(value)
    assert not set(text) & set("<>&\u2028\u2029")
    json.loads(text)
    text.encode()


def test_numbers_that_are_not_finite_are_null():
    assert html.to_json({"a": [float("nan"), float("-inf"), 1.5]}) == '{"a":[null,null,1.5]}'
