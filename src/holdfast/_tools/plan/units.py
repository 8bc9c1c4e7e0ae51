"""Durations, sizes and shares as people write and read them; a year has 365 days."""

from __future__ import annotations

import itertools
import math
import re

from holdfast._errors import SettingsError

_DURATIONS = {
    "ms": 0.001, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0,
    "w": 604_800.0, "y": 31_536_000.0,
}  # fmt: skip
_SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
_SIZES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_WRITTEN = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-z%/]*)\s*", re.I)
_SHOWN = (("s", 1), ("min", 60), ("h", 3600), ("d", 86_400), ("years", 31_536_000))
# Intervals as people choose them, and as checkpoint_every takes them.
_ROUND_SECONDS = [
    *(1, 2, 3, 5, 7, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 420, 600, 900, 1200, 1800),
    *(2700, 3600, 5400, 7200, 10_800, 14_400, 21_600, 28_800, 43_200, 86_400),
]


def parse_duration(text: str, option: str, *, may_be_zero: bool = False) -> float:
    """Seconds in "5y", "30d" or "90 s".

    >>> parse_duration("2h", "--over")
    7200.0
    """
    return _parse(text, option, _DURATIONS, "'90s', '30d' or '5y'", may_be_zero=may_be_zero)


def parse_size(text: str, option: str, *, per_second: bool = False) -> float:
    """Bytes in "20GB" or "1.5 TiB"; with `per_second` also in "20GB/s".

    >>> parse_size("20GB", "--state-size"), parse_size("2 tb/s", "--x", per_second=True)
    (20000000000.0, 2000000000000.0)
    """
    units = _SIZES | ({f"{name}/s": size for name, size in _SIZES.items()} if per_second else {})
    return _parse(text, option, units, "'20GB/s'" if per_second else "'20GB'")


def parse_share(text: str, option: str) -> float:
    """A share of all: "0.8" or "80%".

    >>> parse_share("80%", "--notice-share"), parse_share("0.8", "--notice-share")
    (0.8, 0.8)
    """
    valid = "a number from 0 to 1, or '0%' to '100%'"
    # Not by a factor of 0.01: a share is to be equal to the same one without a percent sign.
    share = _read(text, option, {"": 1.0, "%": 1.0}, valid) / (100 if "%" in text else 1)
    if not 0 <= share <= 1:
        raise SettingsError(f"{option} {text}: this is not a share of all.\nValid: {valid}.")
    return share


def _parse(
    text: str, option: str, units: dict[str, float], example: str, *, may_be_zero: bool = False
) -> float:
    names = ", ".join(name for name in units if "/" not in name)
    valid = f"a number and a unit ({names}), for example {example}"
    value = _read(text, option, units, valid)
    if not (0 < value < math.inf or (value == 0 and may_be_zero)):
        least = "0 or more" if may_be_zero else "more than 0"
        raise SettingsError(f"{option} {text}: this must be {least}.\nValid: {valid}.")
    return value


def _read(text: str, option: str, units: dict[str, float], valid: str) -> float:
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise SettingsError(f"{option} {text!r}: this is not a number.\nValid: {valid}.")
    factor = {name.lower(): factor for name, factor in units.items()}.get(match[2].lower())
    if factor is None:
        lack = f"the unit {match[2]!r} is unknown" if match[2] else "the unit is missing"
        raise SettingsError(f"{option} {text}: {lack}.\nValid: {valid}.")
    return float(match[1]) * factor


def round_interval(seconds: float, least: float = 0.0) -> float:
    """The nearest interval that people write down, and not below the least.

    >>> round_interval(293.4), round_interval(70_000.0)
    (300.0, 86400.0)
    """
    choices = [each for each in _ROUND_SECONDS if each >= least] or [math.ceil(least)]
    return float(min(choices, key=lambda each: abs(math.log(each / seconds))))


def as_setting(seconds: float) -> str:
    """An interval as checkpoint_every takes it.

    >>> as_setting(300.0), as_setting(90.0), as_setting(7200.0)
    ('5min', '90s', '2h')
    """
    for unit, factor in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= factor and seconds % factor == 0:
            return f"{seconds / factor:.0f}{unit}"
    return f"{seconds:g}s"


def shown(seconds: float) -> str:
    """A time in two or three digits and the unit that fits.

    >>> shown(0.042), shown(47.31), shown(300.0), shown(8000.0), shown(1e9)
    ('42 ms', '47 s', '5 min', '2.2 h', '31.7 years')
    """
    if math.isinf(seconds):
        return "never"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    for (unit, factor), (_, larger) in itertools.pairwise(_SHOWN):
        # 90 s is easier to read than 1.5 min.
        if seconds < 0.999 * larger or (seconds < 1.99 * larger and seconds > 1.01 * larger):
            value = seconds / factor
            digits = f"{value:.1f}".removesuffix(".0") if value < 9.95 else f"{value:.0f}"
            return f"{digits} {unit}"
    return f"{seconds / 31_536_000:.1f} years"
