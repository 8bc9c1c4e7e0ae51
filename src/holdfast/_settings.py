"""Settings: what a user may choose, checked at once."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast._errors import SettingsError, install_command
from holdfast._text import speak_plainly

_UNITS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\s*")
_METRIC = re.compile(r"(min|max):([A-Za-z_][A-Za-z0-9_./-]*)")
NOTICES = ("auto", "aws", "gcp", "azure", "off")
_KEEP_MEMORY_SECONDS = 300.0
_SIGNALS = ("INT", "TERM", "HUP", "USR1", "USR2", "QUIT", "BREAK")


def parse_seconds(text: str, setting: str) -> float:
    """Seconds in a duration such as "5min" or "1.5 h".

    >>> parse_seconds("5min", "checkpoint_every")
    300.0
    """
    match = _DURATION.fullmatch(text.lower())
    if match is None or match[2] not in _UNITS:
        raise SettingsError(
            f"{setting}={text!r} is not a duration.\n"
            f"Write a number and a unit ({', '.join(_UNITS)}), for example '5min'."
        )
    return float(match[1]) * _UNITS[match[2]]


def parse_bytes(text: str, setting: str) -> int:
    """Bytes in a size such as "8GB" or "512 MiB".

    >>> parse_bytes("8GB", "memory")
    8000000000
    """
    match = _SIZE.fullmatch(text.lower())
    if match is None:
        raise SettingsError(
            f"{setting}={text!r} is not a size.\n"
            "Write a number and a unit (KB, MB, GB, TB, or KiB and so on), for example '8GB'."
        )
    unit = 1024 if match[3] else 1000
    return int(float(match[1]) * unit ** " kmgt".index(match[2] or " "))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run keeps itself; the defaults suit most.

    A new setting needs a field and a check here, a row in docs/reference.md in the same order, and
    cases in tests/unit/test_settings.py; for the keeper also `Policy` in `_store/commit/write.py`.

    >>> Settings(keep_best="min:val_loss", checkpoint_every="10min").keep_last
    3
    """

    keep_last: int = 3
    keep_best: str | None = None
    checkpoint_every: str | int = "5min"
    max_overhead: float = 0.01
    memory: str | int | float | None = None
    signals: tuple[str, ...] = _SIGNALS
    grace_seconds: float | None = None
    requeue_limit: int = 3
    hang_timeout: float | str | None = None
    mirror: str | os.PathLike[str] | None = None
    mirror_keep_last: int = 3
    mirror_wait: bool = False
    notices: str = "auto"
    keep_memory: float | str | None = None

    def __new__(cls, **chosen: object) -> Settings:
        unknown = [name for name in chosen if name not in cls.__dataclass_fields__]
        if unknown:
            import difflib  # only for a misspelt name

            speak_plainly()
            near = difflib.get_close_matches(unknown[0], cls.__dataclass_fields__, n=1)
            valid = f"Valid: {', '.join(cls.__dataclass_fields__)}."
            raise SettingsError(
                f"holdfast.Settings has no {unknown[0]}.\n"
                + (f"Did you mean {near[0]}?" if near else valid)
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        speak_plainly()
        if not isinstance(self.keep_last, int) or isinstance(self.keep_last, bool):
            raise SettingsError(f"keep_last={self.keep_last!r} is not a whole number, 1 or more.")
        if self.keep_last < 1:
            raise SettingsError(
                f"keep_last={self.keep_last} would keep nothing to resume from.\n"
                "Valid: a whole number, 1 or more."
            )
        if self.keep_best is not None and (
            not isinstance(self.keep_best, str) or _METRIC.fullmatch(self.keep_best) is None
        ):
            raise SettingsError(
                f"keep_best={self.keep_best!r} names no metric.\n"
                "Valid: None, 'min:NAME' or 'max:NAME', with a name given to run.log(), "
                "for example 'min:val_loss'."
            )
        self._check_checkpoint_every()
        if not _is_number(self.max_overhead) or not 0 <= self.max_overhead <= 1:
            raise SettingsError(
                f"max_overhead={self.max_overhead!r} is not a share of the run time.\n"
                "Valid: a number from 0 (no snapshots) to 1, for example 0.01."
            )
        self._check_memory()
        if self.grace_seconds is not None and (
            not _is_number(self.grace_seconds) or self.grace_seconds <= 0
        ):
            raise SettingsError(
                f"grace_seconds={self.grace_seconds!r} is not a time.\n"
                "Valid: None (10 s for SIGTERM, none for Ctrl-C) or a number of seconds above 0."
            )
        check_count(self.requeue_limit, f"requeue_limit={self.requeue_limit!r}", least=0)
        learned = "learned from the run's own steps), seconds above 0, or a duration such as '5min'"
        self._check_time("hang_timeout", sys.float_info.min, learned)
        kept = "5 minutes), 0 (not at all), seconds, or a duration such as '10min'"
        self._check_time("keep_memory", 0.0, kept)
        self._check_mirror()
        if self.notices not in NOTICES:
            raise SettingsError(
                f"notices={self.notices!r} is not a cloud that holdfast knows.\n"
                f"Valid: {', '.join(map(repr, NOTICES))}."
            )
        self._check_signals()

    def _check_checkpoint_every(self) -> None:
        every = self.checkpoint_every
        if isinstance(every, str):
            if self.is_auto or parse_seconds(every, "checkpoint_every") > 0:
                return
        elif isinstance(every, int) and not isinstance(every, bool) and every >= 1:
            return
        raise SettingsError(
            f"checkpoint_every={every!r} is neither a time nor a number of steps.\n"
            "Valid: 'auto', a duration such as '5min', or a number of steps, 1 or more."
        )

    def _check_memory(self) -> None:
        found = self.memory
        if found is None or (isinstance(found, str) and parse_bytes(found, "memory") > 0):
            return
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return
        if isinstance(found, float) and 0 < found <= 1:
            return
        raise SettingsError(
            f"memory={found!r} is not an amount of memory.\n"
            "Valid: None, a size such as '8GB', a number of bytes, or a fraction such as 0.25."
        )

    def _check_time(self, name: str, least: float, valid: str) -> None:
        """None, a duration or a number of seconds that is not below `least`."""
        found = getattr(self, name)
        seconds = parse_seconds(found, name) if isinstance(found, str) else found
        if seconds is not None and not (_is_number(seconds) and seconds >= least):
            raise SettingsError(f"{name}={found!r} is not a time.\nValid: None ({valid}.")

    def _check_mirror(self) -> None:
        found = self.mirror
        if found is not None and (not isinstance(found, str | os.PathLike) or not str(found)):
            raise SettingsError(
                f"mirror={found!r} is not a place to copy checkpoints to.\n"
                "Valid: None, a folder, or an address of fsspec such as 's3://bucket/run'."
            )
        check_count(self.mirror_keep_last, f"mirror_keep_last={self.mirror_keep_last!r}", least=1)
        if not isinstance(self.mirror_wait, bool):
            raise SettingsError(f"mirror_wait={self.mirror_wait!r} is neither True nor False.")
        if found is not None:
            _check_address(os.fspath(found))

    def _check_signals(self) -> None:
        names = self.signals
        if not isinstance(names, tuple | list) or not all(isinstance(n, str) for n in names):
            raise SettingsError(
                f"signals={names!r} is not a tuple of names.\nValid: some of {', '.join(_SIGNALS)}."
            )
        tidy = tuple(name.upper().removeprefix("SIG") for name in names)
        unknown = [name for name in tidy if name not in _SIGNALS]
        if unknown:
            raise SettingsError(
                f"signals={tuple(names)!r}: {unknown[0]} is not one that a run can answer.\n"
                f"Valid: some of {', '.join(_SIGNALS)}."
            )
        object.__setattr__(self, "signals", tidy)

    @property
    def is_auto(self) -> bool:
        """Whether the run finds the time between checkpoints by itself."""
        every = self.checkpoint_every
        return isinstance(every, str) and every.strip().lower() == "auto"

    @property
    def checkpoint_seconds(self) -> float | None:
        """The time between checkpoints, or None when they are counted in steps or found."""
        if isinstance(self.checkpoint_every, int) or self.is_auto:
            return None
        return parse_seconds(self.checkpoint_every, "checkpoint_every")

    def memory_bytes(self, total: Callable[[], int]) -> int | None:
        """What snapshots may take; `total` gives the memory that a fraction is a part of."""
        if isinstance(self.memory, str):
            return parse_bytes(self.memory, "memory")
        if isinstance(self.memory, float):
            return int(self.memory * total())
        return self.memory

    @property
    def hang_seconds(self) -> float | None:
        """How long a step may take before it counts as stuck; None: learned."""
        if isinstance(self.hang_timeout, str):
            return parse_seconds(self.hang_timeout, "hang_timeout")
        return self.hang_timeout

    @property
    def keep_memory_seconds(self) -> float:
        """How long the memory of a dead attempt waits for the next one."""
        if isinstance(self.keep_memory, str):
            return parse_seconds(self.keep_memory, "keep_memory")
        return _KEEP_MEMORY_SECONDS if self.keep_memory is None else float(self.keep_memory)

    @property
    def mirror_address(self) -> str | None:
        """The mirror as other processes know it; a folder from the root on."""
        if self.mirror is None:
            return None
        text = os.fspath(self.mirror)
        is_address = "://" in text or "::" in text
        return text.rstrip("/") if is_address else str(Path(text).expanduser().absolute())

    @property
    def checkpoint_steps(self) -> int | None:
        """The steps between checkpoints, or None when they are timed."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None

    @property
    def best_metric(self) -> tuple[str, str] | None:
        """("min" or "max", metric) of keep_best."""
        if self.keep_best is None:
            return None
        mode, _, metric = self.keep_best.partition(":")
        return mode, metric

    @property
    def signal_numbers(self) -> tuple[int, ...]:
        """The numbers of those signals that this system has."""
        found = (getattr(signal, f"SIG{name}", None) for name in self.signals)
        return tuple(int(number) for number in found if number is not None)


# What fsspec needs for the addresses that most have; the others it names by itself.
_FOR_ADDRESS = {
    **dict.fromkeys(("s3", "s3a"), ("s3fs", install_command("s3"))),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "pip install gcsfs")),
    **dict.fromkeys(("az", "abfs", "abfss"), ("adlfs", "pip install adlfs")),
}


def _check_address(text: str) -> None:
    """Refuse at once what only another process would find, and too late."""
    protocol, sep, rest = text.partition("://")
    if not sep and re.match(r"[a-z][a-z0-9]+:", text) and "::" not in text:
        raise SettingsError(
            f"mirror={text!r} is neither a folder nor an address.\n"
            "An address has two slashes: s3://bucket/run. A folder of that name: ./ before it."
        )
    if not sep or protocol == "file":
        return
    if ":" in rest.partition("@")[0].partition("/")[0] and "@" in rest:
        raise SettingsError(
            "mirror: there is a password in this address, which would be in every log.\n"
            "Leave it out, and give credentials by the environment or the store's own files."
        )
    import importlib.util  # only where there is a mirror

    package, install = _FOR_ADDRESS.get(protocol, ("fsspec", install_command("mirror")))
    for needed in ("fsspec", package):
        if importlib.util.find_spec(needed) is None:
            raise SettingsError(
                f"mirror={text!r} needs {needed}, which is not installed here.\n"
                f"Install it: {install}"
            )


def check_count(value: object, what: str, least: int) -> None:
    """Refuse what is no whole number, or too small a one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingsError(f"{what}: this is a whole number, {least} or more.")


def checked(settings: object, state: Mapping[str, object]) -> Settings:
    """What a run was given as its settings, or the defaults; `state`: its other arguments."""
    for name in Settings.__dataclass_fields__.keys() & state.keys():
        if not isinstance(state[name], str | int | float | None):
            continue  # tensors and the like are state by any name
        raise SettingsError(
            f"{name} is the name of a setting, and was given as state of the run.\n"
            f"Write: settings=holdfast.Settings({name}=…)"
        )
    if settings is None:
        return Settings()
    if not isinstance(settings, Settings):
        raise SettingsError(
            f"settings={settings!r} is a {type(settings).__name__}.\n"
            "Valid: holdfast.Settings(…), or None for the defaults."
        )
    return settings
