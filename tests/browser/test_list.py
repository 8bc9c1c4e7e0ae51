"""The list of runs and the badges of a run: nothing that is not so."""

from __future__ import annotations

from tests.ui.made_runs import make_run
from tests.unit.report_folder import Book

_COLUMNS = (
    "return [...document.querySelectorAll('table.runs thead th')]"
    ".filter(e => e.checkVisibility()).map(e => e.innerText)"
)


def test_a_workstation_has_no_column_for_jobs(browser, serve, tmp_path):
    make_run(tmp_path / "a")
    browser.open(serve(tmp_path).address)
    browser.wait_for("return document.body.innerText.includes('stopped')", "the run")
    assert "SLURM" not in browser.run(_COLUMNS)


def test_where_there_are_jobs_the_list_tells_them(browser, runs_ui):
    browser.open(runs_ui.address)
    browser.wait_for("return document.body.innerText.includes('184469')", "the job")
    assert "SLURM" in browser.run(_COLUMNS)


def test_no_badge_says_live_of_a_run_that_has_died(browser, serve, tmp_path):
    book = Book(tmp_path / "dead")
    book.begin(1, 0)
    book.rows(1, 2, 0, 10)
    book.end(1, 13, "death", status=None, how="was killed by SIGKILL", step=10, durable_step=10)
    browser.open(serve(tmp_path).address)
    browser.follow("dead")
    # Once the page has been answered.
    browser.wait_for(
        "return performance.getEntriesByType('resource').some(e => e.name.endsWith('/view'))"
        " && !document.querySelector('#connection').innerText.includes('connecting')",
        "an answer of the server",
    )
    badges = (
        "return [...document.querySelectorAll('.top .chip')].filter(e => e.checkVisibility())"
        ".map(e => e.innerText.toLowerCase())"
    )
    assert browser.run(badges) == ["died"]
