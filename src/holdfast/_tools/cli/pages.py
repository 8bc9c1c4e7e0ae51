"""The commands that make pages: `report`, `compare`, `ui`; and `metrics`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import click
from rich.text import Text

from holdfast import _text
from holdfast._environment import variables
from holdfast._errors import HoldfastError, SettingsError, not_installed
from holdfast._report import compare as comparison
from holdfast._report import html, openmetrics
from holdfast._report.model import RunModel
from holdfast._report.status.gather import find_runs, only_run, summarize_all
from holdfast._report.view import View
from holdfast._store.folder.atomic import write_atomic
from holdfast._tools.cli.group import AS_JSON, FOLDER, RUN, RUNS_PATH, complete_runs
from holdfast._tools.cli.show import Screen
from holdfast._tools.prove.report import read_proofs

_LONGEST_NAME = 180  # characters, which may be of several bytes each


@click.command()
@RUN
@click.option(
    "-o", "--output", metavar="FILE", type=FOLDER, help="Write to this file; - is standard output."
)
@click.option(
    "--proof",
    "proofs",
    metavar="FILE",
    type=FOLDER,
    multiple=True,
    help="Show what `holdfast prove --json` has found, too.",
)
@click.option("--open", "wants_browser", is_flag=True, help="Open it in a browser.")
@AS_JSON
def report(
    run: Path, output: Path | None, proofs: tuple[Path, ...], wants_browser: bool, as_json: bool
) -> None:
    """Write one file of HTML that shows how a run went: when it trained, saved, waited or was down,
    and what was lost; its metrics, step times, memory and checkpoints; and why it died each time.

    The file needs no network and can be sent by mail. It is called RUN-report.html, in the current
    folder, unless -o names another. --json prints the same for scripts.

    \b
    Example:
      holdfast report runs/a
      holdfast report runs/a -o a.html --open
    """
    folder = only_run(run)
    model = RunModel(folder, proofs=[proof for path in proofs for proof in read_proofs(path)])
    model.update()
    found = model.view()
    text = _json(found) if as_json else html.render(found)
    if str(output) == "-" or (as_json and output is None):
        click.echo(text, nl=False)
        return
    kind = "json" if as_json else "html"
    path = _place(output, f"{found['run']['name'][:_LONGEST_NAME]}-report.{kind}")
    size = _write(path, text)
    _tell(folder, found, path, size)
    if wants_browser:
        _open(path)


@click.command()
@RUNS_PATH
@click.option("-o", "--output", metavar="FILE.prom", type=FOLDER, help="Write it to this file.")
def metrics(path: Path, output: Path | None) -> None:
    """Print the state of a run, or of all runs below a folder, as OpenMetrics text.

    With -o the file is replaced at once, for the textfile collector of the node exporter; call it
    from cron or a timer. While `holdfast ui` runs, it has the same at /metrics.

    \b
    Example:
      holdfast metrics runs
      holdfast metrics runs -o /var/lib/node_exporter/holdfast.prom
    """
    runs = summarize_all(find_runs(path))
    text = openmetrics.render(runs)
    if output is None or str(output) == "-":
        click.echo(text, nl=False)
        return
    if output.is_dir():
        raise SettingsError(
            f"{output}: is a folder.\nName a file in it: {output / 'holdfast.prom'}"
        )
    _write(output, text)
    click.echo(f"{_text.name(output)}: the state of {_text.count(len(runs), 'run')}.")


def _json(found: View | comparison.RunComparison) -> str:
    return json.dumps(html.finite(found), indent=1) + "\n"


def _place(output: Path | None, usual: str) -> Path:
    path = Path(usual) if output is None else output
    return path / usual if path.is_dir() else path


def _write(path: Path, text: str) -> int:
    data = text.encode("utf-8", errors="replace")
    try:
        if path.exists() and not path.is_file():
            # A rename would put a file in the place of a pipe, or of /dev/null.
            path.write_bytes(data)
        else:
            write_atomic(path.resolve(), data, durable=False)  # where a link leads to
    except OSError as error:
        said = error.strerror or error
        raise SettingsError(
            f"{path}: cannot be written ({said}).\n"
            "Name another file, in a folder that is there and may be written to: -o FILE"
        ) from error
    return len(data)


def _tell(folder: Path, found: View, path: Path, size: int) -> None:
    run, goodput, count = found["run"], found["goodput"], len(found["attempts"])
    click.echo(f"{_text.name(folder)}: {_text.name(run['headline'])}")
    if count:
        wall = _text.duration(goodput["wall_seconds"] - goodput["stopped_seconds"])
        made = f"{100 * goodput['share']:.0f}% of it made progress"
        click.echo(f"{_text.count(count, 'attempt')} in {wall}: {made}; {goodput['sentence']}.")
    click.echo(f"Written to {_text.name(path)} ({_text.size(size)}); it needs no network.")
    if run["is_live"]:
        does = "It trains on." if run["state"] == "training" else "Its process is alive."
        click.echo(f"{does} To see it live: {_text.command('ui', folder)}")


def _open(path: Path) -> None:
    """In a browser, or a line that there is none."""
    if not webbrowser.open(path.absolute().as_uri()):
        click.echo("No browser could be opened here: open that file in one.", err=True)


_MOST_METRICS = 8  # in the terminal, without --all


@click.command()
@click.argument(
    "paths", metavar="RUN…", type=FOLDER, nargs=-1, required=True, shell_complete=complete_runs
)
@click.option("--metric", metavar="NAME", help="Sort by this metric, the best run first.")
@click.option("--highest", is_flag=True, help="The best value is the highest one.")
@click.option("--lowest", is_flag=True, help="The best value is the lowest one.")
@click.option("--all", "wants_all", is_flag=True, help="Show settings that do not differ, too.")
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
    """Show runs side by side: the hyperparameters that differ, and the results.

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
    is_higher = highest
    if not lowest and not highest and found["metric"] is not None:
        is_higher = comparison.is_higher_better(found["metric"])
    if as_json:
        click.echo(_json(found), nl=False)
        return
    if output is None and not wants_browser:
        _show_comparison(found, is_higher, wants_all)
        return
    path = _place(output, "compare.html")
    runs = _text.count(len(found["runs"]), "run")
    size = _text.size(_write(path, html.render_comparison(found, runs)))
    written = f"written to {_text.name(path)} ({size})"
    click.echo(f"{runs} side by side, {written}; the page needs no network.")
    if wants_browser:
        _open(path)


def _gather(paths: Sequence[Path], metric: str | None) -> comparison.RunComparison:
    folders = list(dict.fromkeys(folder for path in paths for folder in find_runs(path)))
    if len(folders) > comparison.MOST_RUNS:
        raise SettingsError(
            f"{len(folders)} runs are more than the {comparison.MOST_RUNS} that fit side by "
            "side.\nName fewer of them. To choose on a page: holdfast ui"
        )
    facts: list[comparison.ComparedFacts] = []
    for folder in folders:
        model = RunModel(folder)
        model.update()
        facts.append(comparison.gather_facts(model, str(len(facts)), _text.name(folder)))
    found = comparison.assemble_comparison(facts, metric)
    if metric is not None and metric not in found["metrics"]:
        known = ", ".join(map(_text.name, found["metrics"][:20])) or "none at all"
        raise SettingsError(f"No run has a metric {metric!r}.\nThere are: {known}")
    return found


def _show_comparison(found: comparison.RunComparison, is_higher: bool, wants_all: bool) -> None:
    runs, metric, keys = found["runs"], found["metric"], found["differing"]
    metrics = found["metrics"] if wants_all else found["metrics"][:_MOST_METRICS]
    if wants_all:
        keys = list(dict.fromkeys(key for run in runs for key in run["config"]))

    def best_of(run: comparison.ComparedRun) -> float | None:
        result = run["results"].get(metric or "")
        return None if result is None else result["high" if is_higher else "low"]

    def rank(run: comparison.ComparedRun) -> tuple[bool, float, str]:
        value = best_of(run)
        # A run without a value comes last.
        return value is None, (value or 0.0) * (-1 if is_higher else 1), run["name"]

    ordered = runs if metric is None else sorted(runs, key=rank)
    best = best_of(ordered[0])
    titles = ["step", *([f"{metric}, best"] if metric else []), *metrics, *keys]
    rows = []
    for run in ordered:
        is_best = best is not None and run is ordered[0]
        total = "" if run["total"] is None else f"/{run['total']}"
        results = [run["results"].get(name) for name in metrics]
        values = [*([best_of(run)] if metric else []), *(each and each["last"] for each in results)]
        config = [run["config"].get(key, "") for key in keys]
        rows.append(
            [
                *(Text(run["name"], style="bold green" if is_best else ""), run["state"]),
                "" if run["step"] is None else f"{run['step']}{total}",
                *("" if value is None else _text.number(value) for value in values),
                *(f"{each:.6g}" if isinstance(each, float) else str(each) for each in config),
            ]
        )
    screen = Screen()
    screen.table(["run", "=state", *(f">{_text.name(title)}" for title in titles)], rows)
    if best is not None:
        named = f"{'highest' if is_higher else 'lowest'} {_text.name(metric or '')}"
        said = f"Best so far: {ordered[0]['name']}, {named} {_text.number(best)}."
        screen.write(said, style="dim")
    same = len({key for run in runs for key in run["config"]}) - len(found["differing"])
    if not any(run["config"] for run in runs):
        said = "No hyperparameters were recorded: holdfast.Run(…, config={…}) records them."
        screen.write(said, style="dim")
    elif same and not wants_all:
        said = f"{_text.count(same, 'setting')} the same in all runs; --all shows them too."
        screen.write(said, style="dim")


@click.command()
@click.argument(
    "folder", metavar="[FOLDER]", type=FOLDER, default=".", shell_complete=complete_runs
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=0,
    help="The port; 0, the default, is any free one.",
)
@click.option("--host", metavar="NAME", default="127.0.0.1", help="127.0.0.1, localhost or ::1.")
@click.option("--read-only", is_flag=True, help="Look only: no stop, save, stacks or labels.")
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
def ui(folder: Path, port: int, host: str, read_only: bool, no_open: bool) -> int:
    """Open a live page of all runs below a folder, with the report of each run.

    It shows the state of every run, what is safe and what is wrong, and has buttons to stop a run,
    to save it now and to see its stacks. Only this machine can reach it, and only with the key in
    the address that is printed. It ends with Ctrl-C; no run needs it.

    From another machine, with the same port on both ends:

    \b
      ssh -L 8000:127.0.0.1:8000 HOST holdfast ui runs --port 8000

    \b
    Example:
      holdfast ui runs
      holdfast ui runs --read-only --port 8000
    """
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise HoldfastError(not_installed("holdfast ui", name, "ui"))
    from holdfast._report.server.serve import serve, write_redirect

    with contextlib.ExitStack() as redirects:

        def ready(address: str) -> None:
            click.echo(f"{_text.name(folder)}: {address}")
            click.echo("Ctrl-C ends the page; the runs go on.")
            sys.stdout.flush()
            place = variables.state_folder()  # else the address is printed in any case
            if not no_open and place and variables.has_screen():
                with contextlib.suppress(OSError):
                    path = write_redirect(Path(place), address)
                    redirects.callback(path.unlink, missing_ok=True)
                    # In a thread: some browsers return only when they are closed.
                    uri = path.as_uri()
                    threading.Thread(target=webbrowser.open, args=(uri,), daemon=True).start()

        return serve(folder, host=host, port=port, is_read_only=read_only, ready=ready)
