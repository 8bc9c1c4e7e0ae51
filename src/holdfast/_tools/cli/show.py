"""The output of the commands: plain lines into a pipe, a little colour on a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast import _text
from holdfast._report.status.gather import RunSummary, describe_waiting
from holdfast._report.status.parts import (
    describe_death,
    describe_disturbed,
    describe_job,
    describe_mirror,
    describe_paused,
    describe_ranks,
    describe_straggler,
    describe_stuck,
)
from holdfast._report.status.progress import bar, main_metric, share_done
from holdfast._tools.cli.checkpoints import CheckpointList, CheckpointSummary, Verified

if TYPE_CHECKING:
    from holdfast._tools.clean import Litter, LitterFound
    from holdfast._tools.mirror import MirrorList

_STYLES = {
    "training": "green",
    "starting": "green",
    "finished": "bold green",
    "stuck": "bold red",
    "paused": "yellow",
    "stopping": "yellow",
    "stopped": "yellow",
    "died": "bold red",
    "failed": "bold red",
    "could not start": "bold red",
    "unreadable": "bold red",
}
_SLOTS = {1: "one slot", 2: "two slots", 3: "three slots"}
_LONG_STEP_SECONDS = 30.0
_MOST_ROWS = 200
_MOST_METRICS = 6
_SHORT_BAR = 10  # cells, in a table
_WIDE_COLUMNS = 110
_NO_WIDTH = 1000  # of a pipe: a line is never broken


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

    def columns(self) -> Table:
        """An empty table; only a terminal gets a rule below the names of the columns."""
        box = SIMPLE_HEAD if self.is_terminal else None
        return Table(box=box, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")

    def table(self, table: Table) -> None:
        self._put(table)

    def labelled(self, rows: Iterable[tuple[str, str]]) -> None:
        """Rows of a dim label and a text."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, text in rows:
            grid.add_row(f"  {label}", Text(text))
        self.table(grid)

    def write(self, text: str | Text = "", style: str = "") -> None:
        """A line, broken between words where the terminal ends."""
        if text:
            self._put(Text(text, style=style) if isinstance(text, str) else text)
        else:
            self.out("")

    def _put(self, what: Table | Text) -> None:
        with self.capture() as captured:
            self.print(what)
        for line in captured.get().splitlines():
            if line.strip():
                self.out(line.rstrip(), highlight=False)  # rich fills up lines with blanks


def show_run(screen: Screen, run: RunSummary) -> None:
    folder = Path(run.folder)
    headline = Text.assemble(
        (_text.name(folder), "bold"), ": ", (run.state, _STYLES.get(run.state, ""))
    )
    headline.append(_progress(run))
    screen.write(headline)
    rows = [
        ("progress", _outlook(run)),
        ("newest", _newest(run)),
        ("stuck", describe_stuck(run.trouble.stuck, folder)),
        ("paused", describe_paused(run.trouble.paused, has_ranks=bool(run.ranks))),
        ("slowed", describe_disturbed(run.trouble.disturbed)),
        ("safe", _safe(run)),
        ("checkpoint", _checkpoint(run)),
        ("mirror", describe_mirror(run.safe.mirror)),
        ("snapshots", _snapshots(run)),
        ("memory", describe_waiting(run.safe.waiting)),
        ("process", _process(run)),
        ("ranks", describe_ranks(run.ranks, run.trouble.deaths, is_live=run.is_live)),
        ("straggler", describe_straggler(run.trouble.straggler)),
        ("slurm", describe_job(run.job, is_live=run.is_live)),
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
    share = share_done(run.step, run.total)
    if not run.is_live or share is None:
        return ""
    parts = [f"{bar(share)} {int(100 * share)}%"]
    if run.outlook.eta_seconds is not None and share < 1:
        parts.append(f"about {_text.duration(run.outlook.eta_seconds)} left")
    if run.outlook.rate_per_second is not None:
        parts.append(_rate(run.outlook.rate_per_second))
    return ", ".join(parts)


def _rate(per_second: float) -> str:
    if per_second >= 1:
        return f"{_text.number(float(f'{per_second:.3g}'))} steps/s"
    return f"{_text.duration(1 / per_second)} per step"


def _newest(run: RunSummary) -> str:
    """The newest values of a live run, the loss first."""
    first = main_metric(run.outlook.metrics)
    if not run.is_live or first is None:
        return ""
    names = [first, *(name for name in run.outlook.metrics if name != first)]
    shown = [f"{_text.name(name)} {_text.number(run.outlook.metrics[name])}" for name in names]
    more = f", and {len(shown) - _MOST_METRICS} more" if len(shown) > _MOST_METRICS else ""
    return ", ".join(shown[:_MOST_METRICS]) + more


def _safe(run: RunSummary) -> str:
    memory, disk = run.safe.memory_step, run.safe.disk_step
    if disk is None and memory is None:
        return "nothing yet" if run.is_live or run.state == "new" else "nothing"
    on_disk = "nothing on disk" if disk is None else f"step {disk} on disk"
    if memory is None or (disk is not None and memory <= disk and not run.is_live):
        return on_disk
    return f"step {memory} in memory, {on_disk}"


def _checkpoint(run: RunSummary) -> str:
    age, size = run.safe.disk_age_seconds, run.safe.disk_size_bytes
    return "" if age is None or size is None else f"{_text.duration(age)} old, {_text.size(size)}"


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
        text += (
            "; /dev/shm is too small, so they are lost if trainer and keeper are both killed, "
            "and the last checkpoint is left"
        )
    return text


def _process(run: RunSummary) -> str:
    if run.process.pid is None:
        return ""
    where = f"pid {run.process.pid} on {_text.name(run.process.host or '')}"
    where = f"rank 0 is {where}" if run.ranks else where
    if run.is_live:
        return where
    if run.process.keeper_pid is not None:
        return f"{where}, gone; its keeper (pid {run.process.keeper_pid}) still writes"
    return f"{where}, gone"


def _last_exit(run: RunSummary) -> str:
    ended = run.last_exit
    if ended is None:
        return ""
    what = _text.name(ended.how.partition("\n")[0])  # the rest of it is for `holdfast why`
    if ended.status is None:
        what = "died without a message (killed, out of memory, or a crash outside Python)"
        if run.trouble.deaths and ended.attempt == run.attempt:
            what = describe_death(run.trouble.deaths[0])
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
    if run.state in ("stuck", "paused"):
        return _text.command("stacks", folder)
    if run.state in ("training", "starting"):
        return _text.command("stop", folder)
    if run.state == "finished":
        return _text.command("ls", folder)
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
    if len(runs) > _MOST_ROWS:
        _show_very_many(screen, runs)
        return
    table = screen.columns()
    outlooks = _outlook_columns(screen, runs)
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for label in _labels(outlooks):
        table.add_column(label, justify="right", no_wrap=True)
    for run in runs:
        name, state, *rest = _row(run, outlooks)
        table.add_row(Text(name), Text(state, style=_STYLES.get(state, "")), *rest)
    screen.table(table)


_Outlooks = Mapping[str, Callable[[RunSummary], str]]


def _outlook_columns(screen: Screen, runs: Sequence[RunSummary]) -> _Outlooks:
    """The columns of live runs; in a narrow terminal fewer, or names would be broken."""
    if not any(run.is_live for run in runs):
        return {}
    if screen.width < _WIDE_COLUMNS:
        return {"done": _percent, "left": _left}
    return {"progress": _short_bar, "left": _left, "newest": _newest_value}


def _labels(outlooks: _Outlooks) -> tuple[str, ...]:
    return ("step", *outlooks, "memory", "disk", "age")


def _row(run: RunSummary, outlooks: _Outlooks) -> tuple[str, ...]:
    total = f"/{run.total}" if run.total is not None else ""
    return (
        _text.name(run.folder),
        run.state,
        "" if run.step is None else f"{run.step}{total}",
        *(cell(run) if run.is_live else "" for cell in outlooks.values()),
        "" if run.safe.memory_step is None else str(run.safe.memory_step),
        "" if run.safe.disk_step is None else str(run.safe.disk_step),
        "" if run.safe.disk_age_seconds is None else _text.duration(run.safe.disk_age_seconds),
    )


def _percent(run: RunSummary) -> str:
    share = share_done(run.step, run.total)
    return "" if share is None else f"{int(100 * share)}%"


def _short_bar(run: RunSummary) -> str:
    share = share_done(run.step, run.total)
    return "" if share is None else f"{bar(share, _SHORT_BAR)} {int(100 * share):3}%"


def _left(run: RunSummary) -> str:
    return "" if run.outlook.eta_seconds is None else _text.duration(run.outlook.eta_seconds)


def _newest_value(run: RunSummary) -> str:
    metrics = run.outlook.metrics
    metric = main_metric(metrics)
    return "" if metric is None else f"{_text.name(metric)} {_text.number(metrics[metric])}"


def _show_very_many(screen: Screen, runs: Sequence[RunSummary]) -> None:
    """The same table without rich, which takes a millisecond for each row."""
    outlooks = _outlook_columns(screen, runs)
    rows = [("run", "state", *_labels(outlooks)), *(_row(run, outlooks) for run in runs)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        gaps = [" " * (width - cell_len(text)) for width, text in zip(widths, row, strict=True)]
        cells = [text + gap for text, gap in zip(row[:2], gaps[:2], strict=True)]
        cells += [gap + text for text, gap in zip(row[2:], gaps[2:], strict=True)]
        lines.append(" ".join(cells).rstrip())
    screen.out("\n".join(lines), highlight=False)


def show_checkpoints(screen: Screen, folder: Path, found: CheckpointList) -> None:
    if not found.checkpoints:
        screen.write(f"{_text.name(folder)}: no checkpoints yet.")
    else:
        table = screen.columns()
        for label in ("step", "age", "size"):
            table.add_column(label, justify="right", no_wrap=True)
        table.add_column("metrics", overflow="fold")
        table.add_column("kept because", overflow="fold")
        table.add_column("attempt", justify="right")
        if any((each.ranks or 1) > 1 for each in found.checkpoints):
            table.add_column("ranks", justify="right")
        for each in found.checkpoints:
            row = _checkpoint_row(each, found.watched)
            table.add_row(*row[: len(table.columns)])
        screen.table(table)
        total = sum(each.size_bytes or 0 for each in found.checkpoints)
        count = _text.count(len(found.checkpoints), "checkpoint")
        screen.write(f"{count}, {_text.size(total)}", style="dim")
    if found.set_aside:
        screen.write(
            f"{len(found.set_aside)} damaged or unfinished, never loaded: "
            f"{_text.name(folder)}/set-aside",
            style="yellow",
        )


def _checkpoint_row(each: CheckpointSummary, watched: str | None) -> list[str | Text]:
    # The metric of keep_best comes first.
    names = sorted(each.metrics, key=lambda name: (name != watched, name))
    metrics = ", ".join(f"{name} {_text.number(each.metrics[name])}" for name in names)
    return [
        f"{each.step} (end of epoch)" if each.at_turn else str(each.step),
        "" if each.age_seconds is None else _text.duration(each.age_seconds),
        "" if each.size_bytes is None else _text.size(each.size_bytes),
        Text("damaged manifest", style="bold red") if each.is_damaged else Text(metrics),
        Text(each.kept_because or "unknown"),
        str(each.attempt),
        "" if each.ranks is None else str(each.ranks),
    ]


def show_verdict(screen: Screen, verdict: Verified) -> None:
    label = f"step {verdict.step} (attempt {verdict.attempt}): "
    if verdict.is_gone:
        screen.write(Text(f"{label}removed by the run meanwhile", style="dim"))
    elif verdict.damage:
        shown = "; ".join(_text.name(line) for line in verdict.damage[:8])
        more = f"; and {len(verdict.damage) - 8} more" if len(verdict.damage) > 8 else ""
        screen.write(Text.assemble(label, ("DAMAGED", "bold red"), f": {shown}{more}"))
    else:
        size = "" if verdict.size_bytes is None else f", {_text.size(verdict.size_bytes)}"
        screen.write(Text.assemble(label, ("whole", "green"), size))


def show_mirror(screen: Screen, held: MirrorList) -> None:
    """The checkpoints of a mirror, newest last."""
    if not held.checkpoints:
        screen.write(f"{_text.name(held.address)}: no checkpoints yet.")
    else:
        table = screen.columns()
        for label in ("step", "age", "size", "attempt"):
            table.add_column(label, justify="right", no_wrap=True)
        table.add_column("here too")
        for each in held.checkpoints:
            size = "damaged index" if each.size_bytes is None else _text.size(each.size_bytes)
            table.add_row(
                f"{each.step} (end of epoch)" if each.name.endswith("-turn") else str(each.step),
                _text.duration(each.age_seconds),
                size,
                str(each.attempt),
                "yes" if each.is_here else "no",
            )
        screen.table(table)
        count = _text.count(len(held.checkpoints), "checkpoint")
        screen.write(f"{count} in {_text.name(held.address)}", style="dim")
    if held.damaged:
        screen.write(f"{len(held.damaged)} with a damaged manifest, never fetched", style="yellow")


def show_litter(screen: Screen, found: LitterFound, yes: bool, command: str) -> None:
    """What goes, what stays and why, and the totals."""
    going = [item for item in found.items if item.goes]
    staying = [item for item in found.items if not item.goes]
    if going:
        screen.write("Removed:" if yes else "Could go:", style="bold")
        _list(screen, going, yes)
    if staying:
        screen.write("Left alone:", style="bold")
        _list(screen, staying, yes)
    if found.busy:
        many = len(found.busy) > 1
        what = f"{len(found.busy)} of them are" if many else f"{_text.name(found.busy[0])} is"
        screen.write(f"{found.runs} {'runs' if found.runs > 1 else 'run'}; {what} live: untouched.")
    if yes and going:
        gone = [item for item in going if item.is_removed]
        screen.write(f"{_total(gone)} removed.")
        if len(gone) < len(going):
            kept = [item for item in going if not item.is_removed]
            screen.write(f"{_total(kept)} could not be removed: see above.", style="bold red")
    elif going:
        screen.write(f"{_total(going)}. Nothing was removed yet. To do it: {command} --yes")
    else:
        screen.write("There is nothing else to clean." if staying else "There is nothing to clean.")


def _list(screen: Screen, items: Sequence[Litter], yes: bool) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for item in items:
        name = Text(_text.name(item.path))
        if yes and item.goes and not item.is_removed:
            name.append(" COULD NOT BE REMOVED", style="bold red")
        grid.add_row(f"  {_text.size(item.size_bytes)}", name)
        grid.add_row("", Text(item.why, style="dim"))
    screen.table(grid)


def _total(items: Sequence[Litter]) -> str:
    size_bytes = sum(item.size_bytes for item in items)
    return f"{_text.count(len(items), 'thing')}, {_text.size(size_bytes)}"
