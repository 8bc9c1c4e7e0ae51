"""The browser itself: what the other tests rely on, seen with pages of a few lines."""

from __future__ import annotations

from tests.browser.browser import NARROW, WIDE
from tests.browser.serving import serving_page

_PAGE = """<!doctype html><html lang="en"><title>A page</title><meta name="viewport"
content="width=device-width"><style>body { width: 800px } @media (prefers-color-scheme: dark) {
body { background: black; color: white } }</style><main><h1>A page</h1>%s</main>
<script>performance.mark('holdfast-first-view')</script></html>"""


def test_sizes_and_colours_are_as_asked(browser):
    with serving_page(_PAGE % "") as address:
        for size in (WIDE, NARROW):
            browser.open(address, size=size)
            assert browser.run("return document.documentElement.clientWidth") == size[0]
            assert (browser.overflow() > 0) == (size is NARROW)
        dark = "return matchMedia('(prefers-color-scheme: dark)').matches"
        assert not browser.run(dark)
        browser.open(address, scheme="dark")
        assert browser.run(dark)
        assert 0 < browser.first_view_seconds() < 5


def test_what_axe_finds_is_told(browser):
    with serving_page(_PAGE % "") as address:
        browser.open(address)
        assert browser.faults() == []
    with serving_page(_PAGE % "<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>") as address:
        browser.open(address)
        assert "image-alt" in "".join(browser.faults())


def test_what_the_browser_complains_of_is_told(browser):
    with serving_page(_PAGE % "<script>throw Error('planted')</script>") as address:
        browser.open(address)
        assert "planted" in "".join(browser.complaints())
