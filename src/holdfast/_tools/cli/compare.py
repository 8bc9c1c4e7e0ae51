"""`holdfast compare`: runs side by side, in the terminal and as one file of HTML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast import _text
from holdfast._errors import SettingsError
from holdfast._tools.cli.group import AS_JSON, FOLDER, complete_runs
from holdfast._tools.cli.pages import open_page, write_page

if TYPE_CHECKING:
    from holdfast._report.compare import ComparedRun, Comparison, Result, RunFacts
    from holdfast._report.started import Scalar

_MOST_METRICS = 8  # in the terminal, without --all
_USUAL_NAME = "compare.html"


@click.command(short_help="Show runs side by side: settings, results, curves.")
@click.argument(
    "paths", metavar="RUN…", type=FOLDER, nargs=-1, required=True, shell_complete=complete_runs
)
@click.option("--metric", metavar="NAME", help="Sort by this metric, the best run first.")
@click.option("--highest", is_flag=True, help="The best value is the highest one.")
@click.option("--lowest", is_flag=True, help="The best value is the lowest one.")
@click.option("--all", "wants_all", is_flag=True, help="Also settings that are the same in all.")
@click.option("-o", "--output", metavar="FILE", type=FOLDER, help="Write a page of HTML.")
@click.option("--open", "wants_browser", is_flag=True, help="Open the page in a browser.")
@AS_JSON
def compare(
    paths: tuple[Path, ...],
    metric: str | None,
    highest: bool,
    lowest: bool,
    wants_all: bool,
    output: Path | None,
    wants_browser: bool,
    as_json: bool,
) -> None:
    """Show runs side by side: the hyperparameters that differ, and what came of them.

    RUN is a run folder, or a folder with runs in it. The best run stands first, by the training
    loss or by --metric. With -o the same is written as one file of HTML with the curves of all
    metrics, which needs no network.

    \b
    Example:
      holdfast compare runs/a runs/b
      holdfast compare runs --metric val_loss -o compare.html
    """
    if highest and lowest:
        raise SettingsError("--highest and --lowest: choose one of them.")
    found = _gather(paths, metric)
    is_higher = _is_higher(found, highest, lowest)
    if as_json:
        from holdfast._report import html

        click.echo(json.dumps(html.finite(found), indent=1))
        return
    if output is not None or wants_browser:
        _write_page(found, output, wants_browser)
        return
    _show(found, is_higher, wants_all)


def _gather(paths: Sequence[Path], metric: str | None) -> Comparison:
    from holdfast._report.compare import MOST_RUNS, assemble_comparison, gather_facts
    from holdfast._report.model import RunModel
    from holdfast._report.status.gather import find_runs

    folders = list(dict.fromkeys(folder for path in paths for folder in find_runs(path)))
    if len(folders) > MOST_RUNS:
        raise SettingsError(
            f"{len(folders)} runs are more than the {MOST_RUNS} that fit side by side.\n"
            "Name fewer of them. To choose on a page: holdfast ui"
        )
    facts: list[RunFacts] = []
    for folder in folders:
        model = RunModel(folder)
        model.update()
        facts.append(gather_facts(model, str(len(facts)), _text.name(folder)))
    found = assemble_comparison(facts, metric)
    if metric is not None and metric not in found["metrics"]:
        known = ", ".join(map(_text.name, found["metrics"][:20])) or "none at all"
        raise SettingsError(f"No run has a metric {metric!r}.\nThere are: {known}")
    return found


def _is_higher(found: Comparison, highest: bool, lowest: bool) -> bool:
    from holdfast._report.compare import is_higher_better

    if highest or lowest:
        return highest
    return found["metric"] is not None and is_higher_better(found["metric"])


def _write_page(found: Comparison, output: Path | None, wants_browser: bool) -> None:
    from holdfast._report import html

    path = Path(_USUAL_NAME) if output is None else output
    path = path / _USUAL_NAME if path.is_dir() else path
    runs = _text.count(len(found["runs"]), "run")
    size = write_page(path, html.render_comparison(found, runs))
    click.echo(
        f"{runs} side by side, written to {_text.name(path)} ({_text.size(size)}); "
        "the page needs no network."
    )
    if wants_browser:
        open_page(path)


def _show(found: Comparison, is_higher: bool, wants_all: bool) -> None:
    from rich.text import Text

    from holdfast._report.compare import best_run
    from holdfast._tools.cli.show import Screen

    runs, metric = found["runs"], found["metric"]
    best = None if metric is None else best_run(runs, metric, is_higher=is_higher)
    ordered = (
        runs if metric is None else sorted(runs, key=lambda run: _rank(run, metric, is_higher))
    )
    keys = _keys(found, wants_all)
    metrics = found["metrics"] if wants_all else found["metrics"][:_MOST_METRICS]
    screen = Screen()
    table = screen.columns()
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    titles = ["step", *([f"{metric}, best"] if metric else []), *metrics, *keys]
    for title in titles:
        table.add_column(_text.name(title), justify="right", overflow="fold")
    for run in ordered:
        is_best = best is not None and run is runs[best]
        cells = _cells(run, metric, is_higher, metrics, keys)
        name = Text(run["name"], style="bold green" if is_best else "")
        table.add_row(name, run["state"], *cells)
    screen.table(table)
    for line in _remarks(found, best, is_higher, wants_all):
        screen.write(line, style="dim")


def _cells(
    run: ComparedRun, metric: str | None, is_higher: bool, metrics: list[str], keys: list[str]
) -> Iterator[str]:
    total = "" if run["total"] is None else f"/{run['total']}"
    yield "" if run["step"] is None else f"{run['step']}{total}"
    if metric is not None:
        yield _figure(_best(run["results"].get(metric), is_higher))
    for name in metrics:
        result = run["results"].get(name)
        yield _figure(None if result is None else result["last"])
    for key in keys:
        yield _setting(run["config"][key]) if key in run["config"] else ""


def _remarks(
    found: Comparison, best: int | None, is_higher: bool, wants_all: bool
) -> Iterator[str]:
    runs, metric = found["runs"], found["metric"]
    if best is not None and metric is not None:
        value = _figure(_best(runs[best]["results"].get(metric), is_higher))
        side = "highest" if is_higher else "lowest"
        yield f"Best so far: {runs[best]['name']}, {side} {_text.name(metric)} {value}."
    same = len({key for run in runs for key in run["config"]}) - len(found["differing"])
    if not any(run["config"] for run in runs):
        yield "No hyperparameters were recorded: holdfast.Run(…, config={…}) records them."
    elif same and not wants_all:
        yield f"{_text.count(same, 'setting')} the same in all runs; --all shows them too."


def _keys(found: Comparison, wants_all: bool) -> list[str]:
    if not wants_all:
        return found["differing"]
    return list(dict.fromkeys(key for run in found["runs"] for key in run["config"]))


def _best(result: Result | None, is_higher: bool) -> float | None:
    if result is None:
        return None
    return result["high"] if is_higher else result["low"]


def _rank(run: ComparedRun, metric: str, is_higher: bool) -> tuple[bool, float, str]:
    value = _best(run["results"].get(metric), is_higher)
    # A run without a value comes last.
    return value is None, 0.0 if value is None else -value if is_higher else value, run["name"]


def _figure(value: float | None) -> str:
    return "" if value is None else _text.number(value)


def _setting(value: Scalar) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
