"""The names of variables, remembered: to make 800 of them takes longer than to copy the values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any


class Names:
    """What the variables of an object are called, as long as it is made of the same parts."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, tuple[list[Any], list[str], list[str]]] = (
            weakref.WeakKeyDictionary()
        )

    def of(
        self,
        owner: Any,
        parts: Sequence[Any],
        words: Sequence[str],
        variables: Sequence[Any],
        make: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """The variables by name, which depend on `parts` (which objects they are) and `words`."""
        known = self._known.get(owner)
        if known is not None:
            references, then, names = known
            if (
                list(words) == then
                and len(references) == len(parts)
                and all(
                    reference() is part for reference, part in zip(references, parts, strict=True)
                )
            ):
                return dict(zip(names, variables, strict=True))
        found = make()
        self._known.pop(owner, None)
        if len(found) == len(variables):
            # A reference would keep the memory of variables that are gone.
            self._known[owner] = (list(map(weakref.ref, parts)), list(words), list(found))
        return found
