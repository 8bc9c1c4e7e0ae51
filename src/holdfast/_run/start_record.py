"""start.json: how an attempt was started, and what has changed since the attempt before it.

Rank 0 writes it, in a thread: the opening of a run must not wait for it. What takes longer is added
by the keeper: see `_keeper/start_facts.py`. No run fails because of this record.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
import threading
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name, of_process
from holdfast._environment.slurm.job import find_job
from holdfast._run.attempt import RunAttempt
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._text import record as record_in
from holdfast._text import say, text

if TYPE_CHECKING:
    from holdfast._environment.secrets import Redacted

_MOST_BYTES = 64 << 10  # of a command, or of all variables
_MOST_NAMES = 100
_MOST_SHOWN = 80
_PATIENCE_SECONDS = 0.02  # so that the line mostly follows the one that it belongs to


class StartRecord:
    """Writes the record of one attempt, and says what differs from an earlier one."""

    def __init__(self, attempt: RunAttempt, config: dict[str, Any]) -> None:
        self._layout, self._number = attempt.layout, attempt.number
        self._ranks = attempt.size
        self._config = config
        self._before: int | None = None
        self._may_speak = threading.Event()
        self._thread: threading.Thread | None = None
        if attempt.rank == 0:
            with contextlib.suppress(RuntimeError):  # no thread can be started
                thread = threading.Thread(target=self._work, name="holdfast-record", daemon=True)
                thread.start()
                self._thread = thread

    def say_changes(self, before: int | None) -> None:
        """Say them, now or as soon as they are known; `before` is the attempt it goes on from."""
        self._before = before
        self._may_speak.set()
        if self._thread is not None and before is not None:
            self._thread.join(_PATIENCE_SECONDS)

    def close(self) -> None:
        """The run could not be opened: the thread waits for nothing any more."""
        self._may_speak.set()

    def _work(self) -> None:
        with contextlib.suppress(Exception):  # no run fails because of it
            facts = _facts(str(self._layout.folder), self._ranks, self._config)
            write_json(self._layout.start(self._number), facts, durable=False)
            if sys.platform != "linux":  # there is no keeper that would do it
                from holdfast._keeper.start_facts import complete_start

                complete_start(self._layout, self._number)
            if self._may_speak.wait(600) and self._before is not None:
                changes = find_changes(read_json(self._layout.start(self._before)), facts)
                if changes:
                    say(
                        f"changed since attempt {self._before}: {', '.join(changes)}. "
                        "The same bits are not promised across such a change."
                    )


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
    folder = own_folder(command)
    work_tree = find_repository(Path(folder)) if folder else None
    commit = None if work_tree is None else read_commit(work_tree)
    job = find_job(environment)
    return {
        "command": _bounded(redact_words(command)).words,
        "cwd": folder,
        "environment": _bounded_variables(known),
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

    if sum(map(len, words.words)) <= _MOST_BYTES:
        return words
    kept: list[str] = []
    size = 0
    for word in words.words:
        size += len(word)
        if size > _MOST_BYTES:
            break
        kept.append(word)
    count = len(words.words) - len(kept)
    return Redacted(kept, [*words.left_out, f"the last {count} words, since the command is long"])


def _bounded_variables(known: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    left = _MOST_BYTES
    for name, value in sorted(known.items(), key=lambda item: len(item[1])):
        left -= len(name) + len(value)
        if left < 0:
            break
        found[name] = value
    return dict(sorted(found.items()))


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
    """The words after the interpreter, with the script by its whole path."""
    command, folder = record.get("command"), text(record.get("cwd"))
    words = [str(word) for word in command[1:]] if isinstance(command, list) else []
    for at, word in enumerate(words):
        if word == "-m":
            break
        if not word.startswith("-"):
            path = word if PurePath(word).is_absolute() else os.path.join(folder, word)  # noqa: PTH118
            return [*words[:at], os.path.normpath(path), *words[at + 1 :]]
    return words


def _difference(old: list[str], new: list[str]) -> str:
    """The words in the middle that differ, with the option that they belong to."""
    first = 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    if first and old[first - 1].startswith("-"):
        first -= 1
    shown = []
    for words in (old, new):
        text = shlex.join(words[first : len(words) - last]) or "nothing"
        shown.append(text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…")
    return " → ".join(shown)
