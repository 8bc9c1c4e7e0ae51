"""Values out of records that somebody else may have written: of the kind that is meant, or None.

JSON has numbers of any length, and Python's reader lets NaN and Infinity pass: neither can be
reckoned with, nor shown by a page.
"""

from __future__ import annotations

_MOST = 1 << 53  # to which a page can count, and which no step or moment has reached


def whole(value: object) -> int | None:
    """A whole number.

    >>> whole(7), whole("7"), whole(10**400)
    (7, None, None)
    """
    return value if isinstance(value, int) and -_MOST < value < _MOST else None


def real(value: object) -> float | None:
    """A finite number.

    >>> real(7), real(float("nan")), real([7])
    (7.0, None, None)
    """
    # NaN is not between any two numbers.
    return float(value) if isinstance(value, int | float) and -_MOST < value < _MOST else None


def text(value: object) -> str | None:
    """A text."""
    return value if isinstance(value, str) else None
