"""Every link of the documentation leads to something, also in the built site."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, name_of, pages, text_without_blocks

_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} +(.*?)\s*$", re.MULTILINE)
_README_LINES = 200


def _links(page: Path) -> list[str]:
    return [first or second for first, second in _LINK.findall(text_without_blocks(page))]


def _anchors(page: Path) -> set[str]:
    """The anchors of a page, as a forge makes them."""
    found: set[str] = set()
    for heading in _HEADING.findall(text_without_blocks(page)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(slug)
    return found


@pytest.mark.parametrize("page", [*pages(), ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(page: Path):
    for address in _links(page):
        if "://" in address:
            continue
        path, _, anchor = address.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {address}"
        assert target.is_relative_to(ROOT), f"{page.name}: {address}"
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), f"{page.name}: {address}"


def test_every_page_is_linked_from_the_readme():
    linked = {address.partition("#")[0] for address in _links(ROOT / "README.md")}
    missing = {f"docs/{page.name}" for page in DOCS.glob("*.md")} - linked - {"docs/index.md"}
    assert not missing


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < _README_LINES


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a link or a page that is missing fails it."""
    pytest.importorskip("mkdocs", reason="pip install mkdocs")
    place = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return place


class _Fetched(HTMLParser):
    """What a browser would fetch for a page by itself: everything but what a reader clicks."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "link" and given.get("rel") == "canonical":
            return
        names = ("href",) if tag == "link" else ("src", "srcset", "data", "poster")
        self.addresses += [given[name] for name in names if name in given]


def test_the_site_fetches_nothing_from_elsewhere(site: Path):
    for page in site.rglob("*.html"):
        fetched = _Fetched()
        fetched.feed(page.read_text(encoding="utf-8"))
        away = [each for each in fetched.addresses if re.match(r"(\w+:)?//", each)]
        assert not away, f"{page.name}: {away}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", style.read_text()), style.name


def test_the_site_has_every_page_and_what_they_link_to(site: Path):
    for page in DOCS.glob("*.md"):
        assert (site / f"{page.stem}.html").is_file(), page.name
    for page in site.glob("*.html"):
        for address in re.findall(r'(?:href|src)="([^"#:]+)"', page.read_text()):
            if not address.startswith(("//", "/")) and not address.endswith("404.html"):
                assert (page.parent / address).exists(), f"{page.name}: {address}"
