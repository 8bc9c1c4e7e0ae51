"""`holdfast report`, `holdfast metrics` and `holdfast ui`: their options and their output."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast import _text
from holdfast._environment import variables
from holdfast._errors import FolderError, HoldfastError, NotARun, SettingsError, install_command
from holdfast._tools.cli.group import AS_JSON, FOLDER, RUN, RUNS_PATH, complete_runs

if TYPE_CHECKING:
    from holdfast._report.server.serve import Address
    from holdfast._report.view import View

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
    from holdfast._report import html
    from holdfast._report.model import RunModel
    from holdfast._tools.prove.report import read_proofs

    model = RunModel(folder, proofs=[proof for path in proofs for proof in read_proofs(path)])
    model.update()
    found = model.view()

    if as_json:
        text = json.dumps(html.finite(found), indent=1) + "\n"
    else:
        text = html.render(found)
    if str(output) == "-" or (as_json and output is None):
        click.echo(text, nl=False)
        return
    path = _place(output, found["run"]["name"], "json" if as_json else "html")
    size = write_page(path, text)
    _tell(folder, found, path, size)
    if wants_browser:
        open_page(path)


@click.command(short_help="Write the state of runs as metrics, for Prometheus.")
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
    write_page(output, text)
    click.echo(f"{_text.name(output)}: the state of {_text.count(len(runs), 'run')}.")


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


def _place(output: Path | None, name: str, kind: str) -> Path:
    usual = f"{name[:_LONGEST_NAME]}-report.{kind}"
    if output is None:
        return Path(usual)
    return output / usual if output.is_dir() else output


def write_page(path: Path, text: str) -> int:
    """Replace a file; returns its size."""
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
    attempts = _text.count(count, "attempt")
    wall = _text.duration(goodput["wall_seconds"] - goodput["stopped_seconds"])
    share = 100 * goodput["share"]
    headline = found["run"]["headline"]
    click.echo(f"{_text.name(folder)}: {_text.name(headline)}")
    if count:
        click.echo(
            f"{attempts} in {wall}: {share:.0f}% of it made progress; {goodput['sentence']}."
        )
    click.echo(f"Written to {_text.name(path)} ({_text.size(size)}); it needs no network.")
    if found["run"]["is_live"]:
        does = "It trains on." if found["run"]["state"] == "training" else "Its process is alive."
        click.echo(f"{does} To see it live: {_text.command('ui', folder)}")


def open_page(path: Path) -> None:
    """In a browser, or a line that there is none."""
    import webbrowser

    if not webbrowser.open(path.absolute().as_uri()):
        click.echo("No browser could be opened here: open that file in one.", err=True)


_REDIRECT_SECONDS = 60.0


@click.command(short_help="Open a page over all runs below a folder.")
@click.argument(
    "folder", metavar="[FOLDER]", type=FOLDER, default=".", shell_complete=complete_runs
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=0,
    help="Where to listen; 0, as without it, is any free port.",
)
@click.option("--host", metavar="NAME", default="127.0.0.1", help="127.0.0.1, localhost or ::1.")
@click.option("--read-only", is_flag=True, help="Look only: no stop, save, stacks or labels.")
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
def ui(folder: Path, port: int, host: str, read_only: bool, no_open: bool) -> int:
    """Open a page over all runs below a folder, and of each run its report, live.

    It shows what every run does, what of it is safe and what is wrong, and has buttons to stop a
    run, to save it now and to see its stacks. Only this machine can reach it, and only with the
    key in the address that is printed. It ends with Ctrl-C; no run needs it.

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
            raise HoldfastError(
                f"holdfast ui needs {name}, which is not installed here.\n"
                f"Install it: {install_command('ui')}"
            )
    from holdfast._report.server.serve import serve

    redirects: list[Path] = []

    def ready(address: Address) -> None:
        click.echo(f"{_text.name(folder)}: {address.url}")
        click.echo("Ctrl-C ends the page; the runs go on.")
        sys.stdout.flush()
        if not no_open and variables.has_screen():
            _open_browser(address, redirects)

    try:
        return serve(folder, host=host, port=port, is_read_only=read_only, ready=ready)
    finally:
        _remove(redirects)


def _open_browser(address: Address, redirects: list[Path]) -> None:
    """In a thread: some browsers return only when they are closed."""
    import webbrowser

    from holdfast._report.server.serve import write_redirect

    place = variables.state_folder()
    if not place:
        return  # the address is printed in any case
    try:
        path = write_redirect(Path(place), address)
    except OSError:
        return
    redirects.append(path)
    threading.Thread(target=webbrowser.open, args=(path.as_uri(),), daemon=True).start()
    later = threading.Timer(_REDIRECT_SECONDS, _remove, args=(redirects,))
    later.daemon = True
    later.start()


def _remove(paths: list[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
