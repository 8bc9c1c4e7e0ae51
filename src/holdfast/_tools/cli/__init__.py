"""The command line: each command parses its options, calls one function and prints the answer.

Only this package imports click and rich, and only when a command runs.
"""

from __future__ import annotations

import contextlib
import os
import sys


def main() -> None:
    """Run one command, and exit with its status: never with a traceback for a wrong folder."""
    hook, sys.unraisablehook = sys.unraisablehook, _interrupt_again
    try:
        status = _run()
        if sys.stdout is not None:  # started with it closed, `>&-`
            sys.stdout.flush()
    except BrokenPipeError:
        # `holdfast status | head -1` closes the pipe, which is no error. Without this the
        # interpreter would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except KeyboardInterrupt:
        status = 130
    finally:
        sys.unraisablehook = hook
    sys.exit(status)


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Ctrl-C that came during a weakref callback (each import has some) is lost: repeat it."""
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    import _thread

    # From a thread, and without waiting for it: in this function it would be lost again.
    _thread.start_new_thread(_interrupt_soon, ())


def _interrupt_soon() -> None:
    import _thread
    import time

    time.sleep(0.01)
    _thread.interrupt_main()


def _run() -> int:
    command, options = _led_command(sys.argv[1:])
    if command:
        # Every task of a job starts through here: click and rich would take longer than the
        # rest of the start together.
        from holdfast._supervise import lead

        most = options.get("--max-restarts")
        most_restarts = None if most is None else int(most)
        timeout, spare = options.get("--hang-timeout"), "--spare" in options
        return lead(command, most_restarts, timeout, spare=spare)
    for stream in (sys.stdout, sys.stderr):
        # A folder's name may hold bytes that are no text, and a pipe may be ASCII only.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # some have none
    import click

    from holdfast import _text as words
    from holdfast._errors import FolderError, HoldfastError, SettingsError
    from holdfast._tools.cli.group import PipeClosed, cli

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
    except PipeClosed as error:
        raise BrokenPipeError from error
    except OSError as error:
        where = words.name(str(error.filename or "holdfast"))
        click.echo(f"{where}: {error.strerror or error}.", err=True)
        return 1
    return result if isinstance(result, int) else 0


def _led_command(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command after `run` and its options; nothing where click has to explain an error."""
    if words[:1] != ["run"]:
        return [], {}
    rest, found = words[1:], dict[str, str]()
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name == "--" and not equals:
            return rest, found
        if name in _LED_OPTIONS:
            value = value if equals or not rest else rest.pop(0)
            if not _LED_OPTIONS[name](value):
                return [], {}
        elif name != "--spare" or equals:
            return [], {}
        found[name] = value
    return rest, found


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_timeout(text: str) -> bool:
    from holdfast._supervise.hangs import Timeout

    with contextlib.suppress(ValueError):
        Timeout.parse(text)
        return True
    return False


_LED_OPTIONS = {"--max-restarts": _is_count, "--hang-timeout": _is_timeout}
