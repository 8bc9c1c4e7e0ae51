"""The report of a run that was killed, stopped and resumed, as Chromium shows it.

The run is a real one, made here in a minute or two: a training that is interrupted
again and again by real signals. Whatever it has become, the picture shows it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from holdfast import NotARun
from holdfast._report.status.gather import summarize

_SIZE = "1280,1010"
# At which step what comes, and for how long nobody starts it again.
_INTERRUPTIONS = (
    (230, signal.SIGKILL, 2.0),
    (560, signal.SIGUSR2, 5.0),
    (750, signal.SIGTERM, 1.0),
    (1130, signal.SIGKILL, 3.0),
    (1310, signal.SIGINT, 1.5),
)


def make(root: Path, pictures: Path) -> list[Path]:
    """Make the run, its report, and a picture of it in light and in dark."""
    browser = shutil.which("chromium")
    if browser is None:
        raise FileNotFoundError("chromium is not installed.\nInstall it: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="holdfast-pictures-") as place:
        folder = Path(place)
        run = folder / "runs" / "spirals"
        _train(run)
        page = folder / "report.html"
        command = [sys.executable, "-m", "holdfast", "report", str(run), "-o", str(page)]
        subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
        return [
            _photograph(browser, page, pictures / f"report-{name}.png", scheme)
            for name, scheme in (("light", 1), ("dark", 0))
        ]


def _train(run: Path) -> None:
    script = Path(__file__).with_name("spirals.py")
    for step, number, pause in (*_INTERRUPTIONS, (None, None, 0.0)):
        process = subprocess.Popen(
            [sys.executable, str(script), str(run)],
            stderr=subprocess.DEVNULL,
            env=_environment(),
            # A shell that started us in the background has made Ctrl-C ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            if step is None or number is None:
                process.wait(300)
                return
            _wait_until(lambda at=step: _step(run) >= at, f"step {step}")
            process.send_signal(number)
            process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        time.sleep(pause)  # so long it is down, which the timeline shows


def _step(run: Path) -> int:
    """Where the run is by now."""
    try:
        return summarize(run).step or 0
    except NotARun:
        return -1  # it has not begun


def _photograph(browser: str, page: Path, path: Path, scheme: int) -> Path:
    subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--blink-settings=preferredColorScheme={scheme}",
            f"--window-size={_SIZE}",
            "--virtual-time-budget=4000",
            f"--screenshot={path}",
            page.as_uri(),
        ],
        check=True,
        stderr=subprocess.DEVNULL,
        timeout=120,
    )
    return path


def _wait_until(look: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {seconds:.0f} s")
        time.sleep(0.2)


def _environment() -> dict[str, str]:
    return {**os.environ, "HOLDFAST_PROGRESS": "0", "OMP_NUM_THREADS": "1"}
