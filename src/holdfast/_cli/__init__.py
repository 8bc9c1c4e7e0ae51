"""The command line: a thin face, where each command calls one function.

`gather` and `checkpoints` find out, `commands` asks them, `show` prints. Only this
room imports click and rich, and only when a command runs.
"""

from __future__ import annotations

import contextlib
import os
import sys


def main() -> None:
    """Run one command, and leave with its status: never with a traceback for a wrong folder."""
    try:
        status = _run()
        if sys.stdout is not None:  # started with it closed, `>&-`
            sys.stdout.flush()
    except BrokenPipeError:
        # `holdfast status | head -1`: nobody reads on, which is no fault of anyone. Without
        # this the interpreter would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _run() -> int:
    command, most = _led_command(sys.argv[1:])
    if command:
        # Every task of a job passes here, and waits for it: click and rich take longer than
        # the rest of the start together.
        from holdfast._supervise.leader import lead

        return lead(command, most)
    for stream in (sys.stdout, sys.stderr):
        # A folder's name may hold bytes that are no text, and a pipe may want ASCII.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # some have none
    import click

    from holdfast._cli import words
    from holdfast._cli.commands import cli
    from holdfast._cli.group import NobodyReads
    from holdfast._errors import FolderError, HoldfastError, SettingsError

    try:
        result = cli.main(standalone_mode=False, prog_name="holdfast")
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except HoldfastError as error:
        for line in str(error).splitlines():
            click.echo(words.name(line), err=True)
        return 2 if isinstance(error, FolderError | SettingsError) else 1
    except NobodyReads as error:
        raise BrokenPipeError from error
    except OSError as error:
        where = words.name(str(error.filename or "holdfast"))
        click.echo(f"{where}: {error.strerror or error}.", err=True)
        return 1
    return result if isinstance(result, int) else 0


def _led_command(words: list[str]) -> tuple[list[str], int | None]:
    """What follows `run`, where that is a command and nothing that click has to explain."""
    if words[:1] != ["run"]:
        return [], None
    rest, most = words[1:], None
    if rest[:1] == ["--max-restarts"]:
        rest = [f"--max-restarts={''.join(rest[1:2])}", *rest[2:]]
    if rest and rest[0].startswith("--max-restarts="):
        text = rest.pop(0).partition("=")[2]
        if not text.isascii() or not text.isdigit():
            return [], None
        most = int(text)
    if rest[:1] == ["--"]:
        return rest[1:], most
    return ([] if "".join(rest[:1]).startswith("-") else rest), most
