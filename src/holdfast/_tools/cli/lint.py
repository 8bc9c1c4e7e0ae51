"""`holdfast lint`: its options and its output."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from holdfast import _text
from holdfast._errors import SettingsError
from holdfast._store.folder.atomic import write_atomic
from holdfast._store.folder.attempts import find_run
from holdfast._tools.cli.group import AS_JSON, FOLDER, complete_runs, print_json
from holdfast._tools.cli.show import Screen
from holdfast._tools.lint.finding import NOT_UNDERSTOOD, LintFinding, Surroundings
from holdfast._tools.lint.lint import fix, missing_folders
from holdfast._tools.lint.lint import lint as lint_script
from holdfast._tools.lint.pods import is_manifest, lint_manifest

_STDIN = "-"
_FAILED, _NOT_UNDERSTOOD = 2, 3
_STYLES = {"error": "bold red", "warning": "yellow", "hint": "cyan"}


@dataclass
class _Checked:
    name: str
    text: str
    around: Surroundings
    found: list[LintFinding] = field(default_factory=list)
    fixed: str | None = None
    made: list[Path] = field(default_factory=list)
    left: list[LintFinding] = field(default_factory=list)

    @property
    def shown(self) -> str:
        return "stdin" if self.name == _STDIN else _text.name(self.name)

    @property
    def is_understood(self) -> bool:
        return all(each.rule != NOT_UNDERSTOOD for each in self.left)

    @property
    def is_good(self) -> bool:
        return all(each.severity == "hint" for each in self.left)


@click.command()
@click.argument("scripts", metavar="SCRIPT...", nargs=-1, required=True)
@click.option("--fix", "wants_fix", is_flag=True, help="Write the corrected script.")
@click.option(
    "--run",
    metavar="RUN",
    type=FOLDER,
    shell_complete=complete_runs,
    help="A run of this script, whose save times are compared with --signal.",
)
@click.option("--ignore", metavar="RULE", multiple=True, help="Leave this rule out; repeatable.")
@AS_JSON
def lint(
    scripts: tuple[str, ...],
    wants_fix: bool,
    run: Path | None,
    ignore: tuple[str, ...],
    as_json: bool,
) -> int:
    """Find what in an sbatch script or a manifest of Kubernetes loses the warning or the job.

    Most scripts that ask for a warning before the time limit never get it: `--signal=USR2@60` with
    a bare `python` is one. For each such line it says what will happen, and how to correct it.
    SCRIPT is only read, never run; it need not use holdfast. "-" is standard input. In a manifest
    (.yaml) it checks the pods that train: grace, signals, /dev/shm, restarts.

    The exit status is 0 if there is neither error nor warning (hints are allowed), 1 if there is, 2
    if a script cannot be read or written, 3 if nothing was found but a part is not understood.

    --fix writes the corrected script (that of standard input to standard output) and makes the
    folder of the log. The exit status is then that of what is left.

    \b
    Example:
      holdfast lint job.sbatch
      holdfast lint job.sbatch --fix
      holdfast lint job.sbatch --run runs/a
      holdfast lint --json *.sbatch
      holdfast lint pod.yaml --run runs/a
    """
    if run is not None:
        run = find_run(run)[0].folder
    checked, problems = list[_Checked](), list[str]()
    for name in scripts:
        try:
            checked.append(_check(name, run, ignore))
        except SettingsError as error:
            problems.append(str(error))
    for each in checked if wants_fix else ():
        problems += _fix(each)
    for line in problems:
        click.echo(line, err=True)
    if checked and as_json:
        print_json([tree for each in checked for tree in _trees(each, wants_fix)])
    elif checked:
        _print(checked, wants_fix, is_filter=wants_fix and _STDIN in scripts)
    if problems:
        return _FAILED
    if not all(each.is_good for each in checked):
        return 1
    return 0 if all(each.is_understood for each in checked) else _NOT_UNDERSTOOD


def _print(checked: list[_Checked], wants_fix: bool, *, is_filter: bool) -> None:
    """As a filter, standard output has only the corrected script of standard input."""
    for each in checked:
        if is_filter and each.name == _STDIN:
            corrected = each.text if each.fixed is None else each.fixed
            click.echo(_encode(corrected), nl=False)
    screen = Screen(sys.stderr if is_filter else None)
    for each in checked:
        _show(screen, each, wants_fix)
    _show_summary(screen, checked, wants_fix)


def _check(name: str, run: Path | None, ignore: tuple[str, ...]) -> _Checked:
    """SettingsError if it cannot be read, or is neither a script nor a manifest."""
    folder = Path.cwd() if name == _STDIN else Path(name).absolute().parent
    try:
        data = sys.stdin.buffer.read() if name == _STDIN else Path(name).read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{_text.name(name)}: {error.strerror or error}.\nName a script for sbatch or a "
            "manifest, for example: holdfast lint job.sbatch"
        ) from error
    if b"\0" in data:
        raise SettingsError(f"{_text.name(name)}: is not a script.\nName a script for sbatch.")
    text = data.decode("utf-8", errors="surrogateescape")
    around = Surroundings(folder, Path.cwd(), run, ignore)
    found = _find(name, text, around)
    return _Checked(name, text, around, found, left=found)


def _find(name: str, text: str, around: Surroundings) -> list[LintFinding]:
    if is_manifest(name, text):
        return lint_manifest("stdin" if name == _STDIN else name, text, around)
    return lint_script(text, around)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")


def _fix(checked: _Checked) -> Iterator[str]:
    """What of it could not be done."""
    if is_manifest(checked.name, checked.text):
        return  # rewriting it would lose its comments and its order
    corrected = fix(checked.text, checked.around)
    for folder in missing_folders(checked.found, checked.around):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            yield (
                f"{_text.name(folder)}: {error.strerror or error}.\n"
                f"The log of {_text.name(checked.name)} needs this folder: make it, or choose "
                "another --output."
            )
        else:
            checked.made.append(folder)
    if corrected != checked.text:
        path = Path(checked.name).resolve()  # a link stays a link
        try:
            if checked.name != _STDIN:
                _write(path, _encode(corrected))
        except OSError as error:
            yield (
                f"{_text.name(path)}: {error.strerror or error}.\nTo have the corrected script "
                f"elsewhere: holdfast lint --fix - < {_text.name(path.name)} > corrected.sbatch"
            )
            return
        checked.fixed = corrected
    checked.left = _find(checked.name, corrected, checked.around)


def _write(path: Path, data: bytes) -> None:
    """Write the whole script or nothing, with its permissions."""
    if not os.access(path, os.W_OK):
        raise PermissionError(13, "Permission denied")
    mode = path.stat().st_mode
    write_atomic(path, data)
    path.chmod(mode & 0o7777)


def _trees(checked: _Checked, wants_fix: bool) -> list[dict[str, Any]]:
    left = {each.rule for each in checked.left}
    return [
        {
            "file": checked.name,
            "line": each.line,
            "severity": each.severity,
            "rule": each.rule,
            "message": each.message,
            "source": each.source,
            "corrected": list(each.corrected),
            "fixable": each.is_fixable,
        }
        | ({"fixed": each.is_fixable and each.rule not in left} if wants_fix else {})
        for each in checked.found
    ]


def _show(screen: Screen, checked: _Checked, wants_fix: bool) -> None:
    if wants_fix:
        _show_changes(screen, checked)
    for each in checked.left:
        screen.write(
            Text.assemble(
                (f"{checked.shown}:{each.line}: ", "bold"),
                (each.severity, _STYLES[each.severity]),
                f": {_text.name(each.message)} ",
                (f"[{each.rule}]", "dim"),
            )
        )
        if each.source.strip():
            screen.write(f"    {_text.name(each.source)}", style="dim")
        for line in each.corrected:
            screen.write(Text.assemble(("  → ", "bold"), (_text.name(line), "green")))


def _show_changes(screen: Screen, checked: _Checked) -> None:
    name = checked.shown
    for folder in checked.made:
        screen.write(f"{_text.name(folder)}: made, for the log.")
    if checked.fixed is None:
        if not checked.made:
            is_done = checked.is_good and checked.is_understood
            nothing = "nothing to fix." if is_done else "nothing that --fix can do."
            screen.write(f"{name}: {nothing}")
        return
    screen.write(f"{name}: fixed:", style="bold")
    before, after = checked.text.splitlines(), checked.fixed.splitlines()
    for line in difflib.unified_diff(before, after, n=0, lineterm=""):
        if line[:1] in "-+" and line[:3] not in ("---", "+++"):
            style = "red" if line[0] == "-" else "green"
            screen.write(f"  {line[0]} {_text.name(line[1:])}", style=style)


def _show_summary(screen: Screen, checked: list[_Checked], wants_fix: bool) -> None:
    left = [finding for each in checked for finding in each.left]
    counts = {kind: sum(each.severity == kind for each in left) for kind in _STYLES}
    told = [_text.count(n, kind) for kind, n in counts.items() if n]
    files = _text.count(len(checked), "script")
    if not told:
        screen.write(f"{files}: no problem found.", style="green")
        return
    rest = ""
    if not wants_fix:
        fixable = sum(each.is_fixable for each in left)
        if fixable:
            them = "it" if len(left) == 1 else "them"
            these = them if fixable == len(left) else f"{fixable} of {len(left)}"
            those = [each for each in checked if any(one.is_fixable for one in each.left)]
            names = (Path(each.name) for each in those)
            rest = f" To fix {these}: {_text.command('lint --fix', *names)}"
    unclear = [_text.name(each.name) for each in checked if not each.is_understood]
    if unclear:  # the command stands last, without a full stop
        rest = f" Not understood: {', '.join(unclear)}.{rest}"
    style = next(_STYLES[kind] for kind, n in counts.items() if n)
    screen.write(f"{files}: {', '.join(told)}{' left' if wants_fix else ''}.{rest}", style=style)
