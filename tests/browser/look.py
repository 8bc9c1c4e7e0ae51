"""Pictures of all pages, for a person to look at: light and dark, wide and narrow.

python -m tests.browser.look FOLDER [WORD...]    only those with one of the words in the name
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tests.browser.browser import NARROW, WIDE, Browser, missing
from tests.browser.serving import Ui
from tests.cli.command import PROGRAM
from tests.many_runs import make_sweep
from tests.report_runs import HOSTILE_FOLDER, MAKERS

_SHAPES = {"wide": WIDE, "narrow": NARROW}
_NAMES = {HOSTILE_FOLDER: "hostile"}


def look(pictures: Path, wanted: list[str]) -> Iterator[Path]:
    """Make the pictures, one after the other."""
    with tempfile.TemporaryDirectory(prefix="holdfast-look-") as place:
        runs = Path(place) / "runs"
        for name, make in MAKERS.items():
            make(runs / name)
        with closing(Browser(Path(place) / "profile")) as browser:
            for name in MAKERS:
                page = Path(place) / f"{_NAMES.get(name, name)}.html"
                if _is_wanted(f"report-{page.stem}", wanted):
                    _make_report(runs / name, page)
                    yield from _take(browser, f"report-{page.stem}", page.as_uri(), pictures)
            if _is_wanted("ui-index", wanted) or _is_wanted("ui-live", wanted):
                ui = Ui(runs)
                try:
                    yield from _take(browser, "ui-index", ui.address, pictures)
                    browser.follow("live")
                    address = browser.driver.current_url
                    yield from _take(browser, "ui-live", address, pictures)
                finally:
                    ui.end()
            if _is_wanted("ui-compare", wanted):
                ui = Ui(make_sweep(Path(place) / "sweep", 12, rows=60))
                try:
                    yield from _take(browser, "ui-compare", _compare(browser, ui), pictures)
                finally:
                    ui.end()


def _compare(browser: Browser, ui: Ui) -> str:
    """Select three runs; returns the address of the page that compares them."""
    browser.open(ui.address)
    boxes = "return [...document.querySelectorAll('[aria-label^=\"Select \"]')].slice(-3)"
    for box in browser.wait_for(boxes, "the runs"):
        box.click()
    browser.click("Compare 3 selected")
    browser.wait_for("return location.pathname.endsWith('/compare')", "the page")
    return str(browser.driver.current_url)


def _is_wanted(name: str, wanted: list[str]) -> bool:
    return not wanted or any(word in name for word in wanted)


def _make_report(run: Path, page: Path) -> None:
    subprocess.run([str(PROGRAM), "report", str(run), "-o", str(page)], check=True)


def _take(browser: Browser, name: str, address: str, pictures: Path) -> Iterator[Path]:
    for shape, size in _SHAPES.items():
        for scheme in ("light", "dark"):
            browser.open(address, size=size, scheme=scheme)
            yield browser.picture(pictures / f"{name}-{shape}-{scheme}.png")
            for words in browser.complaints():
                print(f"{name}-{shape}-{scheme}: {words}", file=sys.stderr)


if __name__ == "__main__":
    if (lack := missing()) is not None:
        sys.exit(lack)
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for picture in look(target, sys.argv[2:]):
        print(picture)
