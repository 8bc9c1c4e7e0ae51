"""`--hang-timeout`: how long a command may stand still, as it was given."""

from __future__ import annotations

import math

AUTO = "auto"
# Of what nobody has measured yet: the first step of a run, or all of a command without one.
_UNKNOWN_SECONDS = 1800.0
# For what may take longer than a step: phases, the first step, ranks that wait for each other.
_LONGER = 10.0


class Timeout:
    """How long it may be until something counts as a hang; learned by the run where it is auto."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    @classmethod
    def parse(cls, text: str) -> Timeout:
        """Of "auto", "90" or "5min"; ValueError says what is wrong with any other."""
        text = text.strip()
        if text == AUTO:
            return cls(None)
        try:
            seconds = float(text)
        except ValueError:
            seconds = _duration(text)
        if not math.isfinite(seconds) or seconds <= 0:
            raise ValueError(f"{text!r} is no time above 0")
        return cls(seconds)

    @property
    def how(self) -> str:
        """Where it comes from, as hang.json has it."""
        return "learned" if self.seconds is None else "given"

    def for_child(self) -> str:
        """As the keeper of a run reads it."""
        return AUTO if self.seconds is None else f"{self.seconds:g}"

    def without_run(self, *, has_ranks: bool) -> float:
        """For a command of which nothing is known but what it prints and what it uses."""
        if self.seconds is None:
            return _UNKNOWN_SECONDS
        return self.seconds * (_LONGER if has_ranks else 1.0)

    def for_disk(self) -> float:
        """For somebody who saves, and whose file system does not answer."""
        return _UNKNOWN_SECONDS if self.seconds is None else max(60.0, self.seconds * _LONGER)

    def from_term_to_kill(self) -> float:
        """For whoever saves something when told to end."""
        return self._within(20.0)

    def after_kill(self) -> float:
        """For the system, to take away one that has much memory."""
        return self._within(30.0)

    def _within(self, most: float) -> float:
        return most if self.seconds is None else min(most, max(2.0, self.seconds))


def _duration(text: str) -> float:
    from holdfast._errors import SettingsError
    from holdfast._settings import parse_seconds  # slow to import, and rarely needed

    try:
        return parse_seconds(text, "--hang-timeout")
    except SettingsError:
        raise ValueError(f"{text!r} is neither a number of seconds, nor 5min, nor auto") from None
