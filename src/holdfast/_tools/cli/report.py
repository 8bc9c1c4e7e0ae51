"""`holdfast report` and `holdfast metrics`: what they take, and what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast import _text
from holdfast._errors import FolderError, NotARun, SettingsError
from holdfast._tools.cli.group import AS_JSON, FOLDER, RUN, complete_runs

if TYPE_CHECKING:
    from holdfast._report.view import Proof, View

_HINT = "A run folder is what holdfast.Run was given. To see those below a folder: holdfast status"
_LONGEST_NAME = 180  # characters, which may be of several bytes each
_MOST_NAMED = 8


@click.command(short_help="Write a page of HTML that shows how a run went.")
@RUN
@click.option("-o", "--output", metavar="FILE", type=FOLDER, help="Where to; - is standard output.")
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
    """Write one file of HTML that shows how a run went: when it trained, saved, was lost, waited
    and was down; its metrics, step times, memory and checkpoints; and why it died each time.

    The file needs no network and can be sent to anybody. It is called RUN-report.html, in the
    current folder, unless -o names another. With --json the same is printed for scripts.

    \b
    Example:
      holdfast report runs/a
      holdfast report runs/a -o a.html --open
    """
    folder = _find(run)
    found = _look(folder, [proof for path in proofs for proof in _read_proofs(path)])
    from holdfast._report import html

    if as_json:
        text = json.dumps(html.finite(found), indent=1) + "\n"
    else:
        text = html.render(found)
    if str(output) == "-" or (as_json and output is None):
        click.echo(text, nl=False)
        return
    path = _place(output, found["run"]["name"], "json" if as_json else "html")
    size = _write(path, text)
    _tell(folder, found, path, size)
    if wants_browser:
        _open(path)


@click.command(short_help="Write the state of runs as metrics, for Prometheus.")
@click.argument("path", metavar="[PATH]", type=FOLDER, default=".", shell_complete=complete_runs)
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
    from holdfast._report import openmetrics
    from holdfast._report.status.gather import find_runs, summarize_all

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
    runs_told = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    click.echo(f"{_text.name(output)}: the state of {runs_told}.")


def _find(path: Path) -> Path:
    """The run that is meant: the folder itself, or the only one below it."""
    from holdfast._report.status.gather import find_runs

    if not path.exists():
        raise FolderError(f"{path}: there is no such folder.\n{_HINT}")
    if not path.is_dir():
        raise FolderError(f"{path}: is a file, and no run folder.\n{_HINT}")
    found = find_runs(path)
    if len(found) > 1:
        several = ", ".join(_text.name(run) for run in found[:_MOST_NAMED])
        more = "" if len(found) <= _MOST_NAMED else ", …"
        command = _text.command("report", found[0])
        raise NotARun(
            f"{path}: there are {len(found)} runs in it: {several}{more}.\n"
            f"Name one of them: {command}   (or see them all: {_text.command('ui', path)})"
        )
    return found[0]


def _read_proofs(path: Path) -> list[Proof]:
    from holdfast._tools.prove.for_page import read_proofs

    return read_proofs(path)


def _look(folder: Path, proofs: list[Proof]) -> View:
    from holdfast._report.model import RunModel

    model = RunModel(folder, proofs=proofs)
    model.update()
    return model.view()


def _place(output: Path | None, name: str, kind: str) -> Path:
    usual = f"{name[:_LONGEST_NAME]}-report.{kind}"
    if output is None:
        return Path(usual)
    return output / usual if output.is_dir() else output


def _write(path: Path, text: str) -> int:
    from holdfast._store.folder.atomic import write_atomic

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
    goodput, count = found["goodput"], len(found["attempts"])
    attempts = "1 attempt" if count == 1 else f"{count} attempts"
    wall = _text.duration(goodput["wall_seconds"])
    share = 100 * goodput["share"]
    headline = found["run"]["headline"]
    click.echo(f"{_text.name(folder)}: {_text.name(headline)}")
    if count:
        click.echo(
            f"{attempts} in {wall}: {share:.0f}% of it made progress; {goodput['sentence']}."
        )
    click.echo(f"Written to {_text.name(path)} ({_text.size(size)}); it needs no network.")
    if found["run"]["is_live"]:
        does = "It trains on." if found["run"]["state"] == "training" else "Its process lives."
        click.echo(f"{does} To see it live: {_text.command('ui', folder)}")


def _open(path: Path) -> None:
    import webbrowser

    if not webbrowser.open(path.absolute().as_uri()):
        click.echo("No browser could be opened here: open that file in one.", err=True)
