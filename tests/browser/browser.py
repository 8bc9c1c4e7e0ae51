"""A real Chromium without a screen, and what the tests ask of it."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

from tests.support import wait_until

AXE = Path(__file__).parent / "axe-core" / "axe.min.js"
INSTALL = "apt-get install chromium chromium-driver && pip install selenium"
WIDE, NARROW = (1400, 900), (390, 844)
# What a report's page or a live one sets when its first charts are drawn.
FIRST_VIEW = "holdfast-first-view"
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # a container's root has no namespaces to give
    "--disable-dev-shm-usage",  # which may be small, and which tests count
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--lang=en-GB",
)


def missing() -> str | None:
    """What is not installed here, in words; None if all is."""
    try:
        import selenium  # noqa: F401  only whether it is there
    except ImportError:
        return f"selenium is not installed: {INSTALL}"
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed: {INSTALL}"
    return None


class Browser:
    """One Chromium for many tests: each opens its pages anew, in a size and a light of its own."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        options.page_load_strategy = "eager"
        self.driver = webdriver.Chrome(options, Service(str(shutil.which("chromedriver"))))
        self.driver.set_page_load_timeout(60)
        self.driver.set_script_timeout(60)
        self.colours("light")
        self.size(WIDE)

    def close(self) -> None:
        self.driver.quit()

    # -- pages ------------------------------------------------------------------------------

    def size(self, size: tuple[int, int]) -> None:
        """As a screen of this size has it, whatever the least width of a window is."""
        width, height = size
        is_phone = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def colours(self, scheme: str) -> None:
        """As somebody has it who prefers light, or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(
        self,
        address: str,
        *,
        size: tuple[int, int] = WIDE,
        scheme: str = "light",
        has_mark: bool = True,
    ) -> None:
        """Open a page and wait until it shows something; what was said of pages before is gone."""
        self.size(size)
        self.colours(scheme)
        self.driver.get_log("browser")
        self.driver.get(address)
        if has_mark:
            self.first_view_seconds()

    def first_view_seconds(self) -> float:
        """From the start of the navigation to the first charts, by the browser's own clock."""
        return self.wait_for(
            f"const found = performance.getEntriesByName('{FIRST_VIEW}');"
            "return found.length ? found[0].startTime / 1000 : null",
            "the page's first view",
        )

    def run(self, script: str, *arguments: Any) -> Any:
        """What a piece of script returns."""
        return self.driver.execute_script(script, *arguments)

    def wait_for(self, script: str, what: str, seconds: float = 20.0) -> Any:
        """Wait until a piece of script returns something true."""
        return wait_until(lambda: self.run(script), seconds, what)

    def text(self) -> str:
        """All that is shown."""
        return str(self.run("return document.body.innerText"))

    def complaints(self) -> list[str]:
        """What the browser has to say of the page: errors of scripts, and what it has refused."""
        found = self.driver.get_log("browser")
        return [each["message"] for each in found if each["level"] in ("SEVERE", "WARNING")]

    def click(self, label: str, within: str = "body") -> None:
        """Press the button that says so, as a person would: it must be there and be hit."""
        button = wait_until(lambda: self.button(label, within), 20, f"a button {label!r}")
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()

    def follow(self, name: str) -> None:
        """From the list of runs to the page of this one."""
        before = self.driver.current_url
        self.click(name)
        self.wait_for(f"return location.href !== {json.dumps(before)}", "another page")
        self.first_view_seconds()

    def button(self, label: str, within: str = "body") -> Any:
        """The visible button or link with this text, or None."""
        return self.run(
            "return [...document.querySelectorAll(`${arguments[1]} button, ${arguments[1]} a`)]"
            ".find(e => e.checkVisibility() && !e.disabled"
            " && e.innerText.trim().toLowerCase() === arguments[0].toLowerCase()) ?? null",
            label,
            within,
        )

    # -- looks --------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """What axe-core calls serious or critical, a line for each."""
        if not self.run("return !!window.axe"):
            # Not as a script of the page, whose policy would refuse it.
            self.run(f"{AXE.read_text()}; window.axe = axe;")
        found = self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {resultTypes: ['violations']}).then(r => done(r.violations.map(v =>"
            " ({id: v.id, impact: v.impact, help: v.help, nodes: v.nodes.map(n =>"
            " n.target.join(' ') + ': ' + (n.failureSummary || ''))}))), e => done(String(e)))"
        )
        assert isinstance(found, list), found
        bad = [each for each in found if each["impact"] in ("serious", "critical")]
        return [json.dumps(each, indent=1)[:2000] for each in bad]

    def picture(self, path: Path, *, is_whole: bool = True) -> Path:
        """The page as it looks, all of its length."""
        options: dict[str, Any] = {"format": "png"}
        if is_whole:
            self._see_all()
            sizes = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": sizes["width"], "height": sizes["height"], "scale": 1}
            options |= {"captureBeyondViewport": True, "clip": clip}
        data = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def _see_all(self) -> None:
        """Go down the page and back: what is not in sight may be drawn later."""
        # By a timer: without a screen, a frame comes when somebody wants a picture.
        self.driver.execute_async_script(
            "const done = arguments[0]; let y = 0; const next = () => {"
            " const isOver = y > document.documentElement.scrollHeight;"
            " scrollTo({top: isOver ? 0 : y, behavior: 'instant'}); y += innerHeight / 2;"
            " setTimeout(isOver ? done : next, 40); }; next()"
        )

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(
            self.run("const e = document.documentElement; return e.scrollWidth - e.clientWidth")
        )
