"""`holdfast status`; with --watch it polls the runs until Ctrl-C.

--watch may run for days while a training needs every core, so it takes at most 2% of one: it
reads only what has changed, and polls less often if that is still too much, though at least every
five seconds. It never hides the cursor or switches screens, so that no end of it, not even
kill -9, leaves a terminal that must be reset.
"""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.cells import cell_len
from rich.text import Text

from holdfast import _text
from holdfast._errors import HoldfastError, NotARun
from holdfast._report.status.gather import RunSummary, aged, find_runs, summarize_all
from holdfast._tools.cli.group import AS_JSON, RUNS_PATH, print_json
from holdfast._tools.cli.show import Screen, show_run, show_runs

_WATCH_SECONDS = 1
_MOST_OF_A_CORE = 0.02
_LONGEST_SECONDS = 5.0  # between two polls, at any cost
_SEARCH_SECONDS = 3.0  # between two searches for new runs
_REREAD_SECONDS = 30.0  # between two reads of a run whose files have not changed


class _Status(click.Command):
    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        # The seconds may be left out, and then the next word is a folder.
        for at, word in enumerate(args):
            if word == "--watch" and not _is_number("".join(args[at + 1 : at + 2])):
                args = [*args[:at], f"--watch={_WATCH_SECONDS}", *args[at + 1 :]]
                break
        return super().parse_args(context, args)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_seconds(_: click.Context, __: click.Parameter, seconds: float | None) -> float | None:
    if seconds is not None and not 0.1 <= seconds <= 86400:  # nan is neither
        raise click.BadParameter(f"{seconds} is not between 0.1 and 86400 seconds.")
    return seconds


@click.command(cls=_Status)
@RUNS_PATH
@click.option(
    "--watch",
    metavar="[SECONDS]",
    type=float,
    callback=_check_seconds,
    help=f"Look again at this interval ({_WATCH_SECONDS} s), until Ctrl-C.",
)
@AS_JSON
def status(path: Path, watch: float | None, as_json: bool) -> None:
    """Show the state of a run, and what of it is safe.

    PATH is a run folder, or a folder with runs in it (up to three levels down); without it, the
    current folder. With --json: a list with one object for each run.

    --watch redraws a terminal in place. Into a pipe it prints a block (with --json a line) at each
    change. It does not end with the run, which may come back.

    \b
    Example:
      holdfast status runs/a
      holdfast status runs --watch
    """
    if watch is not None:
        _watch(path, watch, as_json=as_json)
        return
    runs = summarize_all(find_runs(path))
    if as_json:
        print_json([run.as_record() for run in runs])
        return
    _show(Screen(), runs)


def _show(screen: Screen, runs: Sequence[RunSummary]) -> None:
    if len(runs) == 1:
        show_run(screen, runs[0])
    else:
        show_runs(screen, runs)


def _watch(path: Path, seconds: float, *, as_json: bool) -> None:
    """Poll every so many seconds, and show the runs; returns at Ctrl-C."""
    poller = RunsPoller(path)
    is_drawn = not as_json and Screen().is_terminal and not Screen().is_dumb_terminal
    drawing = _Drawing()
    shown: list[RunSummary] | None = None
    is_first = True
    try:
        while True:
            spent = time.process_time()
            runs = poller.poll()
            if is_drawn:
                drawing.draw(_lines(path, runs))
            elif (now := [aged(run, None) for run in runs]) != shown:
                shown = now
                if as_json:
                    click.echo(
                        json.dumps([run.as_record() for run in runs])
                    )  # a line for each change
                else:
                    click.echo("\n".join([time.strftime("-- %H:%M:%S"), *_lines(path, runs)]))
            spent = time.process_time() - spent
            # The first poll reads everything, and says nothing about the cost of the next ones.
            pause = 0.0 if is_first else min(spent / _MOST_OF_A_CORE, _LONGEST_SECONDS)
            is_first = False
            time.sleep(max(seconds, pause))
    except KeyboardInterrupt:
        drawing.end()


class RunsPoller:
    """The runs below a folder, read again where something has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folders = find_runs(path)  # nothing to watch is an error, as it is for status
        self._searched = time.monotonic()
        # Waits for the heartbeats of other machines; later, nothing waits for them.
        runs = summarize_all(self._folders)
        self._polled = {
            folder: _PolledRun(folder, run) for folder, run in zip(self._folders, runs, strict=True)
        }

    def poll(self) -> list[RunSummary]:
        """All runs as they are now; one of another machine as it was some seconds ago."""
        now = time.monotonic()
        if now - self._searched > _SEARCH_SECONDS:
            self._searched = now
            try:
                self._folders = find_runs(self._path)
            except NotARun:
                self._folders = []  # perhaps only for now: a file system may come back
        for folder in self._folders:
            if folder not in self._polled:
                self._polled[folder] = _PolledRun(folder)
        polled = [self._polled[folder].poll() for folder in self._folders]
        return [run for run in polled if run is not None]


class _PolledRun:
    def __init__(self, folder: Path, run: RunSummary | None = None) -> None:
        from holdfast._report.server.index import RunFollower  # slow to import

        self._follower = RunFollower(folder)
        self._run = run
        self._read_at = time.monotonic()

    def poll(self) -> RunSummary | None:
        """The run as it is now; None if it is not there, or its state is not known yet."""
        now = time.monotonic()
        if self._is_stale(now):
            try:
                run = self._follower.look()
                while self._follower.is_behind:
                    run = self._follower.look()
            except (HoldfastError, OSError):
                self._run = None  # removed, or not to be read now
            else:
                # While it is watched, it is not known yet whether it lives.
                if not self._follower.is_watched:
                    self._run, self._read_at = run, time.monotonic()
        return self._run and aged(self._run, time.monotonic() - self._read_at)

    def _is_stale(self, now: float) -> bool:
        run = self._run
        if run is None or now - self._read_at > _REREAD_SECONDS or self._follower.is_watched:
            return True
        # A process that dies changes no file.
        is_busy = run.is_live or run.process.keeper_pid is not None
        return is_busy or self._follower.has_changed()


def _lines(path: Path, runs: Sequence[RunSummary]) -> list[str]:
    text = io.StringIO()
    screen = Screen(into=text)
    if not runs:
        screen.write(f"{_text.name(path)}: there is no run here any more; waiting for one.")
    else:
        _show(screen, runs)
    return text.getvalue().splitlines()


class _Drawing:
    """Lines on a terminal that are redrawn in place."""

    def __init__(self) -> None:
        self._drawn: list[str] = []

    def draw(self, lines: Sequence[str]) -> None:
        columns, rows = shutil.get_terminal_size()
        room = max(1, rows - 1)  # the cursor stands below
        shown = list(lines)
        if len(shown) > room:
            shown = [*shown[: room - 1], f"… and {len(shown) - room + 1} more lines"]
        # In a window that was made narrower, the drawn lines have been wrapped into more.
        widths = [cell_len(Text.from_ansi(line).plain) for line in self._drawn]
        up = sum(max(1, -(-width // columns)) for width in widths)
        back = f"\x1b[{min(up, room)}A\r" if up else ""
        # In one write, and each line is cleared behind its text: nothing flickers.
        body = "".join(f"{line}\x1b[K\n" for line in shown)
        click.echo(f"{back}{body}\x1b[J", nl=False, color=True)
        self._drawn = shown

    def end(self) -> None:
        """Leave the last lines, and clear the ^C that the terminal has put below them."""
        if self._drawn:
            click.echo("\r\x1b[K", nl=False, color=True)
