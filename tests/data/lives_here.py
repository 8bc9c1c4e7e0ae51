"""Lives of a run within this process, for what needs no signal: quick, and easy to look into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast

SETTINGS = holdfast.Settings(max_overhead=1.0)


class Interrupted(Exception):
    """The end of a life, as if its script had failed."""


def train(
    folder: Path,
    make: Callable[[], Any],
    *,
    epochs: int = 2,
    accumulate: int = 1,
    end_after: int | None = None,
    each: Callable[[holdfast.Run], Any] = lambda _: None,
    **state: Any,
) -> list[Any]:
    """What one life is given, or what `each` makes of it.

    With `end_after` it ends at the boundary behind so many batches.
    """
    given: list[Any] = []
    saved = None
    try:
        with holdfast.Run(folder, settings=SETTINGS, **state) as run:
            loader = make()
            for _ in run.epochs(epochs):
                for batch in run.batches(loader, accumulate=accumulate):
                    if saved is not None and saved.step is not None:
                        raise Interrupted
                    found = each(run)
                    given.append(batch if found is None else found)
                    if len(given) == end_after:
                        saved = run.save()
    except Interrupted:
        pass
    return given


def train_in_lives(folder: Path, make: Callable[[], Any], ends: list[int], **options: Any) -> Any:
    """What all lives together are given, one ended after the other."""
    given: list[Any] = []
    for end_after in [*ends, None]:
        given += train(folder, make, end_after=end_after, **options)
    return given
