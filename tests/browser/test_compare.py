"""A thousand runs: choose three, lay their curves over each other, sort, filter, download.

The times are those of the browser's own clock. The machine may be busy with other tests: one good
look of a few shows what the page can do.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from tests.browser.browser import NARROW, WIDE
from tests.browser.serving import Ui
from tests.many_runs import make_sweep
from tests.support import wait_until

_COUNT = 1000
_FIRST_VIEW_SECONDS, _FILTER_SECONDS = 1.0, 0.1
_LOOKS = 6
_ALL_READ = (
    "return document.querySelector('#count-all').innerText === '1,000'"
    " && !document.querySelector('#state').innerText.includes('so far')"
)
_FILTER = """
const field = document.querySelector("#search");
const began = performance.now();
field.value = arguments[0];
field.dispatchEvent(new Event("input"));
document.body.offsetHeight;  // the browser has laid it out
return (performance.now() - began) / 1000;
"""
_NAMES = (
    "return [...document.querySelectorAll('table.compare tbody th')]"
    ".map(e => e.querySelector('a, .run > span:last-child').innerText)"
)
_COLUMN = (
    "const at = [...document.querySelectorAll('table.compare thead tr:last-child th')]"
    ".findIndex(e => e.innerText.trim() === arguments[0]);"
    "return [...document.querySelectorAll('table.compare tbody tr')]"
    ".map(e => e.children[at].innerText)"
)


@pytest.fixture(scope="module")
def sweep_ui(tmp_path_factory):
    ui = Ui(make_sweep(tmp_path_factory.mktemp("sweep"), _COUNT, rows=20))
    yield ui
    ui.end()


def _filter(browser, words: str) -> float:
    """The best time of a few; each time the field had other words before."""
    times: list[float] = []
    while len(times) < _LOOKS and min(times, default=9.0) > _FILTER_SECONDS:
        browser.run(_FILTER, "")
        times.append(float(browser.run(_FILTER, words)))
    print(f"filter by {words!r}: {times} s")
    return min(times)


def _open_list(browser, ui) -> None:
    browser.open(ui.address)
    browser.wait_for(_ALL_READ, "a thousand runs", 60)


def _choose(browser, *names: str) -> None:
    for name in names:
        browser.run(_FILTER, name)
        box = browser.wait_for(
            f"return document.querySelector('[aria-label=\"Select {name}\"]')", name
        )
        box.click()
    browser.run(_FILTER, "")
    browser.click(f"Compare {len(names)} selected")
    browser.wait_for("return location.pathname.endsWith('/compare')", "the page")
    browser.first_view_seconds()


def test_a_thousand_runs_are_seen_at_once_and_filtered_in_a_moment(browser, sweep_ui):
    _open_list(browser, sweep_ui)
    views: list[float] = []
    while len(views) < _LOOKS and min(views, default=9.0) > _FIRST_VIEW_SECONDS:
        browser.open(sweep_ui.address)
        views.append(browser.first_view_seconds())
    print(f"first view after {views} s")
    assert min(views) < _FIRST_VIEW_SECONDS
    browser.wait_for(_ALL_READ, "a thousand runs", 60)
    assert _filter(browser, "seed=77") < _FILTER_SECONDS
    assert browser.run("return document.querySelector('#where').innerText") == "1 to 11 of 11"
    assert _filter(browser, "died") < _FILTER_SECONDS
    assert browser.complaints() == []


def test_three_of_a_thousand_are_laid_over_each_other_sorted_and_told_apart(browser, sweep_ui):
    _open_list(browser, sweep_ui)
    _choose(browser, "sweep-0001", "sweep-0500", "sweep-0999")
    assert browser.run(_NAMES) == ["sweep-0001", "sweep-0500", "sweep-0999"]
    assert "Best so far by loss: sweep-0500" in browser.text()
    # The chart has a curve for each, and reads all of them at one step.
    reading = "return document.querySelector('#reading').innerText"
    assert browser.run(reading).count("sweep-") == 3
    stage = browser.run("return document.querySelector('#stage')")
    stage.send_keys("\ue014")  # the right arrow
    browser.wait_for(f"{reading}.startsWith('At step ')", "the values at a step")
    # Only what differs, then all.
    head = "return document.querySelector('table.compare thead').innerText"
    assert "seed" in browser.run(head)
    assert "data" not in browser.run(head).split()
    browser.click("Only what differs")
    assert "data" in browser.run(head).split()
    # By any column, both ways; the focus stays on the column.
    browser.click("lr", "table.compare")
    rates = [float(each) for each in browser.run(_COLUMN, "lr")]
    assert rates == sorted(rates)
    browser.click("lr", "table.compare")
    assert browser.run(_COLUMN, "lr") == browser.run(_COLUMN, "lr")
    assert [float(each) for each in browser.run(_COLUMN, "lr")] == rates[::-1]
    assert browser.run("return document.activeElement.innerText") == "lr"
    # Another metric, over time, smoothed, on a log scale.
    for name, value in (("metric", "accuracy"), ("over", "seconds")):
        browser.run(
            "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('change'))",
            name,
            value,
        )
    browser.wait_for("return /highest|Best so far by accuracy/.test(document.body.innerText)", "it")
    browser.run(
        "const e = document.getElementById('smooth'); e.value = '0.6';"
        "e.dispatchEvent(new Event('input'))"
    )
    browser.click("Log scale")
    browser.wait_for(f"{reading}.includes('sweep-0500')", "the values of the other metric")
    assert browser.complaints() == []


def test_a_chart_is_downloaded_as_numbers_and_as_a_picture(browser, sweep_ui, tmp_path):
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    _open_list(browser, sweep_ui)
    _choose(browser, "sweep-0001", "sweep-0002")
    browser.click("CSV", ".controls")
    rows = list(csv.reader(io.StringIO(_downloaded(tmp_path / "loss.csv").decode())))
    assert rows[0] == ["step", "sweep-0001", "sweep-0002"]
    assert float(rows[-1][0]) == 200
    assert float(rows[-1][1]) > 1
    browser.click("PNG", ".controls")
    assert _downloaded(tmp_path / "loss.png").startswith(b"\x89PNG")
    browser.click("CSV of the table")
    table = list(csv.DictReader(io.StringIO(_downloaded(tmp_path / "runs.csv").decode())))
    assert [row["seed"] for row in table] == ["1", "2"]
    assert browser.complaints() == []


def _downloaded(path: Path) -> bytes:
    wait_until(lambda: path.exists() and path.stat().st_size, 20, str(path))
    return path.read_bytes()


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_axe_core_finds_nothing_serious(size, scheme, browser, sweep_ui):
    _open_list(browser, sweep_ui)
    _choose(browser, "sweep-0001", "sweep-0002", "sweep-0003")
    browser.open(browser.driver.current_url, size=size, scheme=scheme)
    assert browser.faults() == []
    assert browser.overflow() == 0


def test_tags_and_a_note_are_written_and_an_archived_run_leaves_the_list(browser, serve, tmp_path):
    make_sweep(tmp_path, 3)
    browser.open(serve(tmp_path).address)
    browser.follow("sweep-0001")
    browser.click("Add tags or a note")
    browser.run(
        "document.getElementById('labels-tags').value = 'good, paper';"
        "document.getElementById('labels-note').value = 'see page 3';"
        "document.getElementById('labels-archived').checked = true"
    )
    browser.click("Save labels")
    browser.wait_for("return document.querySelector('#labels').innerText.includes('paper')", "it")
    assert browser.faults() == []
    browser.click("All runs")
    browser.wait_for("return document.querySelector('#count-archived').innerText === '1'", "it")
    names = "return [...document.querySelectorAll('table.runs tbody a')].map(e => e.innerText)"
    assert sorted(browser.run(names)) == ["sweep-0000", "sweep-0002"]
    browser.run("return document.querySelector('[data-show=archived]')").click()
    assert browser.run(names) == ["sweep-0001"]
    assert "see page 3" in browser.text()
