"""Where `holdfast run` records what it observes, whether the command uses holdfast or not.

led/20250102-030405-node1-4711/    one supervision, by its beginning, host and process
  life-0001/                       one start of the command
    led.json  output.log           its process, how it ended, and what it printed
    run.json                       written by a run that opened in it: its folder and attempt
    hang.json                      by its keeper: that it hangs, and why
    death.json                     by its keeper: that it has died, and the keeper still saves
    modules.json                   by a run for which there will be a spare: what it has imported

The last four are how a process of the command tells the supervisor about itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._store.folder.atomic import create_atomic, write_atomic
from holdfast._store.folder.plain_file import read_plain
from holdfast._store.format.schema import parse_record

_DEATH = "death.json"
_KEPT = 50
_KEPT_OF_OTHERS_SECONDS = 60 * 86400.0
_NEWEST, _NEWEST_LIVES = 30, 3  # supervisions and lives among which a run is looked for
_NAME = re.compile(r"\d{8}-\d{6}-.*-\d+")
_LIFE = re.compile(r"life-\d{4,}")


def led_places() -> list[Path]:
    """The folders of supervisions: the usual one, and the fallback."""
    usual = variables.state_folder()
    return [*([Path(usual, "led")] if usual else []), _spare().joinpath("led")]


def led_folder() -> Path | None:
    """Make a private folder for this process's supervision; None if that is not possible."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.uname().nodename}-{os.getpid()}"
    for place in led_places():
        with contextlib.suppress(OSError):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if place.parent == _spare() and not _is_private(_spare()):
                continue
            place.mkdir(mode=0o700, exist_ok=True)
            folder = place / name
            folder.mkdir(mode=0o700, exist_ok=True)
            if not _has_room(folder):
                folder.rmdir()
                continue
            _forget_old(place, name)
            return folder
    return None


def life_folder(supervision: Path, life: int) -> Path:
    return supervision / f"life-{life:04d}"


def supervisions() -> list[Path]:
    """All supervisions of this machine, oldest first."""
    found: list[Path] = []
    for place in led_places():
        found += _noted(place)
    return sorted(found, key=lambda path: path.name)


def lives(supervision: Path) -> list[Path]:
    """The starts in one of them, oldest first."""
    with contextlib.suppress(OSError):
        return sorted(each for each in supervision.iterdir() if _LIFE.fullmatch(each.name))
    return []


def led_record(life: Path) -> Path:
    return life / "led.json"


def led_output(life: Path) -> Path:
    return life / "output.log"


def led_outputs(folder: Path, attempt: int) -> Iterator[Path]:
    """The output of the command that opened this attempt of a run, where this machine led it."""
    here = folder.resolve()
    for supervision in reversed(supervisions()[-_NEWEST:]):
        for life in reversed(lives(supervision)[-_NEWEST_LIVES:]):
            for run in read_runs(life):
                if run.get("attempt") == attempt and Path(run["folder"]).resolve() == here:
                    yield led_output(life)


def led_hang(life: Path) -> Path:
    return life / "hang.json"


def led_modules(life: Path) -> Path:
    return life / "modules.json"


def write_led(path: Path, record: dict[str, Any]) -> None:
    """Replace a record, without a flush to the disk."""
    write_atomic(path, _encode(record), durable=False)


def _encode(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return parse_record(read_plain(path))
    return {}


def read_runs(life: Path) -> list[dict[str, Any]]:
    """The runs that opened in a start of the command; the first rank first."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        found = [*map(_read, sorted(life.glob("run*.json")))]
    found = [run for run in found if isinstance(run.get("folder"), str)]
    return sorted(found, key=lambda run: run["rank"] if isinstance(run.get("rank"), int) else 0)


# -- What a process under `holdfast run` tells the supervisor --------------------------------------


def tell_leader(place: Path, folder: Path, attempt: int, rank: int) -> None:
    """Record the run that this process has opened; of several ranks the first."""
    mine: dict[str, Any] = {
        "folder": str(folder.absolute()),
        "attempt": attempt,
        "rank": rank,
        "pid": os.getpid(),
    }
    path = place / "run.json"
    with contextlib.suppress(OSError):
        if create_atomic(path, _encode(mine)):
            return
        there = next(iter(read_runs(place)), {})
        is_same_life = all(there.get(key) == mine[key] for key in ("folder", "attempt"))
        other = there.get("rank")
        if not is_same_life or not isinstance(other, int) or other > rank:
            write_led(path, mine)


def tell_leader_of_modules(place: Path) -> None:
    """Record what is imported, in the order of the imports and from where, for a spare."""
    specs = ((name, getattr(each, "__spec__", None)) for name, each in list(sys.modules.items()))
    # An alias, such as os.path, cannot be imported under its own name.
    known = {name: spec for name, spec in specs if spec is not None and spec.name == name}
    origins = {name: getattr(each, "origin", None) for name, each in known.items()}
    # A loader of the script may give something that is no text.
    files = {name: each for name, each in origins.items() if "." not in name and type(each) is str}
    changed = variables.changed_since_start()
    record = {"modules": list(known), "files": files, "environment": changed}
    with contextlib.suppress(OSError):
        write_led(led_modules(place), record)


def tell_leader_of_hang(place: Path, hang: dict[str, Any]) -> None:
    """The same for each change of a hang: found, over, or not to be killed.

    The supervisor does not read the run's folder: that may be on the file system that does not
    answer, and then the supervisor would hang too.
    """
    kept = {key: value for key, value in hang.items() if key != "looks"}
    with contextlib.suppress(OSError):
        write_led(led_hang(place), kept)


def tell_leader_of_death(place: Path, pid: int, attempt: int) -> None:
    """Record that this trainer is dead, and that its death is on record in the run's folder.

    The keeper still makes the last state durable. The next attempt waits for that by itself, so the
    supervisor need not.
    """
    with contextlib.suppress(OSError):
        write_led(place / _DEATH, {"pid": pid, "attempt": attempt})


def is_death_recorded(life: Path) -> bool:
    """Whether it is that of the run that opened last in this life: others may have died before."""
    death = _read(life / _DEATH)
    runs = read_runs(life)[:1] if death else []
    return bool(runs) and all(runs[0].get(key) == death.get(key) for key in ("pid", "attempt"))


# -- Folders ---------------------------------------------------------------------------------------


def _spare() -> Path:
    return Path("/tmp", f"holdfast-{os.getuid() if hasattr(os, 'getuid') else 0}")


def _is_private(folder: Path) -> bool:
    """Whether no other user could have made it."""
    status = folder.lstat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _has_room(folder: Path) -> bool:
    """On a full disk a folder can be made, but no file in it."""
    probe = folder / "room"
    with contextlib.suppress(OSError):
        probe.write_bytes(bytes(4096))
        probe.unlink()
        return True
    with contextlib.suppress(OSError):
        probe.unlink()
    return False


def _noted(place: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [each for each in place.iterdir() if _NAME.fullmatch(each.name)]
    return []


def _forget_old(place: Path, mine: str) -> None:
    # If machines share the folder, supervisions of others may still run: their machines remove
    # them. Some machines never come back, like containers.
    names = sorted(each.name for each in _noted(place))
    long_ago = time.strftime("%Y%m%d", time.localtime(time.time() - _KEPT_OF_OTHERS_SECONDS))
    for old in names:
        if _host_of(old) != _host_of(mine) and old < long_ago:
            _remove(place / old)
    for old in [name for name in names if _host_of(name) == _host_of(mine)][:-_KEPT]:
        # The pid is in the name; the first process of a container always has the same one.
        pid = old.rpartition("-")[2]
        if not Path("/proc", pid).exists() or (pid == str(os.getpid()) and old != mine):
            _remove(place / old)


def _host_of(name: str) -> str:
    return name.split("-", 2)[2].rpartition("-")[0]


def _remove(folder: Path) -> None:
    # Not by shutil, which takes long to import: every start passes here.
    with contextlib.suppress(OSError):
        for life in folder.iterdir():
            for file in life.iterdir():
                file.unlink()
            life.rmdir()
        folder.rmdir()
