"""An attempt of a run: what the run was given, its number, its start record, and open runs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import platform
import shlex
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast._adapters.metrics import Metrics
from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name, of_process
from holdfast._environment.slurm.job import find_job
from holdfast._errors import RunIsLive, SettingsError, is_interactive
from holdfast._run.ranks.meeting import RankGroup, come_together, leave_again, stopped_before
from holdfast._run.ranks.world import Launcher, World, find_launcher
from holdfast._run.signals.handlers import uninterruptible
from holdfast._settings import Settings
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import claim, read_json, write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.format.threads import start_thread
from holdfast._text import cut, say, text
from holdfast._text import record as record_in
from holdfast.rules import Rule

if TYPE_CHECKING:
    from holdfast._environment.secrets import Redacted
    from holdfast._run.session import Session

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class RunSpec:
    folder: Path
    settings: Settings
    rule: Rule | None
    state: dict[str, Any]
    metrics: Metrics
    config: dict[str, Any]  # hyperparameters, as JSON values


@dataclass(eq=False)
class RunAttempt:
    """The number of one attempt, and the process and the ranks that make it."""

    folder: Path
    layout: RunLayout
    run_id: str
    number: int = 0  # until it is claimed
    group: RankGroup | None = None  # the ranks that opened the run together
    launcher: Launcher | None = None  # a process that restarts the run by itself
    in_job: bool = field(default_factory=lambda: find_job(variables.of_job()) is not None)
    pid: int = field(default_factory=os.getpid)
    thread: int = field(default_factory=threading.get_ident)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size

    def claim(self, world: World, state: dict[str, Any], meanwhile: Callable[[int], None]) -> None:
        """Claim the next number; with other ranks, the same for all of them.

        `meanwhile` is called while the keeper of the last attempt is waited for.
        """
        self.launcher = find_launcher()
        if world.is_alone:
            stopped = stopped_before(self.layout, self.launcher)
            if stopped is not None:
                raise leave_again(self.folder, stopped)
            self.number = claim(self.layout, self.folder, say, meanwhile)
        else:
            self.group = come_together(world, self.layout, self.run_id, state, self.folder)
            self.number = self.group.take_attempt(self.layout)

    @uninterruptible
    def journal(self, event: str, **fields: Any) -> None:
        """Append to the run's journal; of several ranks only the first writes."""
        if self.rank == 0:
            fields.setdefault("attempt", self.number)
            journal.append(self.layout.journal, event, **fields)


# -- Runs that this process has open ---------------------------------------------------------------
# A notebook cell that opens a run without `with`, and is interrupted or ends, leaves the run open.
# The next opening of the folder in the same interpreter is no second trainer: the forgotten session
# is closed, and the new one resumes from it.


_open: dict[str, tuple[Session, int, threading.Thread]] = {}


def note_open(folder: Path, session: Session) -> None:
    _open[os.path.realpath(folder)] = (session, os.getpid(), threading.current_thread())


def note_closed(folder: Path) -> None:
    _open.pop(os.path.realpath(folder), None)


def close_forgotten(folder: Path) -> None:
    """Close the session that this interpreter left open in a folder; refuse if it is in use."""
    session, pid, thread = _open.get(os.path.realpath(folder), (None, 0, None))
    if session is None or thread is None or pid != os.getpid():
        return
    is_elsewhere = thread is not threading.current_thread() and thread.is_alive()
    if not is_interactive() or is_elsewhere:
        where = f"in its thread {thread.name}" if is_elsewhere else "with another Run"
        raise RunIsLive(
            f"{folder}: this process trains here already, {where}.\n"
            f"End that one first (run.stop(), or leave its `with` block), or use another folder.",
            pid=pid,
            host=host_name(),
        )
    say(f"{folder} was still open; closed, and continued from there. `with` closes it in time.")
    session.close_forgotten()


# -- start.json: how an attempt was started, and what has changed since the attempt before it ------
# Rank 0 writes it, in a thread: the opening of a run must not wait for it. The keeper adds what
# takes longer: see `_keeper/start_facts.py`. No run fails because of this record.


_MOST_BYTES = 64 << 10  # of a command, or of all variables
_MOST_NAMES = 100
_MOST_SHOWN = 80
_QUIET_SECONDS = 1.0  # after the opening
_LAST_SECONDS = 2.0  # for which a run that ends waits


def write_start(attempt: RunAttempt, config: dict[str, Any]) -> None:
    """Write the record of this attempt."""
    layout, number = attempt.layout, attempt.number
    facts = _facts(str(layout.folder), attempt.size, config)
    write_json(layout.start(number), facts, durable=False)
    if sys.platform != "linux":  # there is no keeper that would do it
        from holdfast._keeper.start_facts import complete_start

        complete_start(layout, number)


def line_of_changes(attempt: RunAttempt, before: int) -> str:
    """What differs from the start of the attempt that this one goes on from."""
    layout = attempt.layout
    changes = find_changes(*(read_json(layout.start(n)) for n in (before, attempt.number)))
    if not changes:
        return ""
    return (
        f"changed since attempt {before}: {', '.join(changes)}. "
        "After such a change the result may differ."
    )


class LateLines:
    """Writes the record of an attempt, and says lines that take long to find, in threads.

    To find them competes with the trainer for the interpreter. So it begins when the run is open
    and its first snapshot should be over.
    """

    def __init__(self) -> None:
        self.finders: list[Callable[[], str]] = []
        self._is_ending = threading.Event()
        self._writing: threading.Thread | None = None
        self._finding: threading.Thread | None = None

    def write(self, work: Callable[[], None]) -> None:
        def write() -> None:
            with contextlib.suppress(Exception):  # no run fails because of it
                work()

        self._writing = start_thread(write, name="holdfast-record")

    def begin(self) -> None:
        if self._finding is None and self.finders:
            self._finding = start_thread(self._find, name="holdfast-lines")

    def finish(self) -> None:
        self._is_ending.set()
        for thread in (self._writing, self._finding):
            if thread is not None:
                thread.join(_LAST_SECONDS)

    def _find(self) -> None:
        self._is_ending.wait(_QUIET_SECONDS)
        if self._writing is not None:
            self._writing.join()
        for find in self.finders:
            with contextlib.suppress(Exception):
                if line := find():
                    say(line)


def _facts(run_folder: str, ranks: int, config: dict[str, Any]) -> dict[str, Any]:
    # Here, since they take long to import.
    from holdfast._environment.git import find_repository, read_commit
    from holdfast._environment.secrets import redact_tree, redact_variables, redact_words
    from holdfast._environment.started import (
        find_start,
        own_command,
        own_folder,
        package_versions,
        relevant,
    )

    environment = variables.whole_at_start()
    start = find_start(environment)
    command, words = own_command(), _bounded(redact_words(start.command))
    known, hidden = redact_variables(relevant(environment))
    # Also those that are not recorded: a script may need them.
    _, secrets = redact_variables({n: v for n, v in environment.items() if n not in known})
    shortest = sorted(known.items(), key=lambda item: len(item[1]))
    folder = own_folder(command)
    work_tree = find_repository(Path(folder)) if folder else None
    commit = None if work_tree is None else read_commit(work_tree)
    job = find_job(environment)
    return {
        "command": _bounded(redact_words(command)).words,
        "cwd": folder,
        "environment": dict(sorted(_first_that_fit(shortest, lambda item: sum(map(len, item))))),
        "host": host_name(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "git": {} if commit is None else {"commit": commit, "folder": str(work_tree)},
        "config": redact_tree(config),
        "launcher": start.launcher,
        "folder": run_folder,
        "ranks": ranks,
        "job": None if job is None else job.id,
        "start": {
            "command": words.words,
            "left_out": words.left_out,
            "cwd": start.cwd,
            "process": asdict(of_process(start.pid)),
        },
        "left_out": sorted({*hidden, *secrets})[:_MOST_NAMES],
    }


def _bounded(words: Redacted) -> Redacted:
    from holdfast._environment.secrets import Redacted

    kept = _first_that_fit(words.words, len)
    count = len(words.words) - len(kept)
    if not count:
        return words
    return Redacted(kept, [*words.left_out, f"the last {count} words, since the command is long"])


def _first_that_fit(items: list[_Item], size_of: Callable[[_Item], int]) -> list[_Item]:
    sizes = itertools.accumulate(map(size_of, items))
    return items[: sum(size <= _MOST_BYTES for size in sizes)]


def find_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The command, the commit, and the versions that two records do not share."""
    found: list[str] = []
    words = _script_and_arguments(old), _script_and_arguments(new)
    # A kernel and a worker of Ray have other numbers in their commands at each start.
    is_own = not {old.get("launcher"), new.get("launcher")} & {"interactive", "ray"}
    if is_own and words[0] and words[1] and words[0] != words[1]:
        found.append(f"the command ({_difference(*words)})")
    commits = [text(record_in(each.get("git")).get("commit")) for each in (old, new)]
    if all(commits) and commits[0] != commits[1]:
        found.append(f"the commit {commits[0][:10]} → {commits[1][:10]}")
    if (was := text(old.get("python"))) != (now := text(new.get("python"))) and was:
        found.append(f"Python {was} → {now}")
    packages = record_in(old.get("packages")), record_in(new.get("packages"))
    for name in packages[0].keys() & packages[1].keys():
        if packages[0][name] != packages[1][name]:
            found.append(f"{name} {packages[0][name]} → {packages[1][name]}")
    return found


def _script_and_arguments(record: dict[str, Any]) -> list[str]:
    """The words after the interpreter, with the script by its whole path.

    Options of the interpreter that change no result are left out.
    """
    command, folder = record.get("command"), text(record.get("cwd"))
    words = [str(word) for word in command[1:]] if isinstance(command, list) else []
    while words and words[0] in ("-u", "-B", "-q", "-v"):
        del words[0]
    for at, word in enumerate(words):
        if word == "-m":
            break
        if not word.startswith("-"):
            return [*words[:at], os.path.normpath(PurePath(folder, word)), *words[at + 1 :]]
    return words


def _difference(old: list[str], new: list[str]) -> str:
    """The words in the middle that differ, with the option that they belong to."""
    # Of lists it compares the items.
    first = len(os.path.commonprefix([old, new]))  # noqa: RUF071
    last = len(os.path.commonprefix([old[first:][::-1], new[first:][::-1]]))  # noqa: RUF071
    if first and old[first - 1].startswith("-"):
        first -= 1
    shown = [shlex.join(words[first : len(words) - last]) for words in (old, new)]
    before, now = (cut(text, _MOST_SHOWN) for text in shown)
    if before and now:
        return f"{before} → {now}"
    return f"new: {now}" if now else f"gone: {before}"


# -- The hyperparameters that `Run(config=…)` was given, as JSON values of a bounded size ----------
# Secrets are still in them: they are left out when the record is written.


_MOST_ITEMS = 2000  # of all levels together
_MOST_DEPTH = 8
_MOST_TEXT = 2000
_MOST_REPR = 200
_STATEFUL = ("state_dict", "load_state_dict", "get_state", "set_state", "parameters")


def checked_config(config: object) -> dict[str, Any]:
    """The values by name; SettingsError if it is state, or nothing that has names.

    Values of other types than numbers, texts, booleans, lists and dicts are recorded by their repr.
    """
    if config is None:
        return {}
    values = _by_name(config)
    if not isinstance(values, Mapping):
        raise SettingsError(
            f"config is a {type(config).__name__}: config has the hyperparameters of the run, "
            "and is never restored.\nGive a dict, a dataclass or an argparse namespace. State has "
            "any other name: holdfast.Run(folder, model=model)"
        )
    for name, value in values.items():
        is_array = hasattr(value, "dtype") and getattr(value, "shape", ()) != ()
        has_state = any(callable(getattr(value, method, None)) for method in _STATEFUL)
        if not isinstance(value, type) and (is_array or has_state):
            raise SettingsError(
                f"config[{name!r}] is a {type(value).__name__}: config has the hyperparameters, "
                "and is never restored.\nGive state by its own name: "
                f"holdfast.Run(folder, {name}=…)"
            )
    found: dict[str, Any] = _record(values, 0, [_MOST_ITEMS])
    return found


def _by_name(value: object) -> object:
    """A namespace or a dataclass as a dict, without copies of its values; all else as it is."""
    argparse = sys.modules.get("argparse")  # a namespace of it exists only where it is imported
    if isinstance(value, types.SimpleNamespace) or (
        argparse is not None and isinstance(value, argparse.Namespace)
    ):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
    return value


def _record(value: Any, depth: int, left: list[int]) -> Any:
    """As JSON values; `left` counts what is recorded: a config may hold a whole data set."""
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return value if abs(value) < 1 << 53 else str(value)[:_MOST_REPR]
    if type(value) is float:
        return value if math.isfinite(value) else repr(value)
    if type(value) is str:
        return cut(value, _MOST_TEXT)
    value = _by_name(value) if depth < _MOST_DEPTH else value
    has_names, is_list = isinstance(value, Mapping), isinstance(value, Sequence | Set)
    is_text = isinstance(value, bytes | bytearray | str)
    if depth == _MOST_DEPTH or is_text or not (has_names or is_list):
        return _describe(value)
    found: dict[str, Any] = {}
    for number, (key, each) in enumerate(value.items() if has_names else enumerate(value)):
        if left[0] <= 0:
            found["…"] = f"{len(value) - number} more"
            break
        left[0] -= 1
        found[cut(str(key), _MOST_REPR)] = _record(each, depth + 1, left)
    if has_names:
        return found
    return [each if key != "…" else f"… {each}" for key, each in found.items()]


def _describe(value: object) -> Any:
    """A scalar of NumPy or of a framework as its number, anything else by its repr."""
    try:
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            number = value.item()
            if isinstance(number, bool) or (isinstance(number, int | float) and number == number):
                return number
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        return cut(repr(value), _MOST_REPR)
    except Exception:  # noqa: BLE001  a repr of the user must not fail the run
        return f"<{type(value).__name__}>"
