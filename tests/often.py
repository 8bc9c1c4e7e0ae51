"""Parameters of which few run in `make test`, and all of them at night."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet


def few(values: Iterable[Any], often: Collection[Any]) -> list[ParameterSet]:
    """One parameter for each value; those that are not in `often` are nightly."""
    return [pytest.param(v, marks=[] if v in often else [pytest.mark.nightly]) for v in values]
