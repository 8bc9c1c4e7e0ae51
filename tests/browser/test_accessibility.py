"""axe-core finds nothing serious on any page, in light and in dark, wide and narrow."""

from __future__ import annotations

import pytest

from tests.browser.browser import NARROW, WIDE
from tests.report_runs import HOSTILE_FOLDER

_LOOKS = [(WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")]


@pytest.mark.parametrize(("size", "scheme"), _LOOKS)
def test_a_report(size, scheme, browser, runs, report):
    browser.open(report(runs / "many-attempts"), size=size, scheme=scheme)
    assert browser.faults() == []


@pytest.mark.parametrize("name", ["just-begun", "many-ranks", HOSTILE_FOLDER])
def test_other_reports(name, browser, runs, report):
    browser.open(report(runs / name))
    assert browser.faults() == []


@pytest.mark.parametrize(("size", "scheme"), _LOOKS)
def test_the_list_of_runs(size, scheme, browser, runs_ui):
    browser.open(runs_ui.address, size=size, scheme=scheme)
    assert browser.faults() == []


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_the_page_of_a_live_run(size, scheme, browser, runs_ui):
    browser.open(runs_ui.address, size=size, scheme=scheme)
    browser.follow("live")
    assert browser.button("Save now") is not None
    assert browser.faults() == []
    browser.click("Stop…")
    assert browser.faults() == []
