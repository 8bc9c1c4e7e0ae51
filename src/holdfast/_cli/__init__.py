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
    if led := _led_command(sys.argv[1:]):
        # Every task of a job passes here, and waits for it: click and rich take longer than
        # the rest of the start together.
        from holdfast._supervise.leader import lead

        return lead(led)
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


def _led_command(words: list[str]) -> list[str]:
    """What follows `run`, where that is a command and nothing for click to read."""
    if words[:1] != ["run"]:
        return []
    if words[1:2] == ["--"]:
        return words[2:]
    return [] if "".join(words[1:2]).startswith("-") else words[1:]
