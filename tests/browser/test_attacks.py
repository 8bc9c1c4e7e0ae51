"""Names that are scripts: whatever a run says of itself is shown, and never done."""

from __future__ import annotations

from tests.browser.serving import serving_page
from tests.report_runs import HOSTILE_FOLDER, SCRIPTS

_HACKED = "return document.documentElement.dataset.hacked ?? null"
_PLANTED = (
    "return [...document.querySelectorAll('img, svg[onload], plaintext, [onerror], [onload],"
    ' a[href^="javascript:" i]\')].map(e => e.outerHTML.slice(0, 200))'
)


def _check(browser) -> None:
    assert browser.run(_HACKED) is None
    assert browser.driver.title != "hacked"
    assert browser.run(_PLANTED) == []
    assert browser.complaints() == []


def test_the_names_would_act_if_they_were_let(browser):
    for script in (*SCRIPTS[:3], HOSTILE_FOLDER):
        with serving_page(f"<!doctype html><title>page</title><p>{script}</p>") as address:
            browser.open(address, has_mark=False)
            browser.wait_for(_HACKED, f"what {script} does")


def test_names_are_text_in_a_report(browser, runs, report):
    browser.open(report(runs / HOSTILE_FOLDER))
    browser.run("document.querySelectorAll('details').forEach(e => { e.open = true })")
    _check(browser)
    shown = browser.run("return document.body.textContent")
    for script in SCRIPTS[:4]:
        assert script in shown


def test_names_are_text_on_the_live_pages(browser, runs_ui):
    browser.open(runs_ui.address)
    assert HOSTILE_FOLDER in browser.text()
    _check(browser)
    browser.follow(HOSTILE_FOLDER)
    browser.run("document.querySelectorAll('details').forEach(e => { e.open = true })")
    _check(browser)


def test_no_page_is_without_its_token(browser, runs_ui):
    browser.driver.delete_all_cookies()
    for path in ("/", "/?token=guess", "/metrics", "/run/1"):
        browser.open(runs_ui.origin + path, has_mark=False)
        assert "many-attempts" not in browser.text()
    browser.open(runs_ui.address)
    assert "many-attempts" in browser.text()
    assert "token" not in browser.driver.current_url
