"""`holdfast status`; with --watch it follows the runs until Ctrl-C.

--watch may run for days while a training needs every core, so it takes about 2% of one: it reads
only what has changed, and less often if that is still too much. It never hides the cursor or
switches screens, so that no end of it, not even kill -9, leaves a terminal that must be reset.
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
from holdfast._report.status.gather import RunSummary, aged, find_runs, summarize_all
from holdfast._tools.cli.group import AS_JSON, RUNS_PATH, print_json
from holdfast._tools.cli.show import Screen, show_run, show_runs

_WATCH_SECONDS = 1
_MOST_OF_A_CORE = 0.02
_LONGEST_SECONDS = 5.0  # between two drawings, at any cost
_POLL_SECONDS = 0.02


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
    """Follow the runs, and show them every so many seconds; returns at Ctrl-C."""
    from holdfast._report.server.index import RunIndex  # slow to import

    find_runs(path)  # nothing to watch is an error, as it is for status
    index = RunIndex(path, follows_links=True, live_seconds=seconds, share=1 / _MOST_OF_A_CORE)
    is_drawn = not as_json and Screen().is_terminal and not Screen().is_dumb_terminal
    drawing = _Drawing()
    shown: list[RunSummary] | None = None
    index.start()
    try:
        while not index.is_settled:
            time.sleep(_POLL_SECONDS)
        while True:
            began = time.thread_time()
            runs = index.summaries()
            if is_drawn:
                drawing.draw(_lines(path, runs))
            elif (now := [aged(run, None) for run in runs]) != shown:
                shown = now
                if as_json:  # a line for each change
                    click.echo(json.dumps([run.as_record() for run in runs]))
                else:
                    click.echo("\n".join([time.strftime("-- %H:%M:%S"), *_lines(path, runs)]))
            pause = (time.thread_time() - began) / _MOST_OF_A_CORE
            time.sleep(max(seconds, min(pause, _LONGEST_SECONDS)))
    except KeyboardInterrupt:
        drawing.end()
    finally:
        index.close()


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
