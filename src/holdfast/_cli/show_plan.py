"""A plan, as it is printed."""

from __future__ import annotations

from rich.text import Text

from holdfast._cli.show import Screen
from holdfast._plan.advice import Plan, Row
from holdfast._plan.inputs import Inputs
from holdfast._plan.units import shown

_NOWHERE = 0.001  # of the time makes progress
LABELS = {
    "checkpoints": "checkpoints",
    "snapshots": "snapshots in memory",
    "repeated": "repeated work",
    "restarts": "restarts",
    "queue": "waiting for the queue",
}


def percent(share: float) -> str:
    """A share with two digits behind the point: the third is chance."""
    return f"{100 * share:.2f}%"


def show_plan(plan: Plan, given: Inputs) -> None:
    """The table, the reasons and the line to write."""
    screen = Screen()
    screen.write(_headline(plan, given), style="bold")
    screen.write(_interruptions(plan))
    screen.write()
    _show_rows(screen, plan)
    screen.write()
    _show_intervals(screen, plan)
    screen.write()
    _show_rest(screen, plan)
    screen.write()
    _show_ways(screen, plan)
    screen.write()
    screen.write("Write:")
    screen.write(Text(f"  {plan.setting}", style="bold green"))
    if plan.better is not None:
        fewer = "Fewer" if plan.better.max_overhead < plan.model.max_overhead else "More"
        screen.write(
            f"{fewer} snapshots in memory would make it {percent(plan.better.goodput)}; a process "
            f"that dies then loses up to {shown(plan.better.most_lost)} instead of "
            f"{shown(min(plan.model.snapshot_interval, plan.chosen.interval))}:"
        )
        screen.write(Text(f"  {plan.better_setting}", style="green"))
    if plan.assumed:
        screen.write()
        screen.write("Assumed, where nothing was said:", style="dim")
        for sentence in plan.assumed:
            screen.write(f"  {sentence}", style="dim")


def _headline(plan: Plan, given: Inputs) -> str:
    noun = "GPU" if given.gpus == 1 else "GPUs"
    often = shown(plan.model.mtbf)
    return f"{given.gpus:,} {noun} in {_hosts(given)}: an interruption every {often}."


def _hosts(given: Inputs) -> str:
    return f"{given.hosts:,} {'host' if given.hosts == 1 else 'hosts'}"


def _interruptions(plan: Plan) -> str:
    model = plan.model
    anyway = f" ({shown(model.snapshot)} of it in place of another snapshot)"
    text = (
        f"A checkpoint takes {shown(model.cost)} from training"
        f"{anyway if model.has_snapshots else ''} and is on disk after {shown(model.latency)}."
    )
    if model.losing_mtbf == float("inf"):
        return f"{text} By what you say, no interruption ever costs more than what is in memory."
    return f"{text} The work since the last one is lost every {shown(model.losing_mtbf)}."


def _show_rows(screen: Screen, plan: Plan) -> None:
    names = [name for name in LABELS if any(row.parts[name] >= 5e-5 for row in plan.rows)]
    table = screen.columns()
    table.add_column("every", justify="right", no_wrap=True)
    table.add_column("goodput", justify="right", no_wrap=True)
    short = {"snapshots": "snapshots", "repeated": "repeated", "queue": "queue"}
    for name in names:
        table.add_column(short.get(name, name), justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in plan.rows:
        is_best = "best" in row.marks
        others = [mark for mark in row.marks if mark != "best"]
        told = [*(["best"] if is_best else []), *others]
        table.add_row(
            f"{'> ' if is_best else ''}{shown(row.interval)}",
            percent(row.goodput),
            *(percent(row.parts[name]) for name in names),
            ", ".join(told),
            style="bold" if is_best else None,
        )
    screen.table(table)


def _show_intervals(screen: Screen, plan: Plan) -> None:
    low, high = plan.as_good
    screen.write(
        f"Young (1974): {shown(plan.young)}. Daly (2006): {shown(plan.daly)}. "
        f"The simulation: {shown(plan.best)}, and {shown(low)} to {shown(high)} is as good to "
        "0.1 points."
    )
    if plan.young < plan.model.least_interval:
        screen.write(
            f"The disk is what limits it: a checkpoint takes {shown(plan.model.write)} to write.",
            style="yellow",
        )


def _show_rest(screen: Screen, plan: Plan) -> None:
    row: Row = plan.chosen
    rest = 1.0 - row.goodput
    parts = sorted(row.parts.items(), key=lambda part: -part[1])
    told = ", ".join(f"{LABELS[name]} {percent(share)}" for name, share in parts if share >= 5e-5)
    screen.write(
        f"Every {shown(row.interval)}: {percent(row.goodput)} (±{100 * row.error:.2f} by chance) "
        f"makes progress, {percent(rest)} "
        f"does not{f': {told}' if told else ''}."
    )
    done, needed = plan.finished, shown(plan.run_seconds)
    if row.goodput < _NOWHERE:
        screen.write(
            f"Such a run gets nowhere: an interruption comes every {shown(plan.model.mtbf)}, and "
            f"a restart takes {shown(plan.model.restart)}.",
            style="bold red",
        )
    elif done is None:
        screen.write(f"{needed} of training take about {_days(plan.run_seconds / row.goodput)}.")
    elif done.unfinished:
        screen.write(
            f"{needed} of training: {percent(done.unfinished)} of such runs get nowhere.",
            style="bold red",
        )
    else:
        low, high = _days(done.low), _days(done.high)
        spread = f"; nine of ten such runs take {low} to {high}" if low != high else ""
        screen.write(f"{needed} of training take {_days(done.mean)}{spread}.")


def _days(seconds: float) -> str:
    if seconds < 2 * 3600:
        return shown(seconds)
    return f"{seconds / 86_400:.1f} d" if seconds >= 2 * 86_400 else f"{seconds / 3600:.1f} h"


def _show_ways(screen: Screen, plan: Plan) -> None:
    table = screen.columns()
    table.add_column("way of saving", no_wrap=True)
    table.add_column("best every", justify="right", no_wrap=True)
    table.add_column("goodput", justify="right", no_wrap=True)
    for way in plan.ways:
        table.add_row(way.name, shown(way.best), percent(way.goodput))
    screen.table(table)
    shared = (1 - plan.model.notice_share) * (1 - plan.model.host_loss_share)
    if plan.model.has_snapshots and shared > 0:
        screen.write(
            f"A snapshot in memory, every {shown(plan.model.snapshot_interval)}, is what is left "
            f"of the run after {shared:.0%} of the interruptions, those that end processes and "
            "leave the hosts."
        )
