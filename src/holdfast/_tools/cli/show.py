"""The output of the commands: plain lines into a pipe, a little colour on a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from holdfast import _text
from holdfast._report.status import parts
from holdfast._report.status.gather import RunSummary, describe_waiting

_STYLES = {
    **dict.fromkeys(("training", "starting"), "green"),
    **dict.fromkeys(("paused", "stopping", "stopped"), "yellow"),
    **dict.fromkeys(("stuck", "died", "failed", "could not start", "unreadable"), "bold red"),
    "finished": "bold green",
}
# The command that one wants in a state.
_NEXT = {
    **{"stuck": "stacks", "paused": "stacks", "training": "stop", "starting": "stop"},
    "finished": "ls",
}
_SLOTS = {1: "one slot", 2: "two slots", 3: "three slots"}
_LONG_STEP_SECONDS = 30.0
_MOST_ROWS = 200
_MOST_METRICS = 6
_SHORT_BAR = 10  # cells, in a table
_WIDE_COLUMNS = 110
_NO_WIDTH = 1000  # of a pipe: a line is never broken


Rows = Iterable[Iterable[object]]


class Screen(Console):
    """Standard output, or lines collected for it; brackets are no markup."""

    def __init__(self, into: IO[str] | None = None) -> None:
        columns = shutil.get_terminal_size((_NO_WIDTH, 24)).columns
        super().__init__(
            file=into,
            # Collected lines go to standard output in the end.
            force_terminal=None if into is None else sys.stdout.isatty(),
            width=columns,
            markup=False,
            highlight=False,
            emoji=False,
        )

    def on_broken_pipe(self) -> None:
        # rich would exit with status 1, which for `verify` means damage.
        raise BrokenPipeError

    def table(self, titles: Sequence[str], rows: Rows) -> None:
        """Print a table; only a terminal gets a rule below the titles."""
        box = SIMPLE_HEAD if self.is_terminal else None
        table = Table(box=box, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        self._fill(table, titles, rows)

    def grid(self, kinds: Sequence[str], rows: Rows, gap: int = 2) -> None:
        self._fill(Table.grid(padding=(0, gap)), kinds, rows)

    def labelled(self, rows: Iterable[tuple[str, str]]) -> None:
        self.grid("= ", ((Text(f"  {label}", "dim"), text) for label, text in rows))

    def write(self, text: str | Text = "", style: str = "") -> None:
        """A line, broken between words where the terminal ends."""
        if text:
            self._put(Text(text, style=style) if isinstance(text, str) else text)
        else:
            self.out("")

    def _fill(self, table: Table, titles: Sequence[str], rows: Rows) -> None:
        """Print the rows; a title may begin with > (aligned to the right) and = (never broken)."""
        for title in titles:
            name = title.lstrip("=>").strip()
            justify: JustifyMethod = "right" if title.startswith(">") else "left"
            table.add_column(
                name, justify=justify, no_wrap=title[:2].endswith("="), overflow="fold"
            )
        for row in rows:
            table.add_row(*(each if isinstance(each, Text) else Text(str(each)) for each in row))
        self._put(table)

    def _put(self, what: Table | Text) -> None:
        with self.capture() as captured:
            self.print(what)
        for line in captured.get().splitlines():
            if line.strip():
                self.out(line.rstrip(), highlight=False)  # rich fills up lines with blanks


def some(words: Sequence[str], most: int = 8, between: str = ", ") -> str:
    """The first of these, and how many more there are."""
    more = [f"and {len(words) - most} more"] if len(words) > most else []
    return between.join([*words[:most], *more])


def show_run(screen: Screen, run: RunSummary) -> None:
    folder = Path(run.folder)
    headline = Text.assemble(
        (_text.name(folder), "bold"), ": ", (run.state, _STYLES.get(run.state, ""))
    )
    headline.append(_progress(run))
    screen.write(headline)
    checkpoint = ""
    if run.safe.disk_age_seconds is not None and run.safe.disk_size_bytes is not None:
        age, size = _text.duration(run.safe.disk_age_seconds), _text.size(run.safe.disk_size_bytes)
        checkpoint = f"{age} old, {size}"
    rows = [
        ("progress", _outlook(run)),
        ("newest", some(_newest_values(run), _MOST_METRICS) if run.is_live else ""),
        ("stuck", parts.describe_stuck(run.trouble.stuck, folder)),
        ("paused", parts.describe_paused(run.trouble.paused, has_ranks=bool(run.ranks))),
        ("slowed", parts.describe_disturbed(run.trouble.disturbed)),
        ("safe", _safe(run)),
        ("checkpoint", checkpoint),
        ("mirror", parts.describe_mirror(run.safe.mirror)),
        ("snapshots", _snapshots(run)),
        ("memory", describe_waiting(run.safe.waiting)),
        ("process", _process(run)),
        ("ranks", parts.describe_ranks(run.ranks, run.trouble.deaths, is_live=run.is_live)),
        ("straggler", parts.describe_straggler(run.trouble.straggler)),
        ("slurm", parts.describe_job(run.job, is_live=run.is_live)),
        ("last exit", _last_exit(run)),
        ("why", _why(run, folder)),
        ("next", _next(run, folder)),
    ]
    screen.labelled((label, value) for label, value in rows if value)


def _progress(run: RunSummary) -> str:
    if run.step is None:
        return ""
    total = f" of {run.total}" if run.total is not None else ""
    outlook = run.outlook
    has_epochs = outlook.epoch and outlook.epochs
    epoch = f", epoch {outlook.epoch} of {outlook.epochs}" if has_epochs else ""
    late = outlook.boundary_age_seconds or 0.0
    slow = ""
    if run.outlook.phase is not None:
        slow = f", in {_text.name(run.outlook.phase)} since {_text.duration(late)}"
    elif late > _LONG_STEP_SECONDS:
        slow = f", in its next step since {_text.duration(late)}"
    return f"{epoch}, step {run.step}{total} (attempt {run.attempt}){slow}"


def _outlook(run: RunSummary) -> str:
    """How far a live run is, how fast, and how long it will take."""
    share = parts.share_done(run.step, run.total)
    if not run.is_live or share is None:
        return ""
    told = [f"{parts.bar(share)} {int(100 * share)}%"]
    if run.outlook.eta_seconds is not None and share < 1:
        told.append(f"about {_text.duration(run.outlook.eta_seconds)} left")
    if (rate := run.outlook.rate_per_second) is not None:
        per_second = f"{_text.number(float(f'{rate:.3g}'))} steps/s"
        told.append(per_second if rate >= 1 else f"{_text.duration(1 / rate)} per step")
    return ", ".join(told)


def _newest_values(run: RunSummary) -> list[str]:
    """The newest value of each metric, the loss first."""
    first = parts.main_metric(run.outlook.metrics)
    names = sorted(run.outlook.metrics, key=lambda name: name != first)
    return [f"{_text.name(name)} {_text.number(run.outlook.metrics[name])}" for name in names]


def _safe(run: RunSummary) -> str:
    memory, disk = run.safe.memory_step, run.safe.disk_step
    if disk is None and memory is None:
        return "nothing yet" if run.is_live or run.state == "new" else "nothing"
    on_disk = "nothing on disk" if disk is None else f"step {disk} on disk"
    if memory is None or (disk is not None and memory <= disk and not run.is_live):
        return on_disk
    return f"step {memory} in memory, {on_disk}"


def _snapshots(run: RunSummary) -> str:
    if not run.is_live or run.state == "starting":
        return ""
    if run.safe.slots is None:
        return "none so far: a kill would cost the work since the last checkpoint"
    text = f"{_SLOTS.get(run.safe.slots, f'{run.safe.slots} slots')} in memory"
    if run.safe.slots_bytes:
        text += f", {_text.size(run.safe.slots_bytes)}"
    if run.safe.slots == 1:
        text += "; a kill while it is being replaced would cost the work since the last checkpoint"
    if run.safe.slots == 2:
        text += "; if there is no memory for a third one while a checkpoint is being written, "
        text += "no newer snapshot is taken"
    if run.safe.in_shm is False:
        text += "; /dev/shm is too small, so they are lost if trainer and keeper are both killed, "
        text += "and the last checkpoint is left"
    return text


def _process(run: RunSummary) -> str:
    if run.process.pid is None:
        return ""
    where = f"pid {run.process.pid} on {_text.name(run.process.host or '')}"
    where = f"rank 0 is {where}" if run.ranks else where
    keeper = run.process.keeper_pid
    writing = f"; its keeper (pid {keeper}) still writes" if keeper else ""
    return where if run.is_live else f"{where}, gone{writing}"


def _last_exit(run: RunSummary) -> str:
    ended = run.last_exit
    if ended is None:
        return ""
    what = _text.name(ended.how.partition("\n")[0])  # the rest of it is for `holdfast why`
    if ended.status is None:
        what = "died without a message (killed, out of memory, or a crash outside Python)"
        if run.trouble.deaths and ended.attempt == run.attempt:
            what = parts.describe_death(run.trouble.deaths[0])
    elif ended.how == "closed":
        what = "left"
    text = f"attempt {ended.attempt}"
    if ended.age_seconds is not None:
        text += f", {_text.duration(ended.age_seconds)} ago"
    if ended.step is not None:
        text += f", at step {ended.step}"
    text += f": {what}"
    if ended.status is not None:
        text += f" (status {ended.status})"
    # Of a run that has ended, `safe` has it, with what its keeper has saved since.
    if run.is_live and ended.durable_step is not None:
        text += f"; step {ended.durable_step} was durable"
    return text


def _why(run: RunSummary, folder: Path) -> str:
    more = _text.command("why", folder)
    if run.state not in ("died", "failed", "could not start"):
        return ""
    if run.process.keeper_pid is not None:
        return more  # the keeper still gathers evidence
    from holdfast._diagnose.deaths.judge import judge
    from holdfast._diagnose.evidence.gather import gather_run

    verdict = judge(gather_run(folder, run.attempt))
    return f"{_text.name(verdict.sentence)} More: {more}"


def _next(run: RunSummary, folder: Path) -> str:
    if run.state == "new":
        return "no training has begun here"
    if run.state in _NEXT:
        return _text.command(_NEXT[run.state], folder)
    if run.is_live:
        return ""
    if run.job is not None and run.job.requeue is not None:
        return run.job.requeue.partition("\n")[0]
    again = "start the same command again"
    if run.state == "could not start":
        again = "put right what kept it from starting"
    if run.safe.disk_step is None and run.safe.memory_step is None:
        if run.safe.mirror is not None and run.safe.mirror.step is not None:
            return f"{again}; its mirror has step {run.safe.mirror.step}"
        return f"{again}; it begins at the beginning"
    step = max(step for step in (run.safe.disk_step, run.safe.memory_step) if step is not None)
    return f"{again}; it goes on at step {step}"


def show_runs(screen: Screen, runs: Sequence[RunSummary]) -> None:
    outlooks: list[str] = []
    # In a narrow terminal fewer columns, or names would be broken.
    is_wide = screen.width >= _WIDE_COLUMNS
    if any(run.is_live for run in runs):
        outlooks = ["progress", "left", "newest"] if is_wide else ["done", "left"]
    labels = ("step", *outlooks, "memory", "disk", "age")
    rows = [_row(run, outlooks) for run in runs]
    if len(runs) > _MOST_ROWS:
        _show_plainly(screen, [("run", "state", *labels), *rows])
        return
    styled = ([name, Text(state, _STYLES.get(state, "")), *rest] for name, state, *rest in rows)
    screen.table(["run", "=state", *(f">={label}" for label in labels)], styled)


def _row(run: RunSummary, outlooks: Sequence[str]) -> tuple[str, ...]:
    total = f"/{run.total}" if run.total is not None else ""
    told = dict.fromkeys(outlooks, "")
    if run.is_live:
        if (share := parts.share_done(run.step, run.total)) is not None:
            told["done"] = f"{int(100 * share):3}%"
            told["progress"] = f"{parts.bar(share, _SHORT_BAR)} {told['done']}"
        if run.outlook.eta_seconds is not None:
            told["left"] = _text.duration(run.outlook.eta_seconds)
        told["newest"] = ", ".join(_newest_values(run)[:1])
    return (
        _text.name(run.folder),
        run.state,
        "" if run.step is None else f"{run.step}{total}",
        *(told[each] for each in outlooks),
        "" if run.safe.memory_step is None else str(run.safe.memory_step),
        "" if run.safe.disk_step is None else str(run.safe.disk_step),
        "" if run.safe.disk_age_seconds is None else _text.duration(run.safe.disk_age_seconds),
    )


def _show_plainly(screen: Screen, rows: Sequence[tuple[str, ...]]) -> None:
    """The same table without rich, which takes a millisecond for each row."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        gaps = [" " * (width - cell_len(text)) for width, text in zip(widths, row, strict=True)]
        cells = [text + gap for text, gap in zip(row[:2], gaps[:2], strict=True)]
        cells += [gap + text for text, gap in zip(row[2:], gaps[2:], strict=True)]
        lines.append(" ".join(cells).rstrip())
    screen.out("\n".join(lines), highlight=False)
