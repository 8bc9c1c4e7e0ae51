"""`holdfast ui`: what it takes, and what it prints."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast import _text
from holdfast._environment import variables
from holdfast._errors import HoldfastError, install_command
from holdfast._tools.cli.group import FOLDER, complete_runs

if TYPE_CHECKING:
    from holdfast._report.server.serve import Address

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
@click.option("--read-only", is_flag=True, help="Look only: no stop, save or stacks.")
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
        return  # the address is printed all the same
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
